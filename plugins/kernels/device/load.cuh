// Loads of 8 and 16 bytes from memory, as PTX names them. Volatile, so they keep the order of the source: then the
// compiler neither delays them to their use nor keeps many addresses.
#pragma once

#include <stdint.h>

#include "device/element.cuh"

namespace twell {

// The function `name` of an address: what `load` gives there.
#define TWELL_LOAD_FOUR(name, Type, load)                                         \
    __device__ __forceinline__ uint4 name(Type const* pointer) {                  \
        uint4 words;                                                              \
        asm volatile("ld.global" load ".v4.u32 {%0, %1, %2, %3}, [%4];"           \
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) \
                     : "l"(pointer));                                             \
        return words;                                                             \
    }
#define TWELL_LOAD_TWO(name, Type, load)                                                                        \
    __device__ __forceinline__ uint2 name(Type const* pointer) {                                                \
        uint2 words;                                                                                            \
        asm volatile("ld.global" load ".v2.u32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(pointer)); \
        return words;                                                                                           \
    }

// The same where there is something at the address, else zeros.
#define TWELL_LOAD_FOUR_IF(name, Type, load)                                  \
    __device__ __forceinline__ uint4 name(Type const* pointer, bool exists) { \
        uint4 words;                                                          \
        asm volatile(                                                         \
            "{\n"                                                             \
            ".reg .pred exists;\n"                                            \
            "setp.ne.s32 exists, %5, 0;\n"                                    \
            "mov.b32 %0, 0;\n"                                                \
            "mov.b32 %1, 0;\n"                                                \
            "mov.b32 %2, 0;\n"                                                \
            "mov.b32 %3, 0;\n"                                                \
            "@exists ld.global" load                                          \
            ".v4.u32 {%0, %1, %2, %3}, [%4];\n"                               \
            "}\n"                                                             \
            : "=&r"(words.x), "=&r"(words.y), "=&r"(words.z), "=&r"(words.w)  \
            : "l"(pointer), "r"(static_cast<int>(exists)));                   \
        return words;                                                         \
    }
#define TWELL_LOAD_TWO_IF(name, Type, load)                                   \
    __device__ __forceinline__ uint2 name(Type const* pointer, bool exists) { \
        uint2 words;                                                          \
        asm volatile(                                                         \
            "{\n"                                                             \
            ".reg .pred exists;\n"                                            \
            "setp.ne.s32 exists, %3, 0;\n"                                    \
            "mov.b32 %0, 0;\n"                                                \
            "mov.b32 %1, 0;\n"                                                \
            "@exists ld.global" load                                          \
            ".v2.u32 {%0, %1}, [%2];\n"                                       \
            "}\n"                                                             \
            : "=&r"(words.x), "=&r"(words.y)                                  \
            : "l"(pointer), "r"(static_cast<int>(exists)));                   \
        return words;                                                         \
    }

// Eight elements, only of memory that no kernel of the call has written: see dependent_launch.cuh.
TWELL_LOAD_FOUR(load_vector, uint16_t, ".nc")
TWELL_LOAD_TWO(load_vector, E4m3, ".nc")
TWELL_LOAD_FOUR_IF(load_vector_if, uint16_t, ".nc")
TWELL_LOAD_TWO_IF(load_vector_if, E4m3, ".nc")

// Eight elements of memory that another kernel of the call may have written; of E4M3 sixteen, also of other memory.
TWELL_LOAD_FOUR(load_written_vector, uint16_t, "")
TWELL_LOAD_FOUR_IF(load_written_vector_if, uint16_t, "")
TWELL_LOAD_FOUR(load_vectors, E4m3, ".nc")
TWELL_LOAD_FOUR(load_written_vectors, E4m3, "")

// Not from L1, which may hold what was there before.
TWELL_LOAD_FOUR_IF(load_from_l2_if, uint16_t, ".cg")

// Weights that are read once: they take no place in L1.
TWELL_LOAD_FOUR_IF(load_weights_if, void, ".nc.L1::no_allocate.L2::128B")
TWELL_LOAD_TWO_IF(half_weights_if, void, ".nc.L1::no_allocate.L2::128B")

#undef TWELL_LOAD_FOUR
#undef TWELL_LOAD_TWO
#undef TWELL_LOAD_FOUR_IF
#undef TWELL_LOAD_TWO_IF

__device__ __forceinline__ float4 load_from_l2_if(float const* pointer, bool exists) {
    uint4 const words = load_from_l2_if(reinterpret_cast<uint16_t const*>(pointer), exists);
    return make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                       __uint_as_float(words.w));
}

// A word that another CTA may change, before all that it wrote before that.
__device__ __forceinline__ uint32_t load_acquire(uint32_t const* pointer) {
    uint32_t word;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(pointer) : "memory");
    return word;
}

}  // namespace twell

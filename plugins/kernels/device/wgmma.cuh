// The warpgroup matrix instruction of sm_90a, for all extents from 16 to 256.
//
// Assembler text cannot be computed by templates, so it is put together by macros: each list of registers is the
// shorter one and the rest.
#pragma once

#include "device/element.cuh"

namespace twell {

// Wgmma<Element, N>::run: d[64, N] = a[64, 16] b[N, 16]^T + (accumulate ? d : 0), fp32 accumulation, by one warpgroup.
// a and b are shared-memory descriptors: b's of a K-major matrix, a's too unless kTransposedA, then of an M-major one.
// Or a lies in registers, as in the MMA instruction of a warp, 16 rows each.
template <class Element, int N>
struct Wgmma;

// clang-format off
#define TWELL_REGISTERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TWELL_REGISTERS_12 TWELL_REGISTERS_8 ", %8, %9, %10, %11"
#define TWELL_REGISTERS_16 TWELL_REGISTERS_12 ", %12, %13, %14, %15"
#define TWELL_REGISTERS_20 TWELL_REGISTERS_16 ", %16, %17, %18, %19"
#define TWELL_REGISTERS_24 TWELL_REGISTERS_20 ", %20, %21, %22, %23"
#define TWELL_REGISTERS_28 TWELL_REGISTERS_24 ", %24, %25, %26, %27"
#define TWELL_REGISTERS_32 TWELL_REGISTERS_28 ", %28, %29, %30, %31"
#define TWELL_REGISTERS_36 TWELL_REGISTERS_32 ", %32, %33, %34, %35"
#define TWELL_REGISTERS_40 TWELL_REGISTERS_36 ", %36, %37, %38, %39"
#define TWELL_REGISTERS_44 TWELL_REGISTERS_40 ", %40, %41, %42, %43"
#define TWELL_REGISTERS_48 TWELL_REGISTERS_44 ", %44, %45, %46, %47"
#define TWELL_REGISTERS_52 TWELL_REGISTERS_48 ", %48, %49, %50, %51"
#define TWELL_REGISTERS_56 TWELL_REGISTERS_52 ", %52, %53, %54, %55"
#define TWELL_REGISTERS_60 TWELL_REGISTERS_56 ", %56, %57, %58, %59"
#define TWELL_REGISTERS_64 TWELL_REGISTERS_60 ", %60, %61, %62, %63"
#define TWELL_REGISTERS_68 TWELL_REGISTERS_64 ", %64, %65, %66, %67"
#define TWELL_REGISTERS_72 TWELL_REGISTERS_68 ", %68, %69, %70, %71"
#define TWELL_REGISTERS_76 TWELL_REGISTERS_72 ", %72, %73, %74, %75"
#define TWELL_REGISTERS_80 TWELL_REGISTERS_76 ", %76, %77, %78, %79"
#define TWELL_REGISTERS_84 TWELL_REGISTERS_80 ", %80, %81, %82, %83"
#define TWELL_REGISTERS_88 TWELL_REGISTERS_84 ", %84, %85, %86, %87"
#define TWELL_REGISTERS_92 TWELL_REGISTERS_88 ", %88, %89, %90, %91"
#define TWELL_REGISTERS_96 TWELL_REGISTERS_92 ", %92, %93, %94, %95"
#define TWELL_REGISTERS_100 TWELL_REGISTERS_96 ", %96, %97, %98, %99"
#define TWELL_REGISTERS_104 TWELL_REGISTERS_100 ", %100, %101, %102, %103"
#define TWELL_REGISTERS_108 TWELL_REGISTERS_104 ", %104, %105, %106, %107"
#define TWELL_REGISTERS_112 TWELL_REGISTERS_108 ", %108, %109, %110, %111"
#define TWELL_REGISTERS_116 TWELL_REGISTERS_112 ", %112, %113, %114, %115"
#define TWELL_REGISTERS_120 TWELL_REGISTERS_116 ", %116, %117, %118, %119"
#define TWELL_REGISTERS_124 TWELL_REGISTERS_120 ", %120, %121, %122, %123"
#define TWELL_REGISTERS_128 TWELL_REGISTERS_124 ", %124, %125, %126, %127"

#define TWELL_OPERANDS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define TWELL_OPERANDS_8 TWELL_OPERANDS_4(0), TWELL_OPERANDS_4(4)
#define TWELL_OPERANDS_12 TWELL_OPERANDS_8, TWELL_OPERANDS_4(8)
#define TWELL_OPERANDS_16 TWELL_OPERANDS_12, TWELL_OPERANDS_4(12)
#define TWELL_OPERANDS_20 TWELL_OPERANDS_16, TWELL_OPERANDS_4(16)
#define TWELL_OPERANDS_24 TWELL_OPERANDS_20, TWELL_OPERANDS_4(20)
#define TWELL_OPERANDS_28 TWELL_OPERANDS_24, TWELL_OPERANDS_4(24)
#define TWELL_OPERANDS_32 TWELL_OPERANDS_28, TWELL_OPERANDS_4(28)
#define TWELL_OPERANDS_36 TWELL_OPERANDS_32, TWELL_OPERANDS_4(32)
#define TWELL_OPERANDS_40 TWELL_OPERANDS_36, TWELL_OPERANDS_4(36)
#define TWELL_OPERANDS_44 TWELL_OPERANDS_40, TWELL_OPERANDS_4(40)
#define TWELL_OPERANDS_48 TWELL_OPERANDS_44, TWELL_OPERANDS_4(44)
#define TWELL_OPERANDS_52 TWELL_OPERANDS_48, TWELL_OPERANDS_4(48)
#define TWELL_OPERANDS_56 TWELL_OPERANDS_52, TWELL_OPERANDS_4(52)
#define TWELL_OPERANDS_60 TWELL_OPERANDS_56, TWELL_OPERANDS_4(56)
#define TWELL_OPERANDS_64 TWELL_OPERANDS_60, TWELL_OPERANDS_4(60)
#define TWELL_OPERANDS_68 TWELL_OPERANDS_64, TWELL_OPERANDS_4(64)
#define TWELL_OPERANDS_72 TWELL_OPERANDS_68, TWELL_OPERANDS_4(68)
#define TWELL_OPERANDS_76 TWELL_OPERANDS_72, TWELL_OPERANDS_4(72)
#define TWELL_OPERANDS_80 TWELL_OPERANDS_76, TWELL_OPERANDS_4(76)
#define TWELL_OPERANDS_84 TWELL_OPERANDS_80, TWELL_OPERANDS_4(80)
#define TWELL_OPERANDS_88 TWELL_OPERANDS_84, TWELL_OPERANDS_4(84)
#define TWELL_OPERANDS_92 TWELL_OPERANDS_88, TWELL_OPERANDS_4(88)
#define TWELL_OPERANDS_96 TWELL_OPERANDS_92, TWELL_OPERANDS_4(92)
#define TWELL_OPERANDS_100 TWELL_OPERANDS_96, TWELL_OPERANDS_4(96)
#define TWELL_OPERANDS_104 TWELL_OPERANDS_100, TWELL_OPERANDS_4(100)
#define TWELL_OPERANDS_108 TWELL_OPERANDS_104, TWELL_OPERANDS_4(104)
#define TWELL_OPERANDS_112 TWELL_OPERANDS_108, TWELL_OPERANDS_4(108)
#define TWELL_OPERANDS_116 TWELL_OPERANDS_112, TWELL_OPERANDS_4(112)
#define TWELL_OPERANDS_120 TWELL_OPERANDS_116, TWELL_OPERANDS_4(116)
#define TWELL_OPERANDS_124 TWELL_OPERANDS_120, TWELL_OPERANDS_4(120)
#define TWELL_OPERANDS_128 TWELL_OPERANDS_124, TWELL_OPERANDS_4(124)

#define TWELL_WGMMA_OF(Element, type, n, registers, operands, num_registers, a_idx, b_idx, accumulate_idx, trans_idx, \
                       idx_4, idx_5)                                                                                 \
    template <>                                                                                                      \
    struct Wgmma<Element, n> {                                                                                       \
        template <bool kTransposedA>                                                                                 \
        static __device__ __forceinline__ void run(float (&d)[num_registers], uint64_t a, uint64_t b,                \
                                                   int accumulate) {                                                 \
            asm volatile(                                                                                            \
                "{\n"                                                                                                \
                ".reg .pred accumulate;\n"                                                                           \
                "setp.ne.b32 accumulate, %" #accumulate_idx ", 0;\n"                                                 \
                "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, "                 \
                "%" #a_idx ", %" #b_idx ", accumulate, 1, 1, %" #trans_idx ", 0;\n"                                  \
                "}\n"                                                                                                \
                : operands                                                                                           \
                : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposedA ? 1 : 0));                                       \
        }                                                                                                            \
        static __device__ __forceinline__ void run(float (&d)[num_registers], uint32_t const (&a)[4], uint64_t b,    \
                                                   int accumulate) {                                                 \
            asm volatile(                                                                                            \
                "{\n"                                                                                                \
                ".reg .pred accumulate;\n"                                                                           \
                "setp.ne.b32 accumulate, %" #idx_5 ", 0;\n"                                                          \
                "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, "                 \
                "{%" #a_idx ", %" #b_idx ", %" #accumulate_idx ", %" #trans_idx "}, %" #idx_4 ", accumulate, 1, 1, 0;\n" \
                "}\n"                                                                                                \
                : operands                                                                                           \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                              \
        }                                                                                                            \
    };
// Of FP8: a step is 32 along K, as many bytes, and both operands are K-major. Or a lies in registers: each has
// four bytes, from 4 (lane % 4) on, of row lane / 4 and of the eighth after it, then the same from 16 on.
#define TWELL_WGMMA_OF_BYTES(n, registers, operands, num_registers, idx_0, idx_1, idx_2, idx_3, idx_4, idx_5)        \
    template <>                                                                                                      \
    struct Wgmma<E4m3, n> {                                                                                          \
        template <bool kTransposedA>                                                                                 \
        static __device__ __forceinline__ void run(float (&d)[num_registers], uint64_t a, uint64_t b,                \
                                                   int accumulate) {                                                 \
            static_assert(!kTransposedA, "there is no such instruction");                                            \
            asm volatile(                                                                                            \
                "{\n"                                                                                                \
                ".reg .pred accumulate;\n"                                                                           \
                "setp.ne.b32 accumulate, %" #idx_2 ", 0;\n"                                                          \
                "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, "                         \
                "%" #idx_0 ", %" #idx_1 ", accumulate, 1, 1;\n"                                                      \
                "}\n"                                                                                                \
                : operands                                                                                           \
                : "l"(a), "l"(b), "r"(accumulate));                                                                  \
        }                                                                                                            \
        static __device__ __forceinline__ void run(float (&d)[num_registers], uint32_t const (&a)[4], uint64_t b,    \
                                                   int accumulate) {                                                 \
            asm volatile(                                                                                            \
                "{\n"                                                                                                \
                ".reg .pred accumulate;\n"                                                                           \
                "setp.ne.b32 accumulate, %" #idx_5 ", 0;\n"                                                          \
                "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, "                         \
                "{%" #idx_0 ", %" #idx_1 ", %" #idx_2 ", %" #idx_3 "}, %" #idx_4 ", accumulate, 1, 1;\n"             \
                "}\n"                                                                                                \
                : operands                                                                                           \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                              \
        }                                                                                                            \
    };
#define TWELL_WGMMA(n, num_registers, a_idx, b_idx, accumulate_idx, trans_idx, idx_4, idx_5)                         \
    TWELL_WGMMA_OF_BYTES(n, TWELL_REGISTERS_##num_registers, TWELL_OPERANDS_##num_registers, num_registers, a_idx,   \
                         b_idx, accumulate_idx, trans_idx, idx_4, idx_5)                                             \
    TWELL_WGMMA_OF(Bf16, "bf16", n, TWELL_REGISTERS_##num_registers, TWELL_OPERANDS_##num_registers, num_registers,  \
                   a_idx, b_idx, accumulate_idx, trans_idx, idx_4, idx_5)                                                          \
    TWELL_WGMMA_OF(Fp16, "f16", n, TWELL_REGISTERS_##num_registers, TWELL_OPERANDS_##num_registers, num_registers,   \
                   a_idx, b_idx, accumulate_idx, trans_idx, idx_4, idx_5)

TWELL_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
TWELL_WGMMA(24, 12, 12, 13, 14, 15, 16, 17)
TWELL_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
TWELL_WGMMA(40, 20, 20, 21, 22, 23, 24, 25)
TWELL_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
TWELL_WGMMA(56, 28, 28, 29, 30, 31, 32, 33)
TWELL_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
TWELL_WGMMA(72, 36, 36, 37, 38, 39, 40, 41)
TWELL_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
TWELL_WGMMA(88, 44, 44, 45, 46, 47, 48, 49)
TWELL_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
TWELL_WGMMA(104, 52, 52, 53, 54, 55, 56, 57)
TWELL_WGMMA(112, 56, 56, 57, 58, 59, 60, 61)
TWELL_WGMMA(120, 60, 60, 61, 62, 63, 64, 65)
TWELL_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
TWELL_WGMMA(136, 68, 68, 69, 70, 71, 72, 73)
TWELL_WGMMA(144, 72, 72, 73, 74, 75, 76, 77)
TWELL_WGMMA(152, 76, 76, 77, 78, 79, 80, 81)
TWELL_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
TWELL_WGMMA(168, 84, 84, 85, 86, 87, 88, 89)
TWELL_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
TWELL_WGMMA(184, 92, 92, 93, 94, 95, 96, 97)
TWELL_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
TWELL_WGMMA(200, 100, 100, 101, 102, 103, 104, 105)
TWELL_WGMMA(208, 104, 104, 105, 106, 107, 108, 109)
TWELL_WGMMA(216, 108, 108, 109, 110, 111, 112, 113)
TWELL_WGMMA(224, 112, 112, 113, 114, 115, 116, 117)
TWELL_WGMMA(232, 116, 116, 117, 118, 119, 120, 121)
TWELL_WGMMA(240, 120, 120, 121, 122, 123, 124, 125)
TWELL_WGMMA(248, 124, 124, 125, 126, 127, 128, 129)
TWELL_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)

#undef TWELL_WGMMA_OF
#undef TWELL_WGMMA_OF_BYTES
#undef TWELL_WGMMA
// clang-format on

__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

}  // namespace twell

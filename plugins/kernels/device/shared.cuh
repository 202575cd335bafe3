// Shared memory by its 32-bit addresses, which PTX takes.
#pragma once

#include <stdint.h>

namespace twell {

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices, from rows of 16 bytes whose addresses the lanes have; kTransposed: each is transposed.
template <bool kTransposed>
__device__ __forceinline__ void load_matrix_x4(uint32_t (&fragment)[4], uint32_t address) {
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                     : "r"(address)
                     : "memory");
    }
}

// Four 8 x 8 matrices, transposed: lanes 8 i to 8 i + 7 give the addresses of matrix i's columns.
__device__ __forceinline__ void store_transposed_x4(uint32_t address, uint32_t const (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
                 : "memory");
}

__device__ __forceinline__ void store_x4(uint32_t address, uint32_t const (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
                 "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
                 : "memory");
}

__device__ __forceinline__ void store_x2(uint32_t address, uint32_t fragment0, uint32_t fragment1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(fragment0),
                 "r"(fragment1)
                 : "memory");
}

__device__ __forceinline__ void store_transposed_x2(uint32_t address, uint32_t fragment0, uint32_t fragment1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(fragment0),
                 "r"(fragment1)
                 : "memory");
}

__device__ __forceinline__ uint4 load_chunk(uint32_t address) {
    uint4 chunk;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(address)
                 : "memory");
    return chunk;
}

__device__ __forceinline__ uint2 load_half_chunk(uint32_t address) {
    uint2 chunk;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(chunk.x), "=r"(chunk.y) : "r"(address) : "memory");
    return chunk;
}

__device__ __forceinline__ float4 load_floats(uint32_t address) {
    float4 values;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(values.x), "=f"(values.y), "=f"(values.z), "=f"(values.w)
                 : "r"(address)
                 : "memory");
    return values;
}

__device__ __forceinline__ void store_floats(uint32_t address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

__device__ __forceinline__ void store_chunk(uint32_t address, uint4 chunk) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z),
                 "r"(chunk.w)
                 : "memory");
}

__device__ __forceinline__ void add_to_shared_word(uint32_t address, uint32_t value) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared_word(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// The same shared address in another CTA of the cluster.
__device__ __forceinline__ uint32_t address_in_cta(uint32_t address, uint32_t cta) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
    return remote;
}

__device__ __forceinline__ uint4 load_chunk_of_cluster(uint32_t address) {
    uint4 chunk;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(address)
                 : "memory");
    return chunk;
}

}  // namespace twell

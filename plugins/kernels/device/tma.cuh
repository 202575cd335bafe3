// TMA (sm_90a): boxes of matrices to shared memory or to L2. Rows and columns outside the matrix become zeros and count
// as bytes that came.
#pragma once

#include <cuda.h>
#include <stdint.h>

#include "device/cluster.cuh"

namespace twell {

__device__ __forceinline__ void prefetch_map(CUtensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t destination, CUtensorMap const& map, uint32_t barrier, int column,
                                         int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same, of one of several matrices.
__device__ __forceinline__ void load_box(uint32_t destination, CUtensorMap const& map, uint32_t barrier, int column,
                                         int row, int matrix) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row), "r"(matrix)
        : "memory");
}

// Brings what load_box would load to L2.
__device__ __forceinline__ void prefetch_box(CUtensorMap const& map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
                 : "memory");
}

// load_box into all CTAs of the cluster: at the same place, signalled at the same barrier of each.
__device__ __forceinline__ void load_box_for_all(uint32_t destination, CUtensorMap const& map, uint32_t barrier,
                                                 int column, int row) {
    uint16_t const ctas = (1 << kClusterSize) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(destination),
        "l"(&map), "r"(barrier), "h"(ctas), "r"(column), "r"(row)
        : "memory");
}

// Brings `bytes` bytes, a multiple of 16, to L2.
__device__ __forceinline__ void prefetch_bytes(void const* pointer, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(pointer), "r"(bytes) : "memory");
}

// Makes all that this thread has stored so far visible to TMA; or only its stores to the CTA's shared memory.
__device__ __forceinline__ void fence_for_tma() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_shared_for_tma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Data loaded with this policy leave L2 first: for data that no other CTA reads, so that L2 keeps those that the next
// kernel needs.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// load_box_for_all with a policy of the L2 cache.
__device__ __forceinline__ void load_box_for_all(uint32_t destination, CUtensorMap const& map, uint32_t barrier,
                                                 int column, int row, uint64_t policy) {
    uint16_t const ctas = (1 << kClusterSize) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "h"(ctas), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

// Brings a line of memory to L2.
__device__ __forceinline__ void prefetch_line(void const* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer) : "memory");
}

}  // namespace twell

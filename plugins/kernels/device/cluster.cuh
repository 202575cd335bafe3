// Clusters of CTAs, on compute capability 9.0.
#pragma once

#include <stdint.h>

namespace twell {

// CTAs of a cluster, in every kernel that has clusters of a fixed size.
constexpr int kClusterSize = 2;

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::
            : "memory");
}

// The halves of a barrier without release: this CTA has come; wait for all. For a CTA from which the others read
// nothing.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void wait_for_arrivals() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Barrier without release, for a CTA from which the others read nothing. sync_cluster() would wait until all that this
// CTA has stored in memory is there.
__device__ __forceinline__ void meet_cluster() {
    asm volatile(
        "barrier.cluster.arrive.relaxed;\n"
        "barrier.cluster.wait;\n" ::
            : "memory");
}

}  // namespace twell

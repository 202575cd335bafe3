// Clusters of CTAs, on compute capability 9.0.
#pragma once

#include <stdint.h>

namespace twell {

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

// The same for who has nothing to tell the other CTAs: that would have to wait until all that it has stored in memory
// is there.
__device__ __forceinline__ void meet_cluster() {
    asm volatile(
        "barrier.cluster.arrive.relaxed;\n"
        "barrier.cluster.wait;\n" ::
            : "memory");
}

}  // namespace twell

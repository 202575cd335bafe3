// Barriers in shared memory (sm_90), which count threads that arrive and bytes that come.
#pragma once

#include <stdint.h>

#include "device/cluster.cuh"

namespace twell {

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Waits for the end of the phase with this parity. A fresh barrier counts as having ended a phase of parity 1.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// After init_barrier, before sync_cluster().
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of this name in a CTA of the cluster. NOTE: orders nothing for the other CTA's ordinary reads.
__device__ __forceinline__ void arrive_at_cta(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

// The same, and what this thread has seen or done before is visible to threads that wait there with wait_for_cluster().
__device__ __forceinline__ void release_to_cta(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

__device__ __forceinline__ void wait_for_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Leaves a number in another CTA's shared memory, and signals its 4 bytes at a barrier there: addresses of the cluster.
__device__ __forceinline__ void send_float(uint32_t address, float value, uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address),
                 "f"(value), "r"(barrier)
                 : "memory");
}

// Leaves a word in shared memory of the cluster's other CTA, and signals its 4 bytes at a barrier there.
__device__ __forceinline__ void send_word(uint32_t address, int value, uint32_t barrier) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %3;\n"
        "mapa.shared::cluster.u32 remote_barrier, %2, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [remote], %1, [remote_barrier];\n"
        "}\n" ::"r"(address),
        "r"(value), "r"(barrier), "r"(cluster_rank() ^ 1)
        : "memory");
}

}  // namespace twell

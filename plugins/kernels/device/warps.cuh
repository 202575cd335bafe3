// Shared by the warps of a CTA: registers, named barriers; and a matrix that lies in the registers of one.
#pragma once

#include <stdint.h>

namespace twell {

// By all warps of a warpgroup, on compute capability 9.0: from now on a thread has so many registers, more than before
// (once other warpgroups have given some) or fewer.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// __syncthreads of so many threads of the CTA, at a barrier other than its own, 0.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void sync_some_threads() {
    asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}

// Of an 8 x 8 matrix: lane 4 g + t has elements 2 t and 2 t + 1 of row g.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
    uint32_t result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

}  // namespace twell

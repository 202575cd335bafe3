// Copies from device memory to shared memory that need no registers, 16 bytes a thread, from sm_80 on.
#pragma once

#include <stdint.h>

#include "device/element.cuh"

namespace twell {

// Copies 16 bytes to shared memory, or fills them with zeros; then the source is not read and may be any address.
__device__ __forceinline__ void copy_async(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

// Copies 16 bytes to shared memory.
__device__ __forceinline__ void copy_async(uint32_t destination, void const* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

// Ends a group of copies.
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all groups but the last kPending have come.
template <int kPending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same through the L1 cache: for what other warps read, too.
__device__ __forceinline__ void copy_async_cached(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

// Copies eight elements of weights to shared memory, or fills them with zeros.
__device__ __forceinline__ void copy_vector_async(uint32_t destination, uint16_t const* source, bool valid) {
    copy_async(destination, source, valid);
}
__device__ __forceinline__ void copy_vector_async(uint32_t destination, E4m3 const* source, bool valid) {
    int const bytes = valid ? 8 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}

}  // namespace twell

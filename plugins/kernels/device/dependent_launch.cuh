// Programmatic dependent launch, from sm_90 on: a kernel's CTAs may start while the kernel before it still runs, and
// wait here. Older devices do nothing: there the launch itself waits.
#pragma once

namespace twell {

// No memory may be read before this, unless it is known to be final. NOTE: even then __ldg must not read memory that
// the kernel before writes: the read-only cache may hold what was there when this kernel started.
__device__ __forceinline__ void wait_for_previous_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as every CTA has come here: CTAs that wait have a place by then, too.
__device__ __forceinline__ void allow_dependent_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether this CTA may leave before the kernel before has ended, as the launch has nothing to do. One CTA stays, so
// that the next launch does not take the end of this one for the end of those before.
__device__ __forceinline__ bool ends_early(bool has_nothing_to_do) { return has_nothing_to_do && blockIdx.x != 0; }

}  // namespace twell

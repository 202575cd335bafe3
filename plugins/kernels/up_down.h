// Sparse up and down projections, fused: y = sum over active neurons n of h[n] Wd[n, :] + bd.
#ifndef TWELL_KERNELS_UP_DOWN_H_
#define TWELL_KERNELS_UP_DOWN_H_

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// Bytes of scratch memory that launch_up_down needs; never shrinks when `tokens` grows.
size_t up_down_scratch_bytes(twell_problem const& problem);

// Enqueues the schedule of the rows and the up+down kernel that suits the device and the row count. Same preconditions
// as launch_gate; `scratch` is 256-byte aligned.
cudaError_t launch_up_down(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                           void* scratch, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_UP_DOWN_H_

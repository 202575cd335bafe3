// Sparse up and down projections, fused: y = sum over active neurons n of h[n] Wd[n, :] + bd.
#ifndef TWELL_KERNELS_UP_DOWN_H_
#define TWELL_KERNELS_UP_DOWN_H_

#include "twell/twell.h"

namespace twell {

// Enqueues the up+down kernel that suits the device and the row count. Same preconditions as launch_gate.
cudaError_t launch_up_down(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                           cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_UP_DOWN_H_

// Gate projection with packing: packed = TwELL(act(x Wg^T + bg)).
#ifndef TWELL_KERNELS_GATE_H_
#define TWELL_KERNELS_GATE_H_

#include "twell/twell.h"

namespace twell {

// Enqueues the gate kernel that suits the device and the row count. The problem has been validated, has at least one
// row, and the pointers have been checked.
cudaError_t launch_gate(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed,
                        cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_GATE_H_

// Gate projection with packing: packed = TwELL(act(x Wg^T + bg)).
#ifndef TWELL_KERNELS_GATE_H_
#define TWELL_KERNELS_GATE_H_

#include "launch.cuh"
#include "twell/twell.h"

namespace twell {

// Enqueues the gate kernel. `spilled` may be null, see pack.cuh. The problem has been validated, has at least one row,
// and the pointers have been checked.
cudaError_t launch_gate(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, uint16_t* spilled,
                        Device const& device, cudaStream_t stream, Kernels choice = Kernels::kBest);

}  // namespace twell

#endif  // TWELL_KERNELS_GATE_H_

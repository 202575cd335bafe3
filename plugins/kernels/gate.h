// Gate projection with packing: packed = TwELL(act(x Wg^T + bg)).
#ifndef TWELL_KERNELS_GATE_H_
#define TWELL_KERNELS_GATE_H_

#include "twell/twell.h"

namespace twell {

enum class GateKernel : int32_t {
    kBest = 0,     // the one that suits the device and the row count
    kGeneric = 1,  // the others are there to be tested and measured
    kSm90 = 2,     // cudaErrorNotSupported where it cannot run
};

// Enqueues the gate kernel. `spilled` may be null, see pack.cuh. The problem has been validated, has at least one row,
// and the pointers have been checked.
cudaError_t launch_gate(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, uint16_t* spilled,
                        cudaStream_t stream, GateKernel choice = GateKernel::kBest);

}  // namespace twell

#endif  // TWELL_KERNELS_GATE_H_

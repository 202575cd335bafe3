// Few tokens on compute capability 9.0: built when the architectures include sm_90a. See gate_up_sm90.cuh and
// down_sm90.cuh.
#ifndef TWELL_KERNELS_FEW_SM90_H_
#define TWELL_KERNELS_FEW_SM90_H_

#include "few.h"
#include "launch.cuh"
#include "twell/twell.h"

namespace twell {

// Whether the kernels suit the problem, of up to kMostTokensFew tokens.
bool few_sm90_supports(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_few_sm90(Text& text);

// Enqueue the two halves of the block, on a device of compute capability 9.0: the gate and up projections, which give
// their number of CTAs, and the down projection of what they, or those of gate_up_few.cuh, left. Same preconditions as
// launch_few.
cudaError_t launch_gate_up_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                                int& num_ctas, Device const& device, cudaStream_t stream);
cudaError_t launch_down_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                             int num_gate_ctas, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_FEW_SM90_H_

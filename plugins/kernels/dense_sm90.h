// The dense path on compute capability 9.0, launch_dense_block (dense.h) included. Built when the architectures include
// sm_90a.
#ifndef TWELL_KERNELS_DENSE_SM90_H_
#define TWELL_KERNELS_DENSE_SM90_H_

#include "dense.h"

namespace twell {

// Whether the kernels can compute this problem; on which device, the caller knows.
bool dense_sm90_supports(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_dense_sm90(Text& text);

PathCosts dense_sm90_costs(twell_problem const& problem, Device const& device, bool with_chunks);

// See launch_dense.
cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                              Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_DENSE_SM90_H_

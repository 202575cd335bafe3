// The dense path for every GPU from sm_80 on.
#ifndef TWELL_KERNELS_DENSE_GENERIC_H_
#define TWELL_KERNELS_DENSE_GENERIC_H_

#include "dense.h"

namespace twell {

PathCosts dense_generic_costs(twell_problem const& problem, Device const& device);

// The rows of the configurations, a line each.
void list_dense_generic(Text& text);

// See launch_dense.
cudaError_t launch_dense_generic(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                                 Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_DENSE_GENERIC_H_

// The dense path on compute capability 9.0, launch_dense and launch_dense_block included. Built when the architectures
// include sm_90a.
#ifndef TWELL_KERNELS_DENSE_SM90_H_
#define TWELL_KERNELS_DENSE_SM90_H_

#include "dense.h"

namespace twell {

// Whether the kernels can compute this problem; on which device, the caller knows.
bool dense_sm90_supports(twell_problem const& problem);

bool dense_sm90_prefers_block(twell_problem const& problem);

GuardModel dense_sm90_model(twell_problem const& problem, Device const& device);

}  // namespace twell

#endif  // TWELL_KERNELS_DENSE_SM90_H_

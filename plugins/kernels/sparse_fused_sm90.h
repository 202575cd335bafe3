// Both sparse projections in one kernel on compute capability 9.0. Built when the architectures include sm_90a.
#ifndef TWELL_KERNELS_SPARSE_FUSED_SM90_H_
#define TWELL_KERNELS_SPARSE_FUSED_SM90_H_

#include "launch.cuh"
#include "schedule.h"
#include "twell/twell.h"

namespace twell {

// Whether all neurons' weights of some columns of Wd fit shared memory, and most multiprocessors have columns.
bool sparse_fused_sm90_supports(twell_problem const& problem, Device const& device);

// Enqueues the kernel. The schedule interleaves.
cudaError_t launch_sparse_fused_sm90(twell_problem const& problem, twell_tensors const& tensors,
                                     Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_SPARSE_FUSED_SM90_H_

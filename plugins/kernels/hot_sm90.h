// u of hot neurons on compute capability 9.0. Built when the architectures include sm_90a.
#ifndef TWELL_KERNELS_HOT_SM90_H_
#define TWELL_KERNELS_HOT_SM90_H_

#include "hot.h"
#include "launch.cuh"
#include "schedule.h"
#include "twell/twell.h"

namespace twell {

// The rows of the configurations, a line each.
void list_hot_sm90(Text& text);

// Enqueues hot.u = x hot.w_up^T, unless no neuron is hot or all rows are dense. Behind launch_chunk_up: order_kernel
// has ended when a CTA starts.
cudaError_t launch_hot_sm90(twell_problem const& problem, twell_tensors const& tensors, HotNeurons const& hot,
                            Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_HOT_SM90_H_

// Hidden activations of a dense block on compute capability 9.0. Built when the architectures include sm_90a.
#ifndef TWELL_KERNELS_HIDDEN_SM90_H_
#define TWELL_KERNELS_HIDDEN_SM90_H_

#include "dense.h"
#include "launch.cuh"
#include "twell/twell.h"

namespace twell {

// The rows of the configurations, a line each.
void list_hidden_sm90(Text& text);

// Enqueues the kernel: see launch_dense_block. Also says how scratch.active is arranged.
cudaError_t launch_hidden_sm90(twell_problem const& problem, twell_tensors const& tensors, uint16_t* h,
                               BlockScratch& scratch, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_HIDDEN_SM90_H_

// Gate projection with packing for many rows on compute capability 9.0. Built when the architectures include sm_90a.
#ifndef TWELL_KERNELS_GATE_SM90_H_
#define TWELL_KERNELS_GATE_SM90_H_

#include "gate.h"
#include "launch.cuh"
#include "twell/twell.h"

namespace twell {

// Whether the kernel can compute this problem; on which device, the caller knows.
bool gate_sm90_supports(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_gate_sm90(Text& text);

// Enqueues the kernel on a device of compute capability 9.0. Same preconditions as launch_gate.
cudaError_t launch_gate_sm90(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                             Device const& device, cudaStream_t stream);

// See num_count_parts.
int num_count_parts_sm90(twell_problem const& problem, Device const& device);

}  // namespace twell

#endif  // TWELL_KERNELS_GATE_SM90_H_

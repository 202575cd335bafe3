// What runs on compute capability 9.0 alone, compiled for sm_90a. Where kHasSm90 is false there are no such functions:
// they are called in `if constexpr (kHasSm90)`.
#pragma once

#include "dense.h"
#include "few.h"
#include "gate.h"
#include "hot.h"
#include "launch.cuh"
#include "schedule.h"
#include "twell/twell.h"

namespace twell {

#if defined(TWELL_SM90A)
constexpr bool kHasSm90 = true;
#else
constexpr bool kHasSm90 = false;
#endif

inline bool is_sm90(Device const& device) { return kHasSm90 && device.major == 9 && device.minor == 0; }

// Below, problems are those for which the kernels are said to suit; preconditions are those of the functions that call
// these.

// The gate with packing, see launch_gate and num_count_parts.
bool gate_sm90_supports(twell_problem const& problem);
cudaError_t launch_gate_sm90(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                             Device const& device, cudaStream_t stream);
int num_count_parts_sm90(twell_problem const& problem, Device const& device);

// The dense path, see launch_dense, has_dense_block and is_dense_block; also launch_dense_block.
bool dense_sm90_supports(twell_problem const& problem);
bool dense_sm90_computes_block(twell_problem const& problem);
bool dense_sm90_prefers_block(twell_problem const& problem);
PathCosts dense_sm90_costs(twell_problem const& problem, Device const& device, bool with_chunks);
cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                              Schedule const& schedule, Device const& device, cudaStream_t stream);

// Hidden activations of a dense block. Also says how `active` is arranged.
cudaError_t launch_hidden_sm90(twell_problem const& problem, twell_tensors const& tensors, uint16_t* h,
                               PartSums const& parts, Active& active, Device const& device, cudaStream_t stream);

// Few tokens: whether kernels suit their number, and rows of TMA's boxes are no longer than the matrices'; the gate and
// up projections, which give their number of CTAs; the down projection of what they, or those of gate_up_few.cuh, left.
bool few_sm90_supports(twell_problem const& problem);
cudaError_t launch_gate_up_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                                int& num_ctas, Device const& device, cudaStream_t stream);
cudaError_t launch_down_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                             int num_gate_ctas, Device const& device, cudaStream_t stream);

// Enqueues hot.u = x hot.w_up^T, unless no neuron is hot or all rows are dense. Behind launch_chunk_up: order_kernel
// has ended when a CTA starts.
cudaError_t launch_hot_sm90(twell_problem const& problem, twell_tensors const& tensors, HotNeurons const& hot,
                            Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

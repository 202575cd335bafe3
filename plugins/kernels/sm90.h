// What runs on compute capability 9.0 alone, compiled for sm_90a. Where kHasSm90 is false there are no such functions:
// they are called in `if constexpr (kHasSm90)`.
#pragma once

#include "few_tokens/few.h"
#include "host/launch.h"
#include "many_tokens/chunks/hot.h"
#include "many_tokens/dense.h"
#include "many_tokens/gate.h"
#include "many_tokens/schedule.h"
#include "twell/twell.h"

namespace twell {

// Below, problems are those for which the kernels are said to suit; preconditions are those of the functions that call
// these.

// The rows of the tables of configurations, a line each; those of dense blocks are among those of the dense path.
void list_gate_sm90(Text& text);
void list_dense_sm90(Text& text);
void list_hidden_sm90(Text& text);
void list_few_sm90(Text& text);
void list_hot_sm90(Text& text);

// The gate with packing, see launch_gate and num_count_parts.
bool gate_sm90_supports(twell_problem const& problem);
cudaError_t launch_gate_sm90(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                             Device const& device, cudaStream_t stream);
int num_count_parts_sm90(twell_problem const& problem, Device const& device);

// The dense path, see launch_dense; also launch_dense_block.
bool dense_sm90_supports(twell_problem const& problem);
PathCosts dense_sm90_costs(twell_problem const& problem, Device const& device, bool with_chunks);
cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                              Schedule const& schedule, Device const& device, cudaStream_t stream);

// Hidden activations of a dense block. Also says how scratch.active is arranged.
cudaError_t launch_hidden_sm90(twell_problem const& problem, twell_tensors const& tensors, uint16_t* h,
                               BlockScratch& scratch, Device const& device, cudaStream_t stream);

// Few tokens: whether kernels suit the problem, where rows of TMA's boxes are no longer than the matrices'; the gate
// and up projections, which give their number of CTAs; the down projection of what they, or those of gate_up_few.cuh,
// left.
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

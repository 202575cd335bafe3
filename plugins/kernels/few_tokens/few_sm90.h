// The kernels for few tokens of compute capability 9.0: the gate and up projections, and the down projection of what
// they, or those of gate_up_few.cuh, left.
#pragma once

#include "few_tokens/few.h"
#include "few_tokens/few_scratch.h"
#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Whether there are kernels for the problem: call the others only then. Rows of TMA's boxes must fit the matrices.
bool few_sm90_supports(twell_problem const& problem);

// Set what the configuration says of either launch.
void choose_gate_up_sm90(FewConfig& config, twell_problem const& problem, FewScratch const& scratch,
                         Device const& device);
void choose_down_sm90(FewConfig& config, twell_problem const& problem, FewScratch const& scratch, Device const& device);

cudaError_t launch_gate_up_sm90(Call const& call, FewScratch const& scratch, FewConfig const& config);
cudaError_t launch_down_sm90(Call const& call, FewScratch const& scratch, FewConfig const& config);

// The rows of the configurations, a line each.
void list_few_sm90(Text& text);

}  // namespace twell

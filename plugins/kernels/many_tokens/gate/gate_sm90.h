// The gate kernel of compute capability 9.0.
#pragma once

#include "fp8/fp8.h"
#include "host/launch.h"
#include "many_tokens/gate/gate.h"
#include "twell/twell.h"

namespace twell {

// Whether the kernel can compute the problem: call the others only then.
bool gate_sm90_supports(twell_problem const& problem);
GateConfig choose_gate_sm90(twell_problem const& problem, Device const& device);
cudaError_t launch_gate_sm90(Call const& call, Quantised const& rounded, GateOutput const& output,
                             GateConfig const& config);

// The rows of the configurations, a line each.
void list_gate_sm90(Text& text);

}  // namespace twell

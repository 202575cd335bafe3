// Experts: each token takes a few blocks, and of their down projections the rows of active neurons.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "host/trace.h"
#include "twell/twell_experts.h"

namespace twell {

// A call, as launchers get it.
struct ExpertsCall {
    twell_experts_problem const& problem;
    twell_experts_tensors const& tensors;
    Device const& device;
    cudaStream_t stream;
};

// Bytes of workspace that launch_experts needs.
size_t experts_bytes(twell_experts_problem const& problem);

// The rows of all configurations, a line each.
void list_experts(Text& text);

// Enqueues the experts. The problem has been validated, has at least one row, and the pointers have been checked;
// `workspace` is 256-byte aligned.
cudaError_t launch_experts(ExpertsCall const& call, void* workspace);

}  // namespace twell

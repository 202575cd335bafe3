// A linear layer with its norm before and its residual behind it. Up to 16 tokens one kernel does all of it.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "host/trace.h"
#include "twell/twell.h"

namespace twell {

// The most tokens that linear_few takes at once.
constexpr int64_t kMostTokensLinearFew = 16;

// A call, as launchers get it.
struct LinearCall {
    twell_linear_problem const& problem;
    twell_linear_tensors const& tensors;
    Device const& device;
    cudaStream_t stream;
    Kernels kernels = Kernels::kBest;  // kGeneric: no cuBLASLt
};

// Bytes of workspace that launch_linear needs for the problem; never shrinks when `tokens` grows.
size_t linear_bytes(twell_linear_problem const& problem);

// The rows of all configurations, a line each.
void list_linear(Text& text);

// Enqueues the layer. The problem has been validated, has at least one row, and the pointers have been checked;
// `workspace` is 256-byte aligned.
cudaError_t launch_linear(LinearCall const& call, void* workspace);

}  // namespace twell

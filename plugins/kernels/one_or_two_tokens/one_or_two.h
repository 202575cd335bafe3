// The whole block for one or two tokens, of layers whose neurons the device takes at once.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Bytes of scratch memory that the kernels need; never shrinks when `tokens` grows, also where they are not for it.
size_t one_or_two_scratch_bytes(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_one_or_two(Text& text);

// Enqueues the whole block, where routes.cu says so. Same preconditions as launch_gate; `scratch` is 256-byte aligned.
cudaError_t launch_one_or_two(twell_problem const& problem, twell_tensors const& tensors, void* scratch,
                              Device const& device, cudaStream_t stream);

}  // namespace twell

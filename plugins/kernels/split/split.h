// The hot split: a call's first neurons, which are often active, as a dense block, the others by TwELL. It is made of
// the routes dense_block and many_tokens.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// The fewest hot neurons: fewer fill no CTA's part of a tile of a dense block.
constexpr int kFewestHotSplit = 128;

// Whether the hint splits the problem, where many_tokens would run.
bool is_split(twell_problem const& problem);

// Bytes of workspace that launch_split needs, 0 if the problem is not split; never shrinks when `tokens` grows.
size_t split_bytes(twell_problem const& problem);

// Enqueues the whole block, if is_split(problem). The problem has been validated, has at least one row, and the
// pointers have been checked; `workspace` is 256-byte aligned.
cudaError_t launch_split(Call const& call, void* workspace, Kernels kernels = Kernels::kBest);

}  // namespace twell

// A training step of a block: the data that it keeps of sparse neurons, and both directions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "host/launch.h"
#include "twell/twell.h"
#include "twell/twell_train.h"

namespace twell {

// Bytes of workspace.
size_t train_forward_bytes(twell_problem const& problem, int64_t capacity);
size_t train_backward_bytes(twell_problem const& problem, int64_t capacity);

// Enqueue a direction. The problem has been validated, has at least one row, and the pointers have been checked.
cudaError_t launch_train_forward(Call const& call, twell_train_forward_tensors const& forward, void* workspace);
cudaError_t launch_train_backward(Call const& call, twell_train_backward_tensors const& backward, void* workspace);

// CTAs of a forward's kernel for hot neurons; each leaves a part of the L1 term.
int64_t train_hot_parts(int64_t tokens, int hot);
cudaError_t launch_copy_rows(twell_train_copy const* copies, int count, Device const& device, cudaStream_t stream);
cudaError_t launch_train_hot(Call const& call, twell_train_hot_tensors const& hot);

}  // namespace twell

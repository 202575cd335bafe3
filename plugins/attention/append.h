// The kernel that appends to caches, as attention calls it: see append.cu.
#pragma once

#include <cuda_runtime_api.h>
#include <twell/attention.h>

namespace twell {

// Rotates the queries of a problem, [batch, tokens, heads, width], into [batch, heads, tokens, width].
cudaError_t rotate_queries(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                           void* rotated, cudaStream_t stream);

}  // namespace twell

// Attention of one new token of few sequences over a key-value cache, in one launch that needs no workspace.
#pragma once

#include <cuda_runtime_api.h>
#include <twell/attention.h>

namespace twell {

// Whether the kernel computes a valid problem on the current device, and is the faster way to do so.
bool takes_one_token(twell_attention_problem const& problem);

// Runs a problem that it takes.
cudaError_t attend_one_token(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                             cudaStream_t stream);

}  // namespace twell

// Attention over a key-value cache in one launch that needs no workspace: of one new token of few sequences, and of any
// number over a cache in FP8, whose bytes it reads.
#pragma once

#include <cuda_runtime_api.h>
#include <twell/attention.h>

namespace twell {

// Whether there are kernels for heads of this width.
bool knows_width(int32_t width);

// Whether the kernel computes a valid problem on the current device, and is the faster way to do so.
bool takes_caches(twell_attention_problem const& problem);

// Runs a problem that it takes.
cudaError_t attend_over_caches(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                               cudaStream_t stream);

}  // namespace twell

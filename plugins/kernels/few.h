// The whole block for few tokens: kernels of their own, in which a token's work is spread over the device.
#ifndef TWELL_KERNELS_FEW_H_
#define TWELL_KERNELS_FEW_H_

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// The parts of the scratch memory.
struct FewScratch {
    uint32_t* masks;  // [tokens, num_mask_words]: see gate_up_few.cuh
    float* h;         // [tokens, d_ff]
    // For a dense down projection: see gate_up_sm90.cuh and down_sm90.cuh.
    uint16_t* h_rounded;  // [tokens, num_mask_words * 32]
    uint8_t* is_dense;    // [CTAs of the gate and up projections]
    int* counters;        // [num_counters]
    float* sums;          // [max(num_counters, kFewestDenseCtas), 64 * 64]
    int num_mask_words;
    int num_counters;
};

// Blocks of 64 tokens and 64 columns of a dense down projection. Where they are few, several CTAs share one.
constexpr int kFewestDenseCtas = 256;
inline int num_dense_blocks(twell_problem const& problem) {
    return static_cast<int>((problem.tokens + 63) / 64) * ((problem.d_out + 63) / 64);
}

// Whether launch_few suits the problem.
bool is_few(twell_problem const& problem);

// Bytes of scratch memory that launch_few needs for the problem; never shrinks when `tokens` grows, also where is_few
// no longer holds.
size_t few_scratch_bytes(twell_problem const& problem);

// Enqueues the whole block. Same preconditions as launch_gate; `scratch` is 256-byte aligned. The packed matrix is not
// always written.
cudaError_t launch_few(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, void* scratch,
                       cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_FEW_H_

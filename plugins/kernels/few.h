// The whole block for few tokens: kernels of their own, in which a token's work is spread over the device.
#ifndef TWELL_KERNELS_FEW_H_
#define TWELL_KERNELS_FEW_H_

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// How a dense down projection is cut into blocks, whose neurons are shared out over kDenseDownShares CTAs.
struct DenseDown {
    int tokens;
    int columns;
    int num_blocks;
};
constexpr int kDenseDownShares = 4;

// The parts of the scratch memory.
struct FewScratch {
    uint32_t* masks;  // [tokens, num_mask_words]: see gate_up_few.cuh
    float* h;         // [tokens, d_ff]
    // For a down projection that may be dense: see down_sm90.cuh.
    uint16_t* h_rounded;  // [tokens, num_mask_words * 32]
    int* num_pairs;       // [CTAs of the gate and up projections]
    float* sums;          // [blocks, shares, tokens, columns]
    int* counters;        // [blocks]
    int num_mask_words;
    DenseDown dense_down;
};

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

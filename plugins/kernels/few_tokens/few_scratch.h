// Data that one kernel for few tokens leaves for another.
#pragma once

#include <stdint.h>

#include "device/element.cuh"
#include "format/active.cuh"
#include "host/problem.h"
#include "matmul/masked_down.cuh"
#include "twell/twell.h"

namespace twell {

// A dense down projection is cut into blocks of that many columns.
constexpr int kDenseDownColumns = 64;

// The tokens of a block, as kernels are compiled for them; calls of more tokens have no such kernel.
constexpr int kDenseDownTokens[] = {16, 64, 128};
inline int dense_down_tokens(int64_t tokens) { return tokens <= 16 ? 16 : tokens <= 64 ? 64 : 128; }

// CTAs that share out a block's neurons: the number whose rounds take the least time, with two CTAs a multiprocessor up
// to 16 tokens and then one. But the more tokens there are, the longer it takes to add up shares.
constexpr int most_dense_down_shares(int block_tokens) { return block_tokens <= 64 ? 8 : 4; }
int dense_down_shares(int d_out, int block_tokens, int multiprocessors);

// The parts of the scratch memory.
struct FewScratch {
    uint32_t* masks;  // [tokens, num_mask_words]: see format/active.cuh
    float* h;         // [tokens, d_ff]; not for more than 16 tokens on Hopper
    // For a down projection that may be dense: see down_sm90.cuh. The sums and counters also for one that CTAs share
    // out: see masked_down.cuh.
    uint16_t* h_rounded;  // [dense_down_tokens, num_mask_words * 32]: rows that are not tokens are read, but not used
    // [CTAs of the gate and up projections]: the CTA's active pairs of a neuron and a token; the most that one token
    // has, or the sum of that over parts of the neurons.
    int2* counted;
    float* sums;    // [num_counters, num_summed, kDenseDownColumns]: num_summed is shares * tokens, or more
    int* counters;  // [num_counters]: one for each block
    int num_counters;
    int num_summed;
    int num_mask_words;
};

// CTAs of gate and up projections that there is room for in `counted`.
inline int most_counted(int num_mask_words) { return num_mask_words * kMaskBits / MMA_M; }

// Parameters that all sparse down projections share.
template <class Stored = uint16_t>
masked_down::ParamsOf<Stored> down_params(Call const& call, FewScratch const& scratch) {
    masked_down::ParamsOf<Stored> params = {};
    set_block(params, call.problem, call.tensors);
    params.h = scratch.h;
    params.h_rounded = scratch.h_rounded;
    params.masks = scratch.masks;
    params.num_mask_words = scratch.num_mask_words;
    return params;
}

}  // namespace twell

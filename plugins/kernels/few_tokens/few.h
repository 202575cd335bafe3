// The whole block for few tokens: kernels of their own, in which a token's work is spread over the device.
#pragma once

#include <stddef.h>

#include <algorithm>

#include "few_tokens/down_few.cuh"
#include "host/launch.h"
#include "host/problem.h"
#include "twell/twell.h"

namespace twell {

// Offsets in w_gate and w_up are 32-bit numbers of 16-byte vectors.
constexpr int kMostDModelFew = 65536;

// The most tokens that these kernels compute; and without those of compute capability 9.0.
constexpr int64_t kMostTokensFew = 128;
constexpr int64_t kMostTokensFewGeneric = 64;
// Compute capability 9.0 has kernels of its own for layers that have at least so many columns and neurons: as long as
// the rows of TMA's boxes.
constexpr int kFewestColumnsSm90 = 64;

// A dense down projection is cut into blocks of so many columns.
constexpr int kDenseDownColumns = 64;

// The tokens of a block, as kernels are compiled for them; more are not computed so.
constexpr int kDenseDownTokens[] = {16, 64, 128};
inline int dense_down_tokens(int64_t tokens) { return tokens <= 16 ? 16 : tokens <= 64 ? 64 : 128; }

// So many CTAs share out a block's neurons that their rounds take the least time, with two CTAs a multiprocessor up to
// 16 tokens and then one. But the more tokens there are, the longer it takes to add up shares.
constexpr int most_dense_down_shares(int block_tokens) { return block_tokens <= 64 ? 8 : 4; }
inline int dense_down_shares(int d_out, int block_tokens, int multiprocessors) {
    int const places = (block_tokens <= 16 ? 2 : 1) * multiprocessors;
    int64_t const blocks = ceil_div(d_out, kDenseDownColumns);
    // A share of a block's time; what a CTA takes besides is about a tenth of it.
    auto const cost = [&](int shares) {
        return static_cast<double>(ceil_div(blocks * shares, places)) * (1.0 / shares + 0.1);
    };
    int best = 1;
    for (int shares = 2; shares <= most_dense_down_shares(block_tokens); ++shares) {
        best = cost(shares) < cost(best) ? shares : best;
    }
    return best;
}

// The parts of the scratch memory.
struct FewScratch {
    uint32_t* masks;  // [tokens, num_mask_words]: see gate_up_few.cuh
    float* h;         // [tokens, d_ff]; not for more than 16 tokens on Hopper
    // For a down projection that may be dense: see down_sm90.cuh. The sums and counters also for one that CTAs share
    // out: see down_few.cuh.
    uint16_t* h_rounded;  // [dense_down_tokens, num_mask_words * 32]: rows that are not tokens are read, but not used
    // [CTAs of the gate and up projections]: its active pairs of a neuron and a token; the most that a token has of its
    // neurons, or the sum of that over parts of them.
    int2* counted;
    float* sums;    // [num_counters, num_summed, kDenseDownColumns]: num_summed is shares * tokens, or more
    int* counters;  // [num_counters]: one for each block
    int num_counters;
    int num_summed;
    int num_mask_words;
};

// CTAs of gate and up projections that there is room for in `counted`.
inline int most_counted(int num_mask_words) { return num_mask_words * down_few::kMaskBits / MMA_M; }

// What every sparse down projection has in common.
inline down_few::Params down_params(twell_problem const& problem, twell_tensors const& tensors,
                                    FewScratch const& scratch) {
    down_few::Params params = {};
    set_block(params, problem, tensors);
    params.h = scratch.h;
    params.h_rounded = scratch.h_rounded;
    params.masks = scratch.masks;
    params.num_mask_words = scratch.num_mask_words;
    return params;
}

// Bytes of scratch memory that launch_few needs for the problem; never shrinks when `tokens` grows, also where it is
// not for it.
size_t few_scratch_bytes(twell_problem const& problem);

// The rows of all configurations, a line each.
void list_few(Text& text);

// Enqueues the whole block, without a packed matrix, where routes.cu says so. Same preconditions as launch_gate;
// `scratch` is 256-byte aligned.
cudaError_t launch_few(twell_problem const& problem, twell_tensors const& tensors, void* scratch, Device const& device,
                       cudaStream_t stream);

}  // namespace twell

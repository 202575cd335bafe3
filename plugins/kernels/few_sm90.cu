#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "down_sm90.cuh"
#include "few_sm90.h"
#include "gate_up_sm90.cuh"
#include "matmul_sm90.h"
#include "problem.cuh"

namespace twell {
namespace {

using matmul_sm90::encode;
using matmul_sm90::first_error;

// Below, a call is so short that what these kernels add for the sake of dense layers counts: 0.8 of 11 microseconds.
constexpr int kFewestTokens = 33;

// Active pairs of a CTA up to which a row of w_up for each takes less than reading all of its w_up.
int max_pairs(int tokens) { return tokens <= 64 ? 60 : 96; }
static_assert(gate_up_sm90::kMaxPairs >= 96, "what a CTA can list");

template <class Element, class Cfg>
cudaError_t launch_gate_up(gate_up_sm90::Params const& params, Device const& device, int num_ctas,
                           cudaStream_t stream) {
    return launch_dependent(gate_up_sm90::gate_up_kernel<Element, Cfg>, params, dim3(static_cast<unsigned>(num_ctas)),
                            gate_up_sm90::kThreads, Cfg::kSharedBytes, device, stream);
}

template <class Element>
cudaError_t launch_gate_up(gate_up_sm90::Params const& params, Device const& device, int num_ctas,
                           cudaStream_t stream) {
    if (params.tokens <= 64) {
        return launch_gate_up<Element, gate_up_sm90::Config<64>>(params, device, num_ctas, stream);
    }
    return launch_gate_up<Element, gate_up_sm90::Config<128>>(params, device, num_ctas, stream);
}

template <class Element, class Cfg>
cudaError_t launch_down(twell_problem const& problem, down_sm90::Params params, Device const& device,
                        cudaStream_t stream) {
    params.num_slabs = (problem.d_out + Cfg::kColumns - 1) / Cfg::kColumns;
    params.dense_limit = std::max(1, std::min(params.num_gate_ctas, Cfg::kThreads) / 8);
    params.num_sparse_ctas = params.num_slabs * params.tokens;
    dim3 const grid(static_cast<unsigned>(params.num_sparse_ctas + params.num_dense_ctas));
    return launch_dependent(down_sm90::down_kernel<Element, Cfg>, params, grid, Cfg::kThreads, down_sm90::kSharedBytes,
                            device, stream);
}

// The fewer tokens, the fewer columns a CTA has, so that there are CTAs enough.
template <class Element>
cudaError_t launch_down(twell_problem const& problem, down_sm90::Params const& params, Device const& device,
                        cudaStream_t stream) {
    if (problem.tokens <= 64) {
        return launch_down<Element, down_few::Config<16, 256>>(problem, params, device, stream);
    }
    return launch_down<Element, down_few::Config<32, 256>>(problem, params, device, stream);
}

// Gives the number of CTAs.
cudaError_t launch_gate_up(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                           Device const& device, int& num_ctas, cudaStream_t stream) {
    gate_up_sm90::Params params = {};
    params.x_rows = static_cast<uint16_t const*>(tensors.x);
    params.w_up_rows = static_cast<uint16_t const*>(tensors.w_up);
    params.w_down = static_cast<uint16_t const*>(tensors.w_down);
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.masks = scratch.masks;
    params.h = scratch.h;
    params.h_rounded = scratch.h_rounded;
    params.is_dense = scratch.is_dense;
    params.counters = scratch.counters;
    params.num_counters = scratch.num_counters;
    params.tokens = static_cast<int>(problem.tokens);
    params.num_tokens_loaded = (params.tokens + gate_up_sm90::kFragmentTokens - 1) / gate_up_sm90::kFragmentTokens *
                               gate_up_sm90::kFragmentTokens;
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.d_out = problem.d_out;
    params.num_mask_words = scratch.num_mask_words;
    params.max_pairs = max_pairs(params.tokens);
    params.relu_on_up = problem.activation == TWELL_DRELU;
    params.act = activation_of(problem);
    if (cudaError_t const error = first_error(
            {encode(params.x, tensors.x, problem.tokens, problem.d_model, params.num_tokens_loaded, problem.dtype),
             encode(params.w_gate, tensors.w_gate, problem.d_ff, problem.d_model, gate_up_sm90::kNeurons,
                    problem.dtype),
             encode(params.w_up, tensors.w_up == nullptr ? tensors.w_gate : tensors.w_up, problem.d_ff, problem.d_model,
                    gate_up_sm90::kNeurons, problem.dtype)});
        error != cudaSuccess) {
        return error;
    }
    // CTAs cover whole mask words, also where d_ff ends within one.
    int const neurons = scratch.num_mask_words * gate_up_few::kMaskBits;
    num_ctas = (neurons + gate_up_sm90::kNeurons - 1) / gate_up_sm90::kNeurons;
    return problem.dtype == TWELL_BF16 ? launch_gate_up<Bf16>(params, device, num_ctas, stream)
                                       : launch_gate_up<Fp16>(params, device, num_ctas, stream);
}

cudaError_t launch_down(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                        Device const& device, int num_gate_ctas, cudaStream_t stream) {
    down_sm90::Params params = {};
    params.sparse.h = scratch.h;
    params.sparse.masks = scratch.masks;
    params.sparse.w_down = static_cast<uint16_t const*>(tensors.w_down);
    params.sparse.b_down = static_cast<uint16_t const*>(tensors.b_down);
    params.sparse.y = static_cast<uint16_t*>(tensors.y);
    params.sparse.d_ff = problem.d_ff;
    params.sparse.d_out = problem.d_out;
    params.sparse.num_mask_words = scratch.num_mask_words;
    params.is_dense = scratch.is_dense;
    params.sums = scratch.sums;
    params.counters = scratch.counters;
    params.tokens = static_cast<int>(problem.tokens);
    params.num_gate_ctas = num_gate_ctas;
    params.num_shares = std::max(1, std::min(down_sm90::kMaxShares, kFewestDenseCtas / scratch.num_counters));
    params.num_column_blocks = (problem.d_out + down_sm90::kColumns - 1) / down_sm90::kColumns;
    params.num_dense_ctas = scratch.num_counters * params.num_shares;
    if (cudaError_t const error = first_error(
            {encode(params.w_down, tensors.w_down, problem.d_ff, problem.d_out, down_sm90::BLOCK_K, problem.dtype),
             encode(params.h, scratch.h_rounded, problem.tokens,
                    static_cast<int64_t>(scratch.num_mask_words) * gate_up_few::kMaskBits, down_sm90::kTokens,
                    problem.dtype)});
        error != cudaSuccess) {
        return error;
    }
    return problem.dtype == TWELL_BF16 ? launch_down<Bf16>(problem, params, device, stream)
                                       : launch_down<Fp16>(problem, params, device, stream);
}

}  // namespace

bool few_sm90_supports(twell_problem const& problem) {
    constexpr int kLargestBox = 64;
    return problem.tokens >= kFewestTokens && problem.tokens <= gate_up_sm90::Config<128>::BLOCK_N &&
           problem.d_model >= kLargestBox && problem.d_ff >= kLargestBox && problem.d_out >= kLargestBox;
}

cudaError_t launch_few_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                            Device const& device, cudaStream_t stream) {
    int num_gate_ctas = 0;
    if (cudaError_t const error = launch_gate_up(problem, tensors, scratch, device, num_gate_ctas, stream);
        error != cudaSuccess) {
        return error;
    }
    return launch_down(problem, tensors, scratch, device, num_gate_ctas, stream);
}

}  // namespace twell

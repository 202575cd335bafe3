#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "down_sm90.cuh"
#include "gate_up_sm90.cuh"
#include "matmul_sm90.h"
#include "problem.cuh"
#include "sm90.h"

namespace twell {
namespace {

using matmul_sm90::encode;

// One token reads no row twice, so a dense path would not gain. From the last number on, and in plain blocks or with
// many neurons before, blocks are dense anyway, unless d_model is very large: see dense_sm90_prefers_block.
constexpr int64_t kFewestTokens = 2;
constexpr int64_t kMostTokens = 128;

template <class Element, class Cfg>
cudaError_t launch_gate_up(twell_problem const& problem, twell_tensors const& tensors, gate_up_sm90::Params params,
                           int& num_ctas, Device const& device, cudaStream_t stream) {
    constexpr int kTokensOfCtas = 8;
    int const tokens = static_cast<int>(ceil_div(params.tokens, gate_up_sm90::kClusterSize));
    params.tokens_per_cta = static_cast<int>(ceil_div(tokens, kTokensOfCtas)) * kTokensOfCtas;
    void const* const w_up = tensors.w_up == nullptr ? tensors.w_gate : tensors.w_up;
    TWELL_TRY(first_error(
        {encode(params.x_map, tensors.x, problem.tokens, problem.d_model, Cfg::kTokens, problem.dtype),
         encode(params.w_gate_map, tensors.w_gate, problem.d_ff, problem.d_model, Cfg::kBoxNeurons, problem.dtype),
         encode(params.w_up_map, w_up, problem.d_ff, problem.d_model, Cfg::kBoxNeurons, problem.dtype)}));
    // CTAs cover whole mask words, also where d_ff ends within one.
    int const neurons = params.num_mask_words * gate_up_few::kMaskBits;
    num_ctas = static_cast<int>(ceil_div(neurons, Cfg::kNeurons)) * gate_up_sm90::kClusterSize;
    return launch_dependent(gate_up_sm90::gate_up_kernel<Element, Cfg>, params, dim3(static_cast<unsigned>(num_ctas)),
                            gate_up_sm90::kThreads, Cfg::kSharedBytes, device, stream);
}

// Gives the number of CTAs.
template <class Element>
cudaError_t launch_gate_up(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                           int& num_ctas, Device const& device, cudaStream_t stream) {
    gate_up_sm90::Params params = {};
    set_block(params, problem, tensors);
    params.masks = scratch.masks;
    params.h = scratch.h_rounded;
    params.counted = scratch.counted;
    params.counters = scratch.counters;
    params.num_counters = scratch.num_counters;
    params.tokens = static_cast<int>(problem.tokens);
    params.num_mask_words = scratch.num_mask_words;
    auto const launch = [&](auto config) {
        return launch_gate_up<Element, decltype(config)>(problem, tensors, params, num_ctas, device, stream);
    };
    using gate_up_sm90::Config;
    if (params.tokens > 64) {
        // From there on most neurons are active for some token.
        return launch(Config<96, 64, true, 6>());
    }
    // So few neurons a cluster that as many of them as possible have some; but all find a place at once.
    int64_t const neurons = ceil_div(problem.d_ff, device.num_multiprocessors / gate_up_sm90::kClusterSize);
    return neurons <= 64    ? launch(Config<64, 32, false, 16>())
           : neurons <= 96  ? launch(Config<96, 32, false, 12>())
           : neurons <= 128 ? launch(Config<128, 32, false, 10>())
           : neurons <= 160 ? launch(Config<160, 32, false, 8>())
           : neurons <= 192 ? launch(Config<192, 32, false, 7>())
                            : launch(Config<224, 32, false, 6>());
}

// Up to where a sparse down projection takes less than a dense one: active pairs of a neuron and a token, and how many
// of them the heaviest token has, by a bound that is the looser the more tokens there are. Measured with d_ff 5632;
// what there is to read of w_down grows with it.
int2 most_sparse(twell_problem const& problem) {
    constexpr int kDff = 5632;
    int64_t const tokens = problem.tokens;
    int64_t const pairs = tokens <= 16 ? 1500 + 120 * tokens : tokens <= 64 ? 2000 + 100 * tokens : 8000 + 20 * tokens;
    int64_t const of_token = tokens <= 16 ? 1500 : 1400;
    return make_int2(static_cast<int>(pairs * problem.d_ff / kDff), static_cast<int>(of_token * problem.d_ff / kDff));
}

// kUnits: of a CTA of a sparse projection at a time.
template <class Element, int kUnits, class Sparse, class Dense>
cudaError_t launch_down(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                        down_sm90::Params params, Device const& device, cudaStream_t stream) {
    TWELL_TRY(first_error(
        {encode(params.w_down, tensors.w_down, problem.d_ff, problem.d_out, down_sm90::BLOCK_K, problem.dtype),
         encode(params.h, scratch.h_rounded, Dense::kTokens,
                static_cast<int64_t>(scratch.num_mask_words) * gate_up_few::kMaskBits, Dense::kTokens,
                problem.dtype)}));
    if (kUnits > 1) {
        params.most_sparse.y = std::min(params.most_sparse.y, down_sm90::kMostListed);
    }
    params.num_slabs = static_cast<int>(ceil_div(problem.d_out, Sparse::kColumns));
    params.num_groups =
        kUnits == 1 ? params.tokens : std::clamp(device.num_multiprocessors / params.num_slabs, 1, params.tokens);
    params.num_sparse_ctas = params.num_slabs * params.num_groups;
    static_assert(Dense::kColumns == kDenseDownColumns && Dense::kMostShares == most_dense_down_shares(Dense::kTokens),
                  "what there is scratch memory for");
    params.num_column_blocks = static_cast<int>(ceil_div(problem.d_out, Dense::kColumns));
    params.num_shares = dense_down_shares(problem.d_out, Dense::kTokens);
    params.num_dense_ctas = params.num_column_blocks * params.num_shares;
    int const slices = static_cast<int>(ceil_div(scratch.num_mask_words * gate_up_few::kMaskBits, down_sm90::BLOCK_K));
    params.slices_each = slices / params.num_shares;
    params.slices_left = slices % params.num_shares;
    int const ctas = std::max(params.num_sparse_ctas, params.num_dense_ctas);
    return launch_dependent(down_sm90::down_kernel<Element, kUnits, Sparse, Dense>, params,
                            dim3(static_cast<unsigned>(ctas)), down_sm90::kThreads<kUnits, Sparse>,
                            down_sm90::kSharedBytes<kUnits, Sparse, Dense>, device, stream);
}

template <class Element>
cudaError_t launch_down(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                        int num_gate_ctas, Device const& device, cudaStream_t stream) {
    down_sm90::Params params = {};
    params.sparse = down_params(problem, tensors, scratch);
    params.counted = scratch.counted;
    params.sums = scratch.sums;
    params.counters = scratch.counters;
    params.tokens = static_cast<int>(problem.tokens);
    params.num_gate_ctas = num_gate_ctas;
    params.most_sparse = most_sparse(problem);
    // The fewer tokens, the fewer columns a sparse CTA has, so that there are about two CTAs for each multiprocessor.
    // For more than 16 tokens a dense CTA wants all of the shared memory, so that a sparse one, too, has a
    // multiprocessor to itself, and takes about as many units as there are for each.
    using down_few::Config;
    using down_sm90::Dense;
    auto const launch = [&](auto units, auto sparse, auto dense) {
        return launch_down<Element, decltype(units)::value, decltype(sparse), decltype(dense)>(
            problem, tensors, scratch, params, device, stream);
    };
    std::integral_constant<int, 1> const one;
    std::integral_constant<int, 4> const four;
    std::integral_constant<int, 8> const eight;
    if (params.tokens <= 4) {
        return launch(one, Config<8, 256>(), Dense<16, 1, 4>());
    }
    if (params.tokens <= 16) {
        return launch(one, Config<16, 512>(), Dense<16, 1, 4>());
    }
    return params.tokens <= 64 ? launch(four, Config<32, 256>(), Dense<64, 1, 10>())
                               : launch(eight, Config<32, 256>(), Dense<64, 2, 8>());
}

}  // namespace

bool few_sm90_supports(twell_problem const& problem) {
    constexpr int kRowOfBox = 64;
    return problem.tokens >= kFewestTokens && problem.tokens <= kMostTokens && problem.d_model >= kRowOfBox &&
           problem.d_ff >= kRowOfBox && problem.d_out >= kRowOfBox;
}

cudaError_t launch_gate_up_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                                int& num_ctas, Device const& device, cudaStream_t stream) {
    return problem.dtype == TWELL_BF16 ? launch_gate_up<Bf16>(problem, tensors, scratch, num_ctas, device, stream)
                                       : launch_gate_up<Fp16>(problem, tensors, scratch, num_ctas, device, stream);
}

cudaError_t launch_down_sm90(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                             int num_gate_ctas, Device const& device, cudaStream_t stream) {
    return problem.dtype == TWELL_BF16 ? launch_down<Bf16>(problem, tensors, scratch, num_gate_ctas, device, stream)
                                       : launch_down<Fp16>(problem, tensors, scratch, num_gate_ctas, device, stream);
}

}  // namespace twell

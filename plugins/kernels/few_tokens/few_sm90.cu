#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "few_tokens/down_sm90.cuh"
#include "few_tokens/gate_up_sm90.cuh"
#include "host/problem.h"
#include "matmul/matmul_sm90.h"
#include "sm90.h"

namespace twell {
namespace {

using matmul_sm90::encode;

// The neurons of a cluster: see launch_gate_up.
using GateUp64 = gate_up_sm90::Config<64, 32, false, 16>;
using GateUp96 = gate_up_sm90::Config<96, 32, false, 12>;
using GateUp128 = gate_up_sm90::Config<128, 32, false, 10>;
using GateUp160 = gate_up_sm90::Config<160, 32, false, 8>;
using GateUp192 = gate_up_sm90::Config<192, 32, false, 7>;
using GateUp224 = gate_up_sm90::Config<224, 32, false, 6>;
// For more than 64 tokens: then most neurons are active for some token.
using GateUpAlways = gate_up_sm90::Config<96, 64, true, 6>;

// The fewer tokens, the fewer columns a sparse CTA has, so that there are about two CTAs for each multiprocessor. For
// more than 16 tokens a dense CTA wants all of the shared memory, so that a sparse one, too, has a multiprocessor to
// itself, and takes about as many units as there are for each.
using Sparse4 = down_few::Config<8, 256>;
using Sparse16 = down_few::Config<16, 512>;
using Sparse128 = down_few::Config<32, 256>;
using Dense16 = down_sm90::Dense<16, 1, 4>;
using Dense64 = down_sm90::Dense<64, 1, 10>;
using Dense128 = down_sm90::Dense<64, 2, 8>;

// One token reads no row twice, so a dense path would not gain.
constexpr int64_t kFewestTokens = 2;

template <class Cfg>
constexpr Label gate_up_label_of() {
    return {"gate_up_sm90", {{"neurons", Cfg::kNeurons}, {"tokens", gate_up_sm90::kClusterSize * Cfg::kTokens}}};
}

template <class Dense, class Sparse>
constexpr Label down_label_of() {
    return {"down_sm90", {{"tokens", Dense::kTokens}, {"columns", Sparse::kColumns}}};
}

template <class Element, class Cfg>
cudaError_t launch_gate_up(twell_problem const& problem, twell_tensors const& tensors, gate_up_sm90::Params params,
                           int& num_ctas, Device const& device, cudaStream_t stream) {
    constexpr int kTokensOfCtas = 8;
    int const tokens = static_cast<int>(ceil_div(params.tokens, gate_up_sm90::kClusterSize));
    params.tokens_per_cta = static_cast<int>(ceil_div(tokens, kTokensOfCtas)) * kTokensOfCtas;
    void const* const w_up = tensors.w_up == nullptr ? tensors.w_gate : tensors.w_up;
    TWELL_TRY(first_error(
        {encode(device, params.x_map, tensors.x, problem.tokens, problem.d_model, Cfg::kTokens, problem.dtype),
         encode(device, params.w_gate_map, tensors.w_gate, problem.d_ff, problem.d_model, Cfg::kBoxNeurons,
                problem.dtype),
         encode(device, params.w_up_map, w_up, problem.d_ff, problem.d_model, Cfg::kBoxNeurons, problem.dtype)}));
    // CTAs cover whole mask words, also where d_ff ends within one.
    int const neurons = params.num_mask_words * gate_up_few::kMaskBits;
    num_ctas = static_cast<int>(ceil_div(neurons, Cfg::kNeurons)) * gate_up_sm90::kClusterSize;
    return launch_dependent(gate_up_label_of<Cfg>(), gate_up_sm90::gate_up_kernel<Element, Cfg>, params,
                            dim3(static_cast<unsigned>(num_ctas)), gate_up_sm90::kThreads, Cfg::kSharedBytes, device,
                            stream, {{}, num_ctas, most_counted(params.num_mask_words)});
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
    if (params.tokens > 64) {
        return launch(GateUpAlways());
    }
    // So few neurons a cluster that as many of them as possible have some; but all find a place at once.
    int64_t const neurons = ceil_div(problem.d_ff, device.num_multiprocessors / gate_up_sm90::kClusterSize);
    return neurons <= 64    ? launch(GateUp64())
           : neurons <= 96  ? launch(GateUp96())
           : neurons <= 128 ? launch(GateUp128())
           : neurons <= 160 ? launch(GateUp160())
           : neurons <= 192 ? launch(GateUp192())
                            : launch(GateUp224());
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
        {encode(device, params.w_down, tensors.w_down, problem.d_ff, problem.d_out, down_sm90::BLOCK_K, problem.dtype),
         encode(device, params.h, scratch.h_rounded, Dense::kTokens,
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
    params.num_shares = std::min(dense_down_shares(problem.d_out, Dense::kTokens, device.num_multiprocessors),
                                 scratch.num_summed / Dense::kTokens);
    params.num_dense_ctas = params.num_column_blocks * params.num_shares;
    int const slices = static_cast<int>(ceil_div(scratch.num_mask_words * gate_up_few::kMaskBits, down_sm90::BLOCK_K));
    params.slices_each = slices / params.num_shares;
    params.slices_left = slices % params.num_shares;
    int const ctas = std::max(params.num_sparse_ctas, params.num_dense_ctas);
    Choice const choice = {{"shares", params.num_shares}, params.num_shares * Dense::kTokens, scratch.num_summed};
    return launch_dependent(down_label_of<Dense, Sparse>(), down_sm90::down_kernel<Element, kUnits, Sparse, Dense>,
                            params, dim3(static_cast<unsigned>(ctas)), down_sm90::kThreads<kUnits, Sparse>,
                            down_sm90::kSharedBytes<kUnits, Sparse, Dense>, device, stream, choice);
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
    auto const launch = [&](auto units, auto sparse, auto dense) {
        return launch_down<Element, decltype(units)::value, decltype(sparse), decltype(dense)>(
            problem, tensors, scratch, params, device, stream);
    };
    std::integral_constant<int, 1> const one;
    std::integral_constant<int, 4> const four;
    std::integral_constant<int, 8> const eight;
    return params.tokens <= 4    ? launch(one, Sparse4(), Dense16())
           : params.tokens <= 16 ? launch(one, Sparse16(), Dense16())
           : params.tokens <= 64 ? launch(four, Sparse128(), Dense64())
                                 : launch(eight, Sparse128(), Dense128());
}

template <class... Configs>
void list_gate_up(Text& text, Configs...) {
    (add_line(text, gate_up_label_of<Configs>()), ...);
}

}  // namespace

void list_few_sm90(Text& text) {
    list_gate_up(text, GateUp64(), GateUp96(), GateUp128(), GateUp160(), GateUp192(), GateUp224(), GateUpAlways());
    add_line(text, down_label_of<Dense16, Sparse4>());
    add_line(text, down_label_of<Dense16, Sparse16>());
    add_line(text, down_label_of<Dense64, Sparse128>());
    add_line(text, down_label_of<Dense128, Sparse128>());
}

bool few_sm90_supports(twell_problem const& problem) {
    return problem.tokens >= kFewestTokens &&
           std::min({problem.d_model, problem.d_ff, problem.d_out}) >= kFewestColumnsSm90;
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

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "few_tokens/down_sm90.cuh"
#include "few_tokens/few_sm90.h"
#include "few_tokens/gate_up_sm90.cuh"
#include "host/problem.h"
#include "matmul/matmul_sm90.h"

namespace twell {
namespace {

using matmul_sm90::encode;

// The neurons of a cluster: see choose_gate_up_sm90.
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
using Sparse4 = masked_down::Config<8, 256>;
using Sparse16 = masked_down::Config<16, 512>;
using Sparse128 = masked_down::Config<32, 256>;
using Dense16 = down_sm90::Dense<16, 1, 4>;
using Dense64 = down_sm90::Dense<64, 1, 10>;
using Dense128 = down_sm90::Dense<64, 2, 8>;

// One token reads no row twice, so a dense path would not gain.
constexpr int64_t kFewestTokens = 2;

template <class Cfg>
constexpr Label gate_up_label_of() {
    return {"gate_up_sm90", {{"neurons", Cfg::kNeurons}, {"tokens", kClusterSize * Cfg::kTokens}}};
}

// CTAs cover whole mask words, also where d_ff ends within one.
template <class Cfg>
int num_gate_up_ctas(FewScratch const& scratch) {
    return static_cast<int>(ceil_div(scratch.num_mask_words * kMaskBits, Cfg::kNeurons)) * kClusterSize;
}

template <class Cfg>
void set_gate_up(FewConfig& config, FewScratch const& scratch) {
    config.gate_up_neurons = Cfg::kNeurons;
    config.gate_up_tokens = kClusterSize * Cfg::kTokens;
    config.num_gate_ctas = num_gate_up_ctas<Cfg>(scratch);
}

template <class Element, class Cfg>
cudaError_t launch_gate_up(Call const& call, gate_up_sm90::Params params, FewConfig const& config) {
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    constexpr int kTokensOfCtas = 8;
    int const tokens = static_cast<int>(ceil_div(params.tokens, kClusterSize));
    params.tokens_per_cta = static_cast<int>(ceil_div(tokens, kTokensOfCtas)) * kTokensOfCtas;
    void const* const w_up = tensors.w_up == nullptr ? tensors.w_gate : tensors.w_up;
    TWELL_TRY(first_error(
        {encode(call.device, params.x_map, tensors.x, problem.tokens, problem.d_model, Cfg::kTokens, problem.dtype),
         encode(call.device, params.w_gate_map, tensors.w_gate, problem.d_ff, problem.d_model, Cfg::kBoxNeurons,
                problem.dtype),
         encode(call.device, params.w_up_map, w_up, problem.d_ff, problem.d_model, Cfg::kBoxNeurons, problem.dtype)}));
    return launch_dependent(gate_up_label_of<Cfg>(), gate_up_sm90::gate_up_kernel<Element, Cfg>, params,
                            dim3(static_cast<unsigned>(config.num_gate_ctas)), gate_up_sm90::kThreads,
                            Cfg::kSharedBytes, call.device, call.stream,
                            {{}, config.num_gate_ctas, most_counted(params.num_mask_words)});
}

template <class Element>
cudaError_t launch_gate_up(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    gate_up_sm90::Params params = {};
    set_block(params, call.problem, call.tensors);
    params.masks = scratch.masks;
    params.h = scratch.h_rounded;
    params.counted = scratch.counted;
    params.counters = scratch.counters;
    params.num_counters = scratch.num_counters;
    params.tokens = static_cast<int>(call.problem.tokens);
    params.num_mask_words = scratch.num_mask_words;
    return with_config<GateUp64, GateUp96, GateUp128, GateUp160, GateUp192, GateUp224, GateUpAlways>(
        [&](auto c) {
            return decltype(c)::kNeurons == config.gate_up_neurons &&
                   kClusterSize * decltype(c)::kTokens == config.gate_up_tokens;
        },
        [&](auto c) { return launch_gate_up<Element, decltype(c)>(call, params, config); });
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

// A row of the table: kUnits units of a sparse projection are computed by a CTA at a time.
template <int kUnits, class SparseConfig, class DenseConfig>
struct Down {
    static constexpr int kNumUnits = kUnits;
    using Sparse = SparseConfig;
    using Dense = DenseConfig;
};
using Down4 = Down<1, Sparse4, Dense16>;
using Down16 = Down<1, Sparse16, Dense16>;
using Down64 = Down<4, Sparse128, Dense64>;
using Down128 = Down<8, Sparse128, Dense128>;

template <class Row>
constexpr Label down_label_of() {
    return {"down_sm90", {{"tokens", Row::Dense::kTokens}, {"columns", Row::Sparse::kColumns}}};
}

template <class Row>
void set_down(FewConfig& config, twell_problem const& problem, FewScratch const& scratch, Device const& device) {
    using Dense = typename Row::Dense;
    config.down_columns = Row::Sparse::kColumns;
    config.down_tokens = Dense::kTokens;
    config.num_shares = std::min(dense_down_shares(problem.d_out, Dense::kTokens, device.num_multiprocessors),
                                 scratch.num_summed / Dense::kTokens);
}

template <class Element, class Row>
cudaError_t launch_down(Call const& call, FewScratch const& scratch, FewConfig const& config,
                        down_sm90::Params params) {
    constexpr int kUnits = Row::kNumUnits;
    using Sparse = typename Row::Sparse;
    using Dense = typename Row::Dense;
    twell_problem const& problem = call.problem;
    TWELL_TRY(
        first_error({encode(call.device, params.w_down, call.tensors.w_down, problem.d_ff, problem.d_out,
                            down_sm90::BLOCK_K, problem.dtype),
                     encode(call.device, params.h, scratch.h_rounded, Dense::kTokens,
                            static_cast<int64_t>(scratch.num_mask_words) * kMaskBits, Dense::kTokens, problem.dtype)}));
    if (kUnits > 1) {
        params.most_sparse.y = std::min(params.most_sparse.y, down_sm90::kMostListed);
    }
    params.num_slabs = static_cast<int>(ceil_div(problem.d_out, Sparse::kColumns));
    params.num_groups =
        kUnits == 1 ? params.tokens : std::clamp(call.device.num_multiprocessors / params.num_slabs, 1, params.tokens);
    params.num_sparse_ctas = params.num_slabs * params.num_groups;
    static_assert(Dense::kColumns == kDenseDownColumns && Dense::kMostShares == most_dense_down_shares(Dense::kTokens),
                  "what there is scratch memory for");
    params.num_column_blocks = static_cast<int>(ceil_div(problem.d_out, Dense::kColumns));
    params.num_shares = config.num_shares;
    params.num_dense_ctas = params.num_column_blocks * params.num_shares;
    int const slices = static_cast<int>(ceil_div(scratch.num_mask_words * kMaskBits, down_sm90::BLOCK_K));
    params.slices_each = slices / params.num_shares;
    params.slices_left = slices % params.num_shares;
    int const ctas = std::max(params.num_sparse_ctas, params.num_dense_ctas);
    Choice const choice = {{"shares", params.num_shares}, params.num_shares * Dense::kTokens, scratch.num_summed};
    return launch_dependent(down_label_of<Row>(), down_sm90::down_kernel<Element, kUnits, Sparse, Dense>, params,
                            dim3(static_cast<unsigned>(ctas)), down_sm90::kThreads<kUnits, Sparse>,
                            down_sm90::kSharedBytes<kUnits, Sparse, Dense>, call.device, call.stream, choice);
}

template <class Element>
cudaError_t launch_down(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    down_sm90::Params params = {};
    params.sparse = down_params(call, scratch);
    params.counted = scratch.counted;
    params.sums = scratch.sums;
    params.counters = scratch.counters;
    params.tokens = static_cast<int>(call.problem.tokens);
    params.num_gate_ctas = config.num_gate_ctas;
    params.most_sparse = most_sparse(call.problem);
    return with_config<Down4, Down16, Down64, Down128>(
        [&](auto row) {
            using Row = decltype(row);
            return Row::Dense::kTokens == config.down_tokens && Row::Sparse::kColumns == config.down_columns;
        },
        [&](auto row) { return launch_down<Element, decltype(row)>(call, scratch, config, params); });
}

template <class... Configs>
void list_gate_up(Text& text, Configs...) {
    (add_line(text, gate_up_label_of<Configs>()), ...);
}

}  // namespace

void list_few_sm90(Text& text) {
    list_gate_up(text, GateUp64(), GateUp96(), GateUp128(), GateUp160(), GateUp192(), GateUp224(), GateUpAlways());
    add_line(text, down_label_of<Down4>());
    add_line(text, down_label_of<Down16>());
    add_line(text, down_label_of<Down64>());
    add_line(text, down_label_of<Down128>());
}

bool few_sm90_supports(twell_problem const& problem) {
    return problem.tokens >= kFewestTokens &&
           std::min({problem.d_model, problem.d_ff, problem.d_out}) >= kFewestColumnsSm90;
}

void choose_gate_up_sm90(FewConfig& config, twell_problem const& problem, FewScratch const& scratch,
                         Device const& device) {
    if (problem.tokens > 64) {
        return set_gate_up<GateUpAlways>(config, scratch);
    }
    // As few neurons a cluster as possible, so that as many clusters as possible have some; but all find a place at
    // once.
    int64_t const neurons = ceil_div(problem.d_ff, device.num_multiprocessors / kClusterSize);
    return neurons <= 64    ? set_gate_up<GateUp64>(config, scratch)
           : neurons <= 96  ? set_gate_up<GateUp96>(config, scratch)
           : neurons <= 128 ? set_gate_up<GateUp128>(config, scratch)
           : neurons <= 160 ? set_gate_up<GateUp160>(config, scratch)
           : neurons <= 192 ? set_gate_up<GateUp192>(config, scratch)
                            : set_gate_up<GateUp224>(config, scratch);
}

void choose_down_sm90(FewConfig& config, twell_problem const& problem, FewScratch const& scratch,
                      Device const& device) {
    return problem.tokens <= 4    ? set_down<Down4>(config, problem, scratch, device)
           : problem.tokens <= 16 ? set_down<Down16>(config, problem, scratch, device)
           : problem.tokens <= 64 ? set_down<Down64>(config, problem, scratch, device)
                                  : set_down<Down128>(config, problem, scratch, device);
}

cudaError_t launch_gate_up_sm90(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    return call.problem.dtype == TWELL_BF16 ? launch_gate_up<Bf16>(call, scratch, config)
                                            : launch_gate_up<Fp16>(call, scratch, config);
}

cudaError_t launch_down_sm90(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    return call.problem.dtype == TWELL_BF16 ? launch_down<Bf16>(call, scratch, config)
                                            : launch_down<Fp16>(call, scratch, config);
}

}  // namespace twell

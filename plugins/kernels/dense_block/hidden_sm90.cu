#include "dense_block/hidden_sm90.cuh"
#include "dense_block/hidden_sm90.h"
#include "host/problem.h"
#include "matmul/matmul_sm90.h"

namespace twell {
namespace {

namespace sm90 = hidden_sm90;

// Of a gated block a consumer holds two products, so a block has fewer tokens. Tall tiles have as many neurons as fill
// one or two rounds of clusters in popular layers.
using GatedTilings =
    sm90::Tilings<sm90::Choices<24, 32, 40, 48, 64, 88, 96, 112, 128, 136, 144, 152, 160, 168, 176>,
                  sm90::Choices<48, 56, 64, 72, 80, 88, 96>, sm90::Choices<88, 96, 104, 112, 120, 144, 160, 168>>;
using PlainTilings = sm90::Tilings<sm90::Choices<24, 32, 40, 48, 64, 80, 96, 112, 128, 136, 144, 152, 160, 168, 176,
                                                 184, 192, 200, 208, 216, 224, 240, 248, 256>,
                                   sm90::Choices<40, 48, 64, 72, 80, 96, 112>>;

// Names of the kernels.
constexpr char kGated[] = "hidden_gated_sm90";
constexpr char kPlain[] = "hidden_plain_sm90";

// The down projection begins to load where there is no cluster of this kernel.
constexpr int kClusterCycles = 60;

// Of the down projection's weights: what its stages hold at a time.
constexpr size_t kPrefetchedBytes = 2 << 20;

int num_slices(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_model, sm90::BLOCK_K)); }

template <class Element, int kProducts, class Tilings>
cudaError_t launch(Call const& call, sm90::Tiling const& tiling, uint16_t* h, PartSums const& parts,
                   Active const& active, int64_t most_counts, Tilings tilings) {
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    auto const kernel = sm90::find_kernel<sm90::Params>(tiling, tilings, [](auto block, auto layout) {
        using Cfg = sm90::Config<decltype(block)::value, false, kProducts, decltype(layout)::value>;
        return sm90::Kernel<sm90::Params>::of<Cfg>(sm90::hidden_kernel<Element, Cfg>);
    });
    sm90::Params params = {};
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.part_states = parts.states;
    params.num_part_states = parts.num_states;
    params.tokens = problem.tokens;
    params.d_ff = problem.d_ff;
    params.num_slices = num_slices(problem);
    params.stride = spilled_stride(problem);
    params.active = active;
    params.num_tiles = tiling.num_tiles;
    params.num_blocks = static_cast<int>(tiling.num_blocks);
    params.act = activation_of(problem);
    params.up_cut = problem.activation == TWELL_DRELU ? 0 : Element::kNaNs;
    params.h = h;
    params.w_down = tensors.w_down;
    params.prefetched_bytes = static_cast<uint32_t>(
        std::min(static_cast<size_t>(problem.d_ff) * problem.d_out * sizeof(uint16_t), kPrefetchedBytes));
    TWELL_TRY(sm90::encode(call.device, params.x, tensors.x, problem.tokens, problem.d_model, kernel.rows_loaded,
                           problem.dtype));
    void const* const weights[] = {tensors.w_gate, tensors.w_up};
    for (int product = 0; product < kProducts; ++product) {
        TWELL_TRY(sm90::encode(call.device, params.weights[product], weights[product], problem.d_ff, problem.d_model,
                               kernel.weight_rows_loaded, problem.dtype));
    }
    Choice const choice = {
        {}, int64_t{active.num_groups} * active.counts_of_group, active.masks == nullptr ? 0 : most_counts};
    return launch_dependent(sm90::label_of(kProducts == 2 ? kGated : kPlain, tiling.block, tiling.layout),
                            kernel.function, params, sm90::grid_of(tiling, sm90::num_clusters(call.device)),
                            sm90::kThreads, kernel.shared_bytes, call.device, call.stream, choice);
}

template <class Element>
cudaError_t launch(Call const& call, sm90::Tiling const& tiling, uint16_t* h, PartSums const& parts,
                   Active const& active, int64_t most_counts) {
    return call.problem.variant == TWELL_GATED
               ? launch<Element, 2>(call, tiling, h, parts, active, most_counts, GatedTilings())
               : launch<Element, 1>(call, tiling, h, parts, active, most_counts, PlainTilings());
}

}  // namespace

sm90::Tiling choose_hidden_sm90(twell_problem const& problem, Device const& device) {
    bool const gated = problem.variant == TWELL_GATED;
    sm90::Product const product = {problem.tokens, problem.d_ff, num_slices(problem), gated ? 2 : 1, 0, kClusterCycles};
    int const clusters = sm90::num_clusters(device);
    return gated ? sm90::choose(product, clusters, GatedTilings()) : sm90::choose(product, clusters, PlainTilings());
}

bool hidden_sm90_leaves_active(sm90::Tiling const& tiling) { return sm90::leaves_active(tiling.layout, tiling.block); }

void set_groups_sm90(Active& active, sm90::Tiling const& tiling) {
    bool const shares_weights = tiling.layout == sm90::Layout::kSharesWeights;
    active.num_groups = static_cast<int>(tiling.num_blocks) * (shares_weights ? kClusterSize : 1);
    active.counts_of_group = tiling.num_tiles * (shares_weights ? 1 : kClusterSize);
}

void list_hidden_sm90(Text& text) {
    sm90::list(text, kGated, GatedTilings());
    sm90::list(text, kPlain, PlainTilings());
}

cudaError_t launch_hidden_sm90(Call const& call, sm90::Tiling const& tiling, uint16_t* h, PartSums const& parts,
                               Active const& active, int64_t most_counts) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, tiling, h, parts, active, most_counts)
                                            : launch<Fp16>(call, tiling, h, parts, active, most_counts);
}

}  // namespace twell

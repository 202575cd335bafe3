#include "fp8/fp8.h"
#include "host/problem.h"
#include "many_tokens/gate/gate_sm90.cuh"
#include "many_tokens/gate/gate_sm90.h"
#include "many_tokens/guard/guard.h"
#include "matmul/matmul_sm90.h"

namespace twell {
namespace {

namespace sm90 = gate_sm90;

using GateTilings =
    sm90::Tilings<sm90::Choices<64, 128, 160, 176, 192, 200, 208, 216, 224, 232, 240, 248, 256>, sm90::Choices<>>;

constexpr char const* kName = "gate_sm90";
constexpr char const* kByteName = "gate_bytes_sm90";

// Those in FP8.
using ByteTilings = sm90::Tilings<sm90::Choices<160, 192, 208, 224, 240, 256>, sm90::Choices<>>;

template <class Element>
void set_scales(sm90::GateScalesOf<Element>&, Call const&, float const*) {}
void set_scales(sm90::GateScalesOf<E4m3>& scales, Call const& call, float const* x_scale) {
    scales.x_scale = x_scale;
    scales.gate_scale = static_cast<float const*>(call.tensors.w_gate_scale);
    scales.gate_up_step = call.problem.gate_up_scale == TWELL_SCALE_NEURON ? 1 : 0;
}

// Columns of 16 bits in a row.
int columns_of(twell_problem const& problem) { return problem.d_model * static_cast<int>(weight_bytes(problem)) / 2; }

template <class Element, class Operand, class Tilings>
cudaError_t launch(Call const& call, Quantised const& rounded, GateOutput const& output, GateConfig const& config) {
    using Params = sm90::ParamsOf<Operand>;
    twell_problem const& problem = call.problem;
    sm90::Tiling const& tiling = config.tiling;
    auto const kernel = sm90::find_kernel<Params>(tiling, Tilings(), [](auto tokens, auto) {
        using Cfg = sm90::Config<decltype(tokens)::value>;
        return sm90::Kernel<Params>::template of<Cfg>(sm90::gate_kernel<Element, Operand, Cfg>);
    });
    Params params = {};
    set_scales(params, call, rounded.scale);
    int const columns = columns_of(problem);
    void const* const x = has_scales(problem) ? rounded.x : call.tensors.x;
    params.b_gate = static_cast<uint16_t const*>(call.tensors.b_gate);
    params.packed = output.packed;
    params.spilled = output.spilled;
    params.counted = config.num_count_parts != 0 ? output.counted : nullptr;
    params.cleared = output.cleared;
    params.num_cleared = output.num_cleared;
    params.tokens = problem.tokens;
    params.d_model = columns;
    params.d_ff = problem.d_ff;
    params.num_tiles = tiling.num_tiles;
    params.num_blocks = static_cast<int>(tiling.num_blocks);
    params.words_per_tile = words_per_tile(problem);
    if (output.tile_counts != nullptr) {
        // Bytes of `packed` for each byte of `tile_counts`.
        int const bytes = params.words_per_tile * static_cast<int>(sizeof(uint32_t) / sizeof(uint16_t));
        while (1 << params.counts_shift < bytes) {
            ++params.counts_shift;
        }
        params.counts_bias = reinterpret_cast<uint64_t>(output.tile_counts) -
                             (reinterpret_cast<uint64_t>(output.packed) >> params.counts_shift);
    }
    params.act = activation_of(problem, call.tensors);
    TWELL_TRY(first_error({
        sm90::encode(call.device, params.x, x, problem.tokens, columns, kernel.rows_loaded, problem.dtype),
        sm90::encode(call.device, params.w_gate, call.tensors.w_gate, problem.d_ff, columns, sm90::BLOCK_M,
                     problem.dtype),
    }));
    dim3 const grid = sm90::grid_of(tiling, sm90::num_clusters(call.device));
    Choice const choice = {{}, static_cast<int64_t>(grid.x), params.counted == nullptr ? 0 : kMostCountParts};
    return launch_dependent(sm90::label_of(has_scales(problem) ? kByteName : kName, tiling.block, tiling.layout),
                            kernel.function, params, grid, sm90::kThreads, kernel.shared_bytes, call.device,
                            call.stream, choice);
}

}  // namespace

void list_gate_sm90(Text& text) {
    sm90::list(text, kName, GateTilings());
    sm90::list(text, kByteName, ByteTilings());
}

bool gate_sm90_supports(twell_problem const& problem) {
    return problem.d_model * weight_bytes(problem) % (2 * sm90::BLOCK_K) == 0;
}

GateConfig choose_gate_sm90(twell_problem const& problem, Device const& device) {
    sm90::Product const product = {problem.tokens, problem.d_ff, columns_of(problem) / sm90::BLOCK_K, 1, 0, 0};
    int const clusters = sm90::num_clusters(device);
    GateConfig config = {};
    config.exists = true;
    config.is_sm90 = true;
    config.tiling = has_scales(problem) ? sm90::choose(product, clusters, ByteTilings())
                                        : sm90::choose(product, clusters, GateTilings());
    // Each CTA leaves a part of the count, unless they are too many.
    int const ctas = static_cast<int>(sm90::grid_of(config.tiling, clusters).x);
    config.num_count_parts = ctas <= kMostCountParts ? ctas : 0;
    return config;
}

cudaError_t launch_gate_sm90(Call const& call, Quantised const& rounded, GateOutput const& output,
                             GateConfig const& config) {
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (has_scales(call.problem)) {
        return is_bf16 ? launch<Bf16, E4m3, ByteTilings>(call, rounded, output, config)
                       : launch<Fp16, E4m3, ByteTilings>(call, rounded, output, config);
    }
    return is_bf16 ? launch<Bf16, Bf16, GateTilings>(call, rounded, output, config)
                   : launch<Fp16, Fp16, GateTilings>(call, rounded, output, config);
}

}  // namespace twell

#include "host/problem.h"
#include "many_tokens/gate.h"
#include "many_tokens/gate_sm90.cuh"
#include "matmul/matmul_sm90.h"
#include "sm90.h"

namespace twell {
namespace {

namespace sm90 = gate_sm90;

using GateTilings =
    sm90::Tilings<sm90::Choices<64, 128, 144, 160, 176, 192, 200, 208, 216, 224, 232, 240, 248, 256>, sm90::Choices<>>;

sm90::Tiling tiling_of(twell_problem const& problem, Device const& device) {
    sm90::Product const product = {problem.tokens, problem.d_ff, problem.d_model / sm90::BLOCK_K, 1, 0, 0};
    return sm90::choose(product, sm90::num_clusters(device), GateTilings());
}

// CTAs of a launch, each of which leaves a part of the count, or 0 if they are too many.
int count_parts_of(dim3 grid) {
    int const ctas = static_cast<int>(grid.x);
    return ctas <= kMostCountParts ? ctas : 0;
}

template <class Element>
cudaError_t launch(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                   Device const& device, cudaStream_t stream) {
    sm90::Tiling const tiling = tiling_of(problem, device);
    auto const kernel = sm90::find_kernel<sm90::Params>(tiling, GateTilings(), [](auto tokens, auto) {
        using Cfg = sm90::Config<decltype(tokens)::value>;
        return sm90::Kernel<sm90::Params>::of<Cfg>(sm90::gate_kernel<Element, Cfg>);
    });
    sm90::Params params = {};
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.packed = output.packed;
    params.spilled = output.spilled;
    dim3 const grid = sm90::grid_of(tiling, sm90::num_clusters(device));
    params.counted = count_parts_of(grid) != 0 ? output.counted : nullptr;
    params.cleared = output.cleared;
    params.num_cleared = output.num_cleared;
    params.tokens = problem.tokens;
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.num_tiles = tiling.num_tiles;
    params.num_blocks = static_cast<int>(tiling.num_blocks);
    params.words_per_tile = words_per_tile(problem);
    if (output.tile_counts != nullptr) {
        // For so many bytes of the packed matrix there is one of counts.
        int const bytes = params.words_per_tile * static_cast<int>(sizeof(uint32_t) / sizeof(uint16_t));
        while (1 << params.counts_shift < bytes) {
            ++params.counts_shift;
        }
        params.counts_bias = reinterpret_cast<uint64_t>(output.tile_counts) -
                             (reinterpret_cast<uint64_t>(output.packed) >> params.counts_shift);
    }
    params.act = activation_of(problem);
    TWELL_TRY(first_error({
        sm90::encode(device, params.x, tensors.x, problem.tokens, problem.d_model, kernel.rows_loaded, problem.dtype),
        sm90::encode(device, params.w_gate, tensors.w_gate, problem.d_ff, problem.d_model, sm90::BLOCK_M,
                     problem.dtype),
    }));
    Choice const choice = {{}, static_cast<int64_t>(grid.x), params.counted == nullptr ? 0 : kMostCountParts};
    return launch_dependent(sm90::label_of("gate_sm90", tiling.block, tiling.layout), kernel.function, params, grid,
                            sm90::kThreads, kernel.shared_bytes, device, stream, choice);
}

}  // namespace

void list_gate_sm90(Text& text) { sm90::list(text, "gate_sm90", GateTilings()); }

bool gate_sm90_supports(twell_problem const& problem) { return problem.d_model % sm90::BLOCK_K == 0; }

int num_count_parts_sm90(twell_problem const& problem, Device const& device) {
    return count_parts_of(sm90::grid_of(tiling_of(problem, device), sm90::num_clusters(device)));
}

cudaError_t launch_gate_sm90(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                             Device const& device, cudaStream_t stream) {
    return problem.dtype == TWELL_BF16 ? launch<Bf16>(problem, tensors, output, device, stream)
                                       : launch<Fp16>(problem, tensors, output, device, stream);
}

}  // namespace twell

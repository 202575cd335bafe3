#include <algorithm>

#include "matmul/matmul_sm90.h"
#include "matmul/split_down_sm90.cuh"
#include "matmul/split_down_sm90.h"

namespace twell {
namespace {

namespace s = split_down_sm90;
using Blocks = matmul_sm90::Choices<32, 64, 128, 256>;

// What a tile costs, in cycles. Measured on an H200, see benchmarks/LOG.md.
constexpr int kBytesPerCycle = 24;
constexpr int kTensorCycles = 6;  // of a slice, for each token
constexpr int kCyclesOfOverhead = 6000;
constexpr int kCyclesOfSums = 32;  // of those of a token
// Costs of dense_down are estimated by a model of 16 bits, and are at least so many times as high.
constexpr float kOfDenseDown = 1.75f;

int64_t cycles_of(SplitDown const& split, twell_problem const& problem, Device const& device) {
    int64_t const slices = ceil_div(ceil_div(problem.d_ff, s::BLOCK_M), split.ctas);
    int64_t const rounds = ceil_div(split.num_blocks * split.num_tiles, device.num_multiprocessors / split.ctas);
    int const slice_cycles =
        std::max((s::BLOCK_M + split.block) * s::kBytesRow / kBytesPerCycle, split.block * kTensorCycles);
    return rounds * (slices * slice_cycles + kCyclesOfOverhead + kCyclesOfSums * split.block);
}

template <int... kBlocks>
SplitDown choose(twell_problem const& problem, Device const& device, int64_t most_cycles,
                 matmul_sm90::Choices<kBlocks...>) {
    SplitDown best = {};
    int64_t fewest = most_cycles;
    for (int const block : {kBlocks...}) {
        for (int ctas = 1; ctas <= s::kMostCtas && ctas <= ceil_div(problem.d_ff, s::BLOCK_M); ctas *= 2) {
            SplitDown const split = {block, ctas, ceil_div(problem.tokens, block),
                                     static_cast<int>(ceil_div(problem.d_out, s::BLOCK_M))};
            int64_t const cycles = cycles_of(split, problem, device);
            if (cycles < fewest) {
                fewest = cycles;
                best = split;
            }
        }
    }
    return best;
}

Label label_of(int block) { return {"split_down_sm90", {{"tokens", block}}}; }

template <class Use, int... kBlocks>
void for_each_block(matmul_sm90::Choices<kBlocks...>, Use use) {
    (use(std::integral_constant<int, kBlocks>()), ...);
}

template <class Element>
cudaError_t launch(Call const& call, DenseRows const& rows, SplitDown const& split) {
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    matmul_sm90::Kernel<s::ParamsOf<E4m3>> kernel;
    for_each_block(Blocks(), [&](auto block) {
        if (split.block == block) {
            using Cfg = s::SplitConfig<decltype(block)::value>;
            kernel = decltype(kernel)::template of<Cfg>(s::split_down_kernel<Element, Cfg>);
        }
    });
    s::ParamsOf<E4m3> params = {};
    set_block(params.block, problem, tensors);
    params.num_rows = problem.tokens;
    params.num_neurons = problem.d_out;
    params.num_tiles = split.num_tiles;
    params.num_slices = static_cast<int>(ceil_div(problem.d_ff, s::BLOCK_M));
    params.num_parts = split.ctas;
    params.all_rows = true;
    params.bias = static_cast<uint16_t const*>(tensors.b_down);
    HiddenBytes const& h = rows.bytes;
    int64_t const stride = spilled_stride(problem);
    params.h = h.values;
    params.h_stride = stride;
    params.h_scale = h.scales;
    params.h_scale_stride = h.scale_stride;
    params.may_skip = params.next_overlaps = rows.skipping.active.masks != nullptr;
    params.skipping = rows.skipping;
    // Two bytes are described as one element.
    TWELL_TRY(first_error({
        matmul_sm90::encode(call.device, params.weights, tensors.w_down, problem.d_ff, problem.d_out / 2,
                            kernel.weight_rows_loaded, problem.dtype),
        matmul_sm90::encode(call.device, params.tokens[0], h.values, problem.tokens, stride / 2, kernel.rows_loaded,
                            problem.dtype),
        matmul_sm90::encode_scales(call.device, params.h_scales, h.scales, params.num_slices, problem.tokens,
                                   h.scale_stride, split.block),
    }));
    dim3 const grid(static_cast<unsigned>(split.num_blocks * split.num_tiles * split.ctas));
    return launch_dependent(label_of(split.block), kernel.function, params, grid, s::kThreads, kernel.shared_bytes,
                            call.device, call.stream, {{"ctas", split.ctas}}, 0, static_cast<unsigned>(split.ctas));
}

}  // namespace

SplitDown choose_split_down_sm90(twell_problem const& problem, Device const& device, DenseShape const& other) {
    auto const most = static_cast<int64_t>(kOfDenseDown * static_cast<float>(other.tiling.cycles(other.clusters)));
    return choose(problem, device, most, Blocks());
}

cudaError_t launch_split_down_sm90(Call const& call, DenseRows const& rows, SplitDown const& split) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, rows, split) : launch<Fp16>(call, rows, split);
}

void list_split_down_sm90(Text& text) {
    for_each_block(Blocks(), [&](auto block) { add_line(text, label_of(block)); });
}

}  // namespace twell

// How the kernels of hidden_sm90.cuh are launched. Those of 16 bits and of FP8 are compiled by themselves,
// hidden_sm90.cu and hidden_bytes_sm90.cu, as either takes minutes.
#pragma once

#include <algorithm>

#include "dense_block/hidden_sm90.cuh"
#include "dense_block/hidden_sm90.h"
#include "host/problem.h"
#include "matmul/matmul_sm90.h"

namespace twell::hidden_sm90 {

// Of a gated block a consumer holds two products, so a block has fewer tokens. Tall tiles have as many neurons as fill
// one or two rounds of clusters in popular layers.
template <class Stored, bool kGated>
struct TilingsOf;
template <>
struct TilingsOf<uint16_t, true> {
    using Type = Tilings<Choices<32, 64, 88, 96, 112, 128, 144, 152, 160, 168, 176>,
                         Choices<48, 56, 64, 72, 80, 88, 96>, Choices<88, 96, 104, 112, 120, 144, 160, 168>>;
};
template <>
struct TilingsOf<uint16_t, false> {
    using Type = Tilings<Choices<32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256>,
                         Choices<40, 48, 64, 80, 96>>;
};
template <>
struct TilingsOf<E4m3, true> {
    using Type = Tilings<Choices<96, 128, 144, 160, 176>, Choices<32, 48, 64, 80, 96>>;
};
template <>
struct TilingsOf<E4m3, false> {
    using Type = Tilings<Choices<128, 176, 208>, Choices<48, 80, 112>>;
};

// Names of the kernels.
template <class Stored>
constexpr char const* kGatedName = sizeof(Stored) == 1 ? "hidden_gated_bytes_sm90" : "hidden_gated_sm90";
template <class Stored>
constexpr char const* kPlainName = sizeof(Stored) == 1 ? "hidden_plain_bytes_sm90" : "hidden_plain_sm90";

// The down projection begins to load where this kernel has no cluster.
constexpr int kClusterCycles = 60;

// Of the down projection's weights: what its stages hold at a time.
constexpr size_t kPrefetchedBytes = 2 << 20;

// Columns of 16 bits in a row of x and of weights.
inline int columns_of(twell_problem const& problem) {
    return problem.d_model * static_cast<int>(weight_bytes(problem)) / 2;
}

template <class Stored>
Tiling choose_tiling(twell_problem const& problem, Device const& device) {
    bool const gated = problem.variant == TWELL_GATED;
    int const num_slices = static_cast<int>(ceil_div(columns_of(problem), BLOCK_K));
    Product const product = {problem.tokens, problem.d_ff, num_slices, gated ? 2 : 1, 0, kClusterCycles};
    int const clusters = num_clusters(device);
    return gated ? choose(product, clusters, typename TilingsOf<Stored, true>::Type())
                 : choose(product, clusters, typename TilingsOf<Stored, false>::Type());
}

// The counts that a kernel leaves, for a trace.
inline Choice choice_of(Active const& active, int64_t most_counts) {
    return {{}, int64_t{active.num_groups} * active.counts_of_group, active.masks == nullptr ? 0 : most_counts};
}

// `x`: the rows that are multiplied. set_output(params) says where h goes.
template <class Element, class Stored, bool kGated, class SetOutput>
cudaError_t launch(Call const& call, Tiling const& tiling, void const* x, PartSums const& parts, Choice const& choice,
                   SetOutput set_output) {
    using Params = ParamsOf<Stored>;
    constexpr int kMatrices = kGated ? 2 : 1;
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    auto const kernel =
        find_kernel<Params>(tiling, typename TilingsOf<Stored, kGated>::Type(), [](auto block, auto layout) {
            using Cfg = Config<decltype(block)::value, false, kMatrices, decltype(layout)::value>;
            return Kernel<Params>::template of<Cfg>(hidden_kernel<Element, Stored, Cfg>);
        });
    int const columns = columns_of(problem);
    Params params = {};
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.part_states = parts.states;
    params.num_part_states = parts.num_states;
    params.tokens = problem.tokens;
    params.d_ff = problem.d_ff;
    params.num_slices = static_cast<int>(ceil_div(columns, BLOCK_K));
    params.stride = spilled_stride(problem);
    params.num_tiles = tiling.num_tiles;
    params.num_blocks = static_cast<int>(tiling.num_blocks);
    params.act = activation_of(problem, tensors);
    params.up_cut = problem.activation == TWELL_DRELU ? 0 : kNaNs;
    params.w_down = tensors.w_down;
    params.prefetched_bytes = static_cast<uint32_t>(
        std::min(static_cast<size_t>(problem.d_ff) * problem.d_out * sizeof(Stored), kPrefetchedBytes));
    set_output(params);
    TWELL_TRY(encode(call.device, params.x, x, problem.tokens, columns, kernel.rows_loaded, problem.dtype));
    void const* const weights[] = {tensors.w_gate, tensors.w_up};
    for (int product = 0; product < kMatrices; ++product) {
        TWELL_TRY(encode(call.device, params.weights[product], weights[product], problem.d_ff, columns,
                         kernel.weight_rows_loaded, problem.dtype));
    }
    char const* const name = kGated ? kGatedName<Stored> : kPlainName<Stored>;
    return launch_dependent(label_of(name, tiling.block, tiling.layout), kernel.function, params,
                            grid_of(tiling, num_clusters(call.device)), kThreads, kernel.shared_bytes, call.device,
                            call.stream, choice);
}

template <class Stored, class SetOutput>
cudaError_t launch(Call const& call, Tiling const& tiling, void const* x, PartSums const& parts, Choice const& choice,
                   SetOutput set_output) {
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (call.problem.variant == TWELL_GATED) {
        return is_bf16 ? launch<Bf16, Stored, true>(call, tiling, x, parts, choice, set_output)
                       : launch<Fp16, Stored, true>(call, tiling, x, parts, choice, set_output);
    }
    return is_bf16 ? launch<Bf16, Stored, false>(call, tiling, x, parts, choice, set_output)
                   : launch<Fp16, Stored, false>(call, tiling, x, parts, choice, set_output);
}

}  // namespace twell::hidden_sm90

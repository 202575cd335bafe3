// How the kernels of dense_sm90.cuh are launched. Those of 16 bits and of FP8 are compiled by themselves,
// dense_sm90.cu and dense_bytes_sm90.cu, as either takes minutes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/problem.h"
#include "matmul/dense_sm90.cuh"
#include "matmul/dense_sm90.h"
#include "matmul/matmul_sm90.h"

namespace twell::dense_sm90 {

template <class Stored, Projection kProjection>
struct TilingsOf;
template <>
struct TilingsOf<uint16_t, Projection::kUp> {
    using Type = Tilings<Choices<192, 208, 224, 240, 256>, Choices<>>;
};
template <>
struct TilingsOf<uint16_t, Projection::kDown> {
    using Type = Tilings<Choices<32, 48, 64, 88, 112, 128, 144, 152, 160, 168, 176, 192, 200, 208, 224, 240, 256>,
                         Choices<32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 120>>;
};
template <>
struct TilingsOf<E4m3, Projection::kUp> {
    using Type = Tilings<Choices<144, 176, 192, 208, 224, 248>, Choices<>>;
};
template <>
struct TilingsOf<E4m3, Projection::kDown> {
    using Type = Tilings<Choices<128, 144, 160, 176, 192, 256>, Choices<32, 48, 64, 80, 96, 112>>;
};

template <class Stored, Projection kProjection>
constexpr char const* kName = std::is_same_v<Stored, uint16_t>
                                  ? (kProjection == Projection::kUp ? "dense_up_sm90" : "dense_down_sm90")
                                  : (kProjection == Projection::kUp ? "dense_up_bytes_sm90" : "dense_down_bytes_sm90");

template <class Stored, Projection kProjection>
DenseShape choose_shape(twell_problem const& problem, int64_t most_part_sums, Device const& device) {
    constexpr bool kUp = kProjection == Projection::kUp;
    constexpr int kSlice = BLOCK_K * 2 / static_cast<int>(sizeof(Stored));
    Product const product = {problem.tokens,
                             kUp ? problem.d_ff : problem.d_out,
                             static_cast<int>(kUp                 ? problem.d_model / kSlice
                                              : kSlice == BLOCK_K ? spilled_stride(problem) / BLOCK_K
                                                                  : ceil_div(problem.d_ff, kSlice)),
                             1,
                             most_part_sums,
                             0};
    int const clusters = num_clusters(device);
    return {product, clusters, choose(product, clusters, typename TilingsOf<Stored, kProjection>::Type())};
}

// Element: the type of the factors.
template <class Element, class Stored, Projection kProjection>
cudaError_t launch(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    constexpr bool kUp = kProjection == Projection::kUp;
    constexpr bool kBytes = sizeof(Stored) == 1;
    using Params = ParamsOf<Stored>;
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    auto const kernel = find_kernel<Params>(
        shape.tiling, typename TilingsOf<Stored, kProjection>::Type(), [](auto tokens, auto layout) {
            using Cfg = Config<decltype(tokens)::value, kUp, 1, decltype(layout)::value, kBytes && !kUp>;
            return Kernel<Params>::template of<Cfg>(dense_kernel<Element, Stored, Cfg, kProjection>);
        });
    int64_t const stride = spilled_stride(problem);
    Params params = {};
    set_block(params.block, problem, tensors);
    params.relu_on_up = params.block.relu_on_up;
    params.schedule = rows.schedule;
    params.num_rows = problem.tokens;
    params.num_neurons = shape.product.num_neurons;
    params.num_tiles = shape.tiling.num_tiles;
    params.num_slices = shape.product.num_slices;
    params.num_parts = shape.tiling.num_parts;
    params.parts = {rows.parts.sums, rows.parts.states};
    params.all_rows = rows.all_rows;
    params.gate = rows.gate;
    params.h_part = rows.h_part;
    params.bias = static_cast<uint16_t const*>(kUp ? tensors.b_up : tensors.b_down);
    auto const encode = [&](CUtensorMap& map, void const* matrix, int64_t num_rows, int64_t columns, int64_t row_stride,
                            int box_rows) {
        return matmul_sm90::encode(call.device, map, matrix, num_rows, columns, row_stride, box_rows, problem.dtype);
    };
    if constexpr (kBytes) {
        HiddenBytes const& h = rows.bytes;
        params.h = h.values;
        params.h_stride = stride;
        params.h_scale = h.scales;
        params.h_scale_stride = h.scale_stride;
        params.is_bf16 = problem.dtype == TWELL_BF16;
    }
    if constexpr (!kUp) {
        params.may_skip = rows.skipping.active.masks != nullptr;
        params.next_overlaps = !rows.all_rows || params.may_skip;  // then a sparse down projection follows
        params.skipping = rows.skipping;
    }
    if constexpr (kBytes && kUp) {
        int const columns = problem.d_model / 2;
        params.x_scale = rows.x_scale;
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_up, problem.d_ff, columns, columns, BLOCK_M),
            encode(params.tokens[0], rows.x_bytes, problem.tokens, columns, columns, kernel.rows_loaded),
            encode(params.tokens[1], rows.x_part, rows.part, columns, columns, kernel.rows_loaded),
        }));
    } else if constexpr (kUp) {
        int const d_model = problem.d_model;
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_up, problem.d_ff, d_model, d_model, BLOCK_M),
            encode(params.tokens[0], tensors.x, problem.tokens, d_model, d_model, kernel.rows_loaded),
            encode(params.tokens[1], rows.x_part, rows.part, d_model, d_model, kernel.rows_loaded),
        }));
    } else if constexpr (kBytes) {
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_down, problem.d_ff, problem.d_out / 2, problem.d_out / 2,
                   kernel.weight_rows_loaded),
            encode(params.tokens[0], rows.bytes.values, problem.tokens, stride / 2, stride / 2, kernel.rows_loaded),
            encode(params.tokens[1], rows.bytes.values, problem.tokens, stride / 2, stride / 2, kernel.rows_loaded),
            encode_scales(call.device, params.h_scales, rows.bytes.scales, ceil_div(problem.d_ff, BLOCK_M),
                          problem.tokens, rows.bytes.scale_stride, shape.tiling.block),
        }));
    } else {
        uint16_t const* const h_part = rows.all_rows ? rows.gate.spilled : rows.h_part;
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_down, problem.d_ff, problem.d_out, problem.d_out, BLOCK_K),
            encode(params.tokens[0], rows.gate.spilled, problem.tokens, problem.d_ff, stride, kernel.rows_loaded),
            encode(params.tokens[1], h_part, rows.part, problem.d_ff, stride, kernel.rows_loaded),
        }));
    }
    Choice const choice = {
        {"parts", params.num_parts}, (params.num_parts - 1) * shape.tiling.num_sums(), shape.product.most_part_sums};
    return launch_dependent(label_of(kName<Stored, kProjection>, shape.tiling.block, shape.tiling.layout),
                            kernel.function, params, grid_of(shape.tiling, shape.clusters), kThreads,
                            kernel.shared_bytes, call.device, call.stream, choice);
}

}  // namespace twell::dense_sm90

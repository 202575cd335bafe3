#include <algorithm>
#include <type_traits>

#include "host/problem.h"
#include "matmul/dense_sm90.cuh"
#include "matmul/dense_sm90.h"
#include "matmul/matmul_sm90.h"

namespace twell {
namespace {

namespace sm90 = dense_sm90;
using sm90::Projection;

using UpTilings = sm90::Tilings<sm90::Choices<144, 160, 176, 192, 200, 208, 216, 224, 232, 240, 256>, sm90::Choices<>>;
using DownTilings = sm90::Tilings<
    sm90::Choices<32, 48, 64, 88, 112, 128, 136, 144, 152, 160, 168, 176, 192, 200, 208, 216, 224, 240, 248, 256>,
    sm90::Choices<32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120>>;

template <Projection kProjection>
using TilingsOf = std::conditional_t<kProjection == Projection::kUp, UpTilings, DownTilings>;

template <Projection kProjection>
constexpr char const* kName = kProjection == Projection::kUp ? "dense_up_sm90" : "dense_down_sm90";

template <Projection kProjection>
DenseShape choose_shape(twell_problem const& problem, int64_t most_part_sums, Device const& device) {
    constexpr bool kUp = kProjection == Projection::kUp;
    sm90::Product const product = {problem.tokens,
                                   kUp ? problem.d_ff : problem.d_out,
                                   static_cast<int>((kUp ? problem.d_model : spilled_stride(problem)) / sm90::BLOCK_K),
                                   1,
                                   most_part_sums,
                                   0};
    int const clusters = sm90::num_clusters(device);
    return {product, clusters, sm90::choose(product, clusters, TilingsOf<kProjection>())};
}

template <class Element, Projection kProjection>
cudaError_t launch(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    constexpr bool kUp = kProjection == Projection::kUp;
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    auto const kernel =
        sm90::find_kernel<sm90::Params>(shape.tiling, TilingsOf<kProjection>(), [](auto tokens, auto layout) {
            using Cfg = sm90::Config<decltype(tokens)::value, kUp, 1, decltype(layout)::value>;
            return sm90::Kernel<sm90::Params>::of<Cfg>(sm90::dense_kernel<Element, Cfg, kProjection>);
        });
    int64_t const stride = spilled_stride(problem);
    sm90::Params params = {};
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
        return sm90::encode(call.device, map, matrix, num_rows, columns, row_stride, box_rows, problem.dtype);
    };
    if constexpr (kUp) {
        int const d_model = problem.d_model;
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_up, problem.d_ff, d_model, d_model, sm90::BLOCK_M),
            encode(params.tokens[0], tensors.x, problem.tokens, d_model, d_model, kernel.rows_loaded),
            encode(params.tokens[1], rows.x_part, rows.part, d_model, d_model, kernel.rows_loaded),
        }));
    } else {
        bool const may_skip = rows.skipping.active.masks != nullptr;
        params.next_overlaps = !rows.all_rows || may_skip;  // then a sparse down projection follows
        params.may_skip = may_skip;
        params.skipping = rows.skipping;
        uint16_t const* const h_part = rows.all_rows ? rows.gate.spilled : rows.h_part;
        TWELL_TRY(first_error({
            encode(params.weights, tensors.w_down, problem.d_ff, problem.d_out, problem.d_out, sm90::BLOCK_K),
            encode(params.tokens[0], rows.gate.spilled, problem.tokens, problem.d_ff, stride, kernel.rows_loaded),
            encode(params.tokens[1], h_part, rows.part, problem.d_ff, stride, kernel.rows_loaded),
        }));
    }
    Choice const choice = {
        {"parts", params.num_parts}, (params.num_parts - 1) * shape.tiling.num_sums(), shape.product.most_part_sums};
    return launch_dependent(sm90::label_of(kName<kProjection>, shape.tiling.block, shape.tiling.layout),
                            kernel.function, params, sm90::grid_of(shape.tiling, shape.clusters), sm90::kThreads,
                            kernel.shared_bytes, call.device, call.stream, choice);
}

template <Projection kProjection>
cudaError_t launch(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16, kProjection>(call, rows, shape)
                                            : launch<Fp16, kProjection>(call, rows, shape);
}

}  // namespace

DenseShape choose_dense_up_sm90(twell_problem const& problem, Device const& device) {
    return choose_shape<Projection::kUp>(problem, 0, device);
}

DenseShape choose_dense_down_sm90(twell_problem const& problem, int64_t most_part_sums, Device const& device) {
    return choose_shape<Projection::kDown>(problem, most_part_sums, device);
}

bool dense_sm90_supports(twell_problem const& problem) {
    return problem.variant == TWELL_PLAIN || problem.d_model % sm90::BLOCK_K == 0;
}

cudaError_t launch_dense_up_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return launch<Projection::kUp>(call, rows, shape);
}

cudaError_t launch_dense_down_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return launch<Projection::kDown>(call, rows, shape);
}

void list_dense_sm90(Text& text) {
    sm90::list(text, kName<Projection::kUp>, UpTilings());
    sm90::list(text, kName<Projection::kDown>, DownTilings());
}

}  // namespace twell

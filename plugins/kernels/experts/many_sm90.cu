#include <algorithm>

#include "experts/many.h"
#include "experts/many_sm90.cuh"
#include "host/problem.h"
#include "matmul/matmul_sm90.h"

namespace twell {

namespace {

using namespace experts;

// TMA wants matrices apart, by less than 2^40 bytes.
constexpr int64_t kEndOfStride = int64_t{1} << 39;

bool takes(twell_experts_problem const& problem, twell_expert_strides const& strides) {
    return strides.row < kEndOfStride && strides.expert < kEndOfStride && (strides.expert > 0 || problem.experts == 1);
}

// Those of the experts, two in FP8 as one element of 16 bits.
sm90::Matrices matrices_of(twell_experts_problem const& problem, Matrix const& matrix, int rows, int columns) {
    int const elements = problem.weight_dtype == TWELL_E4M3 ? 2 : 1;
    int64_t const row_stride = matrix.row_stride / elements;
    int64_t const stride = problem.experts == 1 ? rows * row_stride : matrix.expert_stride / elements;
    return {matrix.values, problem.experts, rows, columns / elements, row_stride, stride};
}

// A projection: two halves of its weights, the rows of tokens, and how many pieces and slices there are.
template <class Stored, int kMatrices, int kWidth, class Inner>
cudaError_t launch(ExpertsCall const& call, Label const& label, void (*kernel)(ManySm90Params<Inner>),
                   Inner const& inner, Matrix const& first, Matrix const& second, uint16_t const* tokens, int pitch,
                   int columns, int depth, int num_tiles) {
    using Shape = ManySm90<Stored, kWidth>;
    constexpr bool kIsDown = kMatrices == 0;
    twell_experts_problem const& problem = call.problem;
    ManySm90Params<Inner> params = {};
    params.inner = inner;
    params.num_tiles = num_tiles;
    params.num_slices = static_cast<int>(ceil_div(depth, Shape::kSlice));
    int const box_rows = kIsDown ? Shape::kSlice : kHalfRows;
    auto const encode = [&](CUtensorMap& map, Matrix const& matrix) {
        int const rows = kIsDown ? depth : columns;
        return sm90::encode(call.device, map, matrices_of(problem, matrix, rows, kIsDown ? columns : depth), 3,
                            box_rows, problem.dtype);
    };
    int64_t const pairs = problem.tokens * problem.top;
    TWELL_TRY(first_error({
        encode(params.weights[0], first),
        encode(params.weights[1], second),
        sm90::encode(call.device, params.tokens, tokens, pairs, pitch, pitch, kWidth, problem.dtype),
    }));
    int64_t const pieces = int64_t{inner.groups.most_groups} * num_tiles;
    dim3 const grid(static_cast<unsigned>(std::min<int64_t>(pieces, call.device.num_multiprocessors)));
    return launch_dependent(label, kernel, params, grid, sm90::kThreads, Shape::kSharedBytes, call.device, call.stream);
}

template <class Element, class Stored, int kMatrices, int kWidth>
cudaError_t launch_up(ExpertsCall const& call, UpParams const& up, uint16_t const* sorted) {
    int const rows = kMatrices == 2 ? kHalfRows : kHalves * kHalfRows;
    Label const label = {kMatrices == 2 ? "experts_many_gate_up_sm90" : "experts_many_up_sm90", {{"tokens", kWidth}}};
    return launch<Stored, kMatrices, kWidth>(call, label, many_up_sm90_kernel<Element, Stored, kMatrices, kWidth>, up,
                                             kMatrices == 2 ? up.gate : up.up, up.up, sorted, up.d_model, up.d_ff,
                                             up.d_model, static_cast<int>(ceil_div(many_pitch(up.d_ff), rows)));
}

template <class Element, class Stored, int kWidth>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down, uint16_t* sorted) {
    GatherParams const gather = {up.groups, up.x, sorted, up.d_model, up.top};
    dim3 const grid(kWidth / kGatherRows, static_cast<unsigned>(up.groups.most_groups));
    constexpr bool kPermuted = sizeof(Stored) == 1;
    TWELL_TRY(launch_dependent({"experts_gather"}, gather_kernel<kPermuted>, gather, grid, kGatherThreads, 0,
                               call.device, call.stream));
    TWELL_TRY(call.problem.variant == TWELL_GATED ? launch_up<Element, Stored, 2, kWidth>(call, up, sorted)
                                                  : launch_up<Element, Stored, 1, kWidth>(call, up, sorted));
    return launch<Stored, 0, kWidth>(call, {"experts_many_down_sm90", {{"tokens", kWidth}}},
                                     many_down_sm90_kernel<Element, Stored, kWidth>, down, down.down, down.down, down.h,
                                     many_pitch(down.d_ff), down.d_out, down.d_ff,
                                     static_cast<int>(ceil_div(down.d_out, kHalves * kHalfRows)));
}

template <class Element, class Stored>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down, uint16_t* sorted, int width) {
    return width == 64 ? launch<Element, Stored, 64>(call, up, down, sorted)
                       : launch<Element, Stored, 128>(call, up, down, sorted);
}

template <class Element>
cudaError_t launch(ExpertsCall const& call, UpParams const& up, DownParams const& down, uint16_t* sorted, int width) {
    return call.problem.weight_dtype == TWELL_E4M3 ? launch<Element, E4m3>(call, up, down, sorted, width)
                                                   : launch<Element, uint16_t>(call, up, down, sorted, width);
}

}  // namespace

bool experts_many_sm90_supports(twell_experts_problem const& problem) {
    return takes(problem, problem.up) && takes(problem, problem.down) &&
           (problem.variant == TWELL_PLAIN || takes(problem, problem.gate)) &&
           (problem.weight_dtype != TWELL_E4M3 || problem.down_scale != TWELL_SCALE_NEURON);
}

cudaError_t launch_experts_many_sm90(ExpertsCall const& call, UpParams const& up, DownParams const& down,
                                     uint16_t* sorted, int width) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, up, down, sorted, width)
                                            : launch<Fp16>(call, up, down, sorted, width);
}

void list_experts_many_sm90(Text& text) {
    text.add("experts_gather\n");
    for (int const width : {64, 128}) {
        for (char const* const name : {"experts_many_up", "experts_many_gate_up", "experts_many_down"}) {
            text.add("%s_sm90 tokens=%d\n", name, width);
        }
    }
}

}  // namespace twell

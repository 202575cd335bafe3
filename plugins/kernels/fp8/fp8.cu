#include <algorithm>

#include "fp8/fp8.h"
#include "fp8/quantise.cuh"
#include "fp8/widen.cuh"
#include "host/problem.h"

namespace twell {
namespace {

// Scales that the gate reads, but does not use: those of a block of tokens.
constexpr int64_t kScalesBeyond = 256;

widen::Matrix matrix_of(void const* from, uint16_t* to, void const* scale, int32_t kind, int rows, int columns) {
    constexpr int kShift = 7;
    static_assert(1 << kShift == TWELL_SCALE_BLOCK_SIZE && TWELL_SCALE_BLOCK_SIZE % kVector == 0);
    bool const by_block = kind == TWELL_SCALE_BLOCK;
    widen::Matrix matrix = {};
    matrix.from = static_cast<E4m3 const*>(from);
    matrix.to = to;
    matrix.scale = static_cast<float const*>(scale);
    matrix.vectors = from == nullptr ? 0 : int64_t{rows} * (columns / kVector);
    matrix.columns = columns;
    matrix.row_step = by_block ? static_cast<int>(scale_blocks(columns)) : kind == TWELL_SCALE_NEURON ? 1 : 0;
    matrix.column_step = by_block || kind == TWELL_SCALE_OUTPUT ? 1 : 0;
    matrix.shift = by_block ? kShift : 0;
    return matrix;
}

cudaError_t launch(widen::Params const& params, int32_t dtype, Device const& device, cudaStream_t stream) {
    constexpr int kCtasOfMultiprocessor = 8;
    int64_t const vectors = std::max(params.matrices[0].vectors, params.matrices[2].vectors);
    int64_t const ctas =
        std::min(ceil_div(vectors, widen::kThreads), int64_t{device.num_multiprocessors} * kCtasOfMultiprocessor);
    auto const kernel = dtype == TWELL_BF16 ? widen::widen_kernel<Bf16> : widen::widen_kernel<Fp16>;
    return launch_dependent({"widen"}, kernel, params, dim3(static_cast<unsigned>(ctas)), widen::kThreads, 0, device,
                            stream);
}

}  // namespace

Widened take_widened(twell_problem const& problem, unsigned char*& memory) {
    Widened widened = {};
    int64_t const rows = problem.d_ff;
    widened.w_gate = take<uint16_t>(memory, rows * problem.d_model);
    widened.w_up = take<uint16_t>(memory, problem.variant == TWELL_GATED ? rows * problem.d_model : 0);
    widened.w_down = take<uint16_t>(memory, rows * problem.d_out);
    return widened;
}

twell_problem widened_problem(twell_problem const& problem) {
    twell_problem widened = problem;
    widened.weight_dtype = problem.dtype;
    widened.gate_up_scale = widened.down_scale = TWELL_SCALE_TENSOR;
    return widened;
}

twell_tensors widened_tensors(twell_tensors const& tensors, Widened const& widened) {
    twell_tensors result = tensors;
    result.w_gate = widened.w_gate;
    result.w_up = tensors.w_up == nullptr ? nullptr : widened.w_up;
    result.w_down = widened.w_down;
    result.w_gate_scale = result.w_up_scale = result.w_down_scale = nullptr;
    return result;
}

cudaError_t launch_widen(Call const& call, Widened const& widened, uint32_t const* needed) {
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    widen::Params params = {};
    params.matrices[0] = matrix_of(tensors.w_gate, widened.w_gate, tensors.w_gate_scale, problem.gate_up_scale,
                                   problem.d_ff, problem.d_model);
    params.matrices[1] =
        matrix_of(tensors.w_up, widened.w_up, tensors.w_up_scale, problem.gate_up_scale, problem.d_ff, problem.d_model);
    params.matrices[2] = matrix_of(tensors.w_down, widened.w_down, tensors.w_down_scale, problem.down_scale,
                                   problem.d_ff, problem.d_out);
    params.needed = needed;
    return launch(params, problem.dtype, call.device, call.stream);
}

cudaError_t launch_widen(void const* from, uint16_t* to, void const* scale, int32_t kind, int rows, int columns,
                         int32_t dtype, Device const& device, cudaStream_t stream) {
    widen::Params params = {};
    params.matrices[0] = matrix_of(from, to, scale, kind, rows, columns);
    return launch(params, dtype, device, stream);
}

Quantised take_quantised(twell_problem const& problem, unsigned char*& memory) {
    Quantised quantised = {};
    if (has_scales(problem)) {
        quantised.x = take<uint8_t>(memory, problem.tokens * problem.d_model);
        quantised.scale = take<float>(memory, problem.tokens + kScalesBeyond);
    }
    return quantised;
}

cudaError_t launch_quantise(NormCall const& rows, Quantised const& quantised, Device const& device, cudaStream_t stream,
                            CopiedScales const& copied) {
    quantise::Params params = {};
    params.x = static_cast<uint16_t const*>(rows.x);
    params.norm = rows.norm();
    params.columns = rows.columns;
    params.rounded = quantised.x;
    params.scale = quantised.scale;
    params.by_group = quantised.by_group;
    params.copied = copied;
    auto const kernel = rows.dtype == TWELL_BF16 ? quantise::quantise_kernel<Bf16> : quantise::quantise_kernel<Fp16>;
    return launch_dependent({"quantise"}, kernel, params, dim3(static_cast<unsigned>(rows.tokens)), quantise::kThreads,
                            0, device, stream);
}

cudaError_t launch_quantise(Call const& call, Quantised const& quantised) {
    return launch_quantise(norm_of(call, nullptr), quantised, call.device, call.stream);
}

void list_fp8(Text& text) {
    add_line(text, {"widen"});
    add_line(text, {"quantise"});
}

}  // namespace twell

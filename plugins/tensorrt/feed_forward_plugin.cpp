#include "feed_forward_plugin.h"

#include <algorithm>
#include <array>
#include <utility>

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginFieldCollection;
using nvinfer1::TensorRTPhase;

// The kernels call the only projection before the activation "gate", whatever the block.
std::array<Role, kBlockRoles> roles_of(twell_variant variant, Options const& options) {
    bool const gated = variant == TWELL_GATED;
    InputType const weight = options.scales ? InputType::kFp8 : InputType::kElement;
    return {{{"x", InputType::kElement, true},
             {gated ? "w_gate" : "w_up", weight, true},
             {gated ? "b_gate" : "b_up", InputType::kElement, options.b_gate},
             {"w_up", weight, gated},
             {"b_up", InputType::kElement, gated && options.b_up},
             {"w_down", weight, true},
             {"b_down", InputType::kElement, options.b_down},
             {"residual", InputType::kElement, options.residual, true},
             {gated ? "w_gate_scale" : "w_up_scale", InputType::kFloat32, options.scales},
             {"w_up_scale", InputType::kFloat32, gated && options.scales},
             {"w_down_scale", InputType::kFloat32, options.scales},
             {"thresholds", InputType::kFloat32, options.thresholds},
             {"norm_weight", InputType::kElement, options.norm_weight},
             {"norm_bias", InputType::kElement, options.norm_bias}}};
}

}  // namespace

// ---- constructor ----

FeedForwardPlugin::FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options)
    : KernelPlugin(plugin_name(variant), std::move(layer), roles_of(variant, options)),
      variant_(variant),
      options_(options) {}

// ---- checks shared by build and runtime ----

std::string FeedForwardPlugin::other_types() const {
    std::string const scaled = options_.scales ? "weights and their scales" : "";
    return !options_.thresholds ? scaled : scaled.empty() ? "thresholds" : scaled + ", and thresholds";
}

twell_problem FeedForwardPlugin::problem_of(Shapes const& inputs, Types const& types) const {
    check(inputs, kWGate, dims_of({kAny, kAny}), "[d_ff, d_model]");
    check(inputs, kWDown, dims_of({kAny, kAny}), "[d_ff, d_out]");
    int64_t const d_ff = shape(inputs, kWGate).d[0];
    int64_t const d_model = shape(inputs, kWGate).d[1];
    int64_t const d_out = shape(inputs, kWDown).d[1];
    check(inputs, kBGate, dims_of({d_ff}), "[d_ff]");
    check(inputs, kWUp, dims_of({d_ff, d_model}), "[d_ff, d_model]");
    check(inputs, kBUp, dims_of({d_ff}), "[d_ff]");
    check(inputs, kWDown, dims_of({d_ff, d_out}), "[d_ff, d_out]");
    check(inputs, kBDown, dims_of({d_out}), "[d_out]");
    check(inputs, kThresholds, dims_of({d_ff}), "[d_ff]");
    check(inputs, kNormWeight, dims_of({d_model}), "[d_model]");
    check(inputs, kNormBias, dims_of({d_model}), "[d_model]");
    check_rows(inputs, "d_model", kWGate, "[d_ff, d_model]");
    check_residual(inputs, kResidual, d_out, "d_out");
    if (d_ff != kAny && options_.hot > d_ff) {
        refuse("hot", std::to_string(options_.hot), "0 to d_ff = " + std::to_string(d_ff));
    }

    // Placeholders for unknown extents are the smallest good values.
    twell_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = rows_of(inputs[kX]);
    problem.d_model = narrow(d_model, 8);
    problem.d_ff = narrow(d_ff, std::max(options_.hot, 1));
    problem.d_out = narrow(d_out, 8);
    problem.compression = options_.compression;
    problem.dtype = types[kX] == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.weight_dtype = problem.dtype;
    problem.variant = variant_;
    problem.activation = options_.activation;
    problem.threshold = options_.threshold;
    problem.hot = options_.hot;
    problem.norm = options_.norm;
    problem.eps = options_.eps;
    if (options_.scales) {
        check_scales(inputs, problem);
    }
    check_problem(twell_validate(&problem), inputs, {kX, kWGate, kWDown});
    return problem;
}

// Writes into the problem which form scales have, by their shapes: [], [d_ff, 1], of w_down [1, d_out], or of blocks.
void FeedForwardPlugin::check_scales(Shapes const& inputs, twell_problem& problem) const {
    problem.weight_dtype = TWELL_E4M3;
    problem.gate_up_scale = check_scale(inputs, kGateScale, shape(inputs, kWGate), false);
    check(inputs, kUpScale, shape(inputs, kGateScale), "that of w_gate_scale");
    problem.down_scale = check_scale(inputs, kDownScale, shape(inputs, kWDown), true);
}

// The form of the scales of a matrix.
int32_t FeedForwardPlugin::check_scale(Shapes const& inputs, BlockRole role, Dims const& matrix, bool is_down) const {
    Dims const& scales = shape(inputs, role);
    if (scales.nbDims == 0) {
        return TWELL_SCALE_TENSOR;
    }
    if (scales.nbDims == 2 && scales.d[0] == scale_blocks(matrix.d[0]) && scales.d[1] == scale_blocks(matrix.d[1])) {
        return TWELL_SCALE_BLOCK;
    }
    if (is_down && scales.nbDims == 2 && scales.d[1] != 1) {  // d_out is a multiple of 8
        check(inputs, role, dims_of({1, matrix.d[1]}), "none, [d_ff / 128, d_out / 128], [d_ff, 1] or [1, d_out]");
        return TWELL_SCALE_OUTPUT;
    }
    check(inputs, role, dims_of({matrix.d[0], 1}),
          is_down ? "none, [d_ff / 128, d_out / 128], [1, d_out] or [d_ff, 1]"
                  : "none, [d_ff / 128, d_model / 128] or [d_ff, 1]");
    return TWELL_SCALE_NEURON;
}

// ---- build ----

void FeedForwardPlugin::set_output_shapes(DimsExprs const* inputs, DimsExprs* outputs, nvinfer1::IExprBuilder&) const {
    outputs[0] = inputs[kX];
    outputs[0].d[outputs[0].nbDims - 1] = inputs[slot(kWDown)].d[1];
}

// ---- runtime ----

void FeedForwardPlugin::launch(twell_problem const& problem, void const* const* inputs, void* const* outputs,
                               void* workspace, cudaStream_t stream) const {
    auto const input = [&](BlockRole role) { return has(role) ? inputs[slot(role)] : nullptr; };
    twell_tensors tensors{};
    tensors.struct_bytes = sizeof(tensors);
    tensors.x = input(kX);
    tensors.w_gate = input(kWGate);
    tensors.b_gate = input(kBGate);
    tensors.w_up = input(kWUp);
    tensors.b_up = input(kBUp);
    tensors.w_down = input(kWDown);
    tensors.b_down = input(kBDown);
    tensors.residual = input(kResidual);
    tensors.w_gate_scale = input(kGateScale);
    tensors.w_up_scale = input(kUpScale);
    tensors.w_down_scale = input(kDownScale);
    tensors.thresholds = input(kThresholds);
    tensors.norm_weight = input(kNormWeight);
    tensors.norm_bias = input(kNormBias);
    tensors.y = outputs[0];
    check_launch(twell_mlp(&problem, &tensors, workspace, bytes_of(problem), stream));
}

// ---- creator ----

FeedForwardCreator::FeedForwardCreator(twell_variant variant)
    : CreatorBase(plugin_name(variant), field_names(variant)), variant_(variant) {}

nvinfer1::IPluginV3* FeedForwardCreator::create(char const* layer, PluginFieldCollection const* fields,
                                                TensorRTPhase phase) const {
    return new FeedForwardPlugin(variant_, layer, read_options(variant_, fields, phase));
}

}  // namespace twell

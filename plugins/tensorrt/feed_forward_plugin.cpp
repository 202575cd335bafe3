#include "feed_forward_plugin.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "fields.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

static_assert(kRoles <= kMostInputs);

constexpr char const* kGatedNames[] = {
    "x",        "w_gate",       "b_gate",     "w_up",         "b_up",       "w_down",      "b_down",
    "residual", "w_gate_scale", "w_up_scale", "w_down_scale", "thresholds", "norm_weight", "norm_bias"};
// The kernels call the only projection before the activation "gate", whatever the block.
constexpr char const* kPlainNames[] = {
    "x",          "w_up",        "b_up",     "", "", "w_down", "b_down", "residual", "w_up_scale", "", "w_down_scale",
    "thresholds", "norm_weight", "norm_bias"};
static_assert(std::size(kGatedNames) == kRoles && std::size(kPlainNames) == kRoles);

char const* role_name(twell_variant variant, int32_t role) {
    return variant == TWELL_GATED ? kGatedNames[role] : kPlainNames[role];
}

std::array<bool, kRoles> present_roles(twell_variant variant, Options const& options) {
    bool const gated = variant == TWELL_GATED;
    return {true,
            true,
            options.b_gate,
            gated,
            gated && options.b_up,
            true,
            options.b_down,
            options.residual,
            options.scales,
            gated && options.scales,
            options.scales,
            options.thresholds,
            options.norm_weight,
            options.norm_bias};
}

std::vector<Input> inputs_of(twell_variant variant, Options const& options) {
    std::array<bool, kRoles> const present = present_roles(variant, options);
    std::vector<Input> inputs;
    for (int32_t role = 0; role < kRoles; ++role) {
        if (present[role]) {
            bool const is_weight = role == kWGate || role == kWUp || role == kWDown;
            InputType const of_weights = options.scales && is_weight ? InputType::kFp8 : InputType::kElement;
            bool const is_float32 = role >= kGateScale && role <= kThresholds;
            inputs.push_back({role_name(variant, role), is_float32 ? InputType::kFloat32 : of_weights});
        }
    }
    return inputs;
}

}  // namespace

// ---- constructor ----

FeedForwardPlugin::FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options)
    : PluginBase(plugin_name(variant), std::move(layer), inputs_of(variant, options)),
      variant_(variant),
      options_(options),
      slots_(slots_of(present_roles(variant, options))) {}

FeedForwardPlugin::FeedForwardPlugin(FeedForwardPlugin const& other)
    : FeedForwardPlugin(other.variant_, other.layer(), other.options_) {}

// ---- checks shared by build and runtime ----

std::string FeedForwardPlugin::allowed_types(DataType first) const {
    std::string others = options_.scales ? "weights and their scales" : "";
    if (options_.thresholds) {
        others += others.empty() ? "thresholds" : ", and thresholds";
    }
    others = others.empty() ? "all inputs" : "all inputs but " + others;
    return others + " must be bf16, or all fp16 (x is " + text_of(first) + ")";
}

// The problem that these input shapes pose. Extents may be kAny; then only what is known is checked, and the result
// holds placeholders.
twell_problem FeedForwardPlugin::problem_of(Shapes const& inputs, DataType type) const {
    Dims const& x = inputs[slots_[kX]];
    if (x.nbDims < 1 || x.nbDims > Dims::MAX_DIMS) {
        throw Refusal("input x has rank " + std::to_string(x.nbDims) + "; expected [..., d_model] of rank 1 to 8");
    }
    auto const check = [&](Role role, Dims const& expected, char const* meaning) {
        if (slots_[role] >= 0) {
            check_shape(role_name(variant_, role), inputs[slots_[role]], expected, meaning);
        }
    };
    Dims const& w_gate = inputs[slots_[kWGate]];
    Dims const& w_down = inputs[slots_[kWDown]];
    check(kWGate, dims_of({kAny, kAny}), "[d_ff, d_model]");
    check(kWDown, dims_of({kAny, kAny}), "[d_ff, d_out]");
    int64_t const d_ff = w_gate.d[0];
    int64_t const d_model = w_gate.d[1];
    int64_t const d_out = w_down.d[1];
    check(kBGate, dims_of({d_ff}), "[d_ff]");
    check(kWUp, dims_of({d_ff, d_model}), "[d_ff, d_model]");
    check(kBUp, dims_of({d_ff}), "[d_ff]");
    check(kWDown, dims_of({d_ff, d_out}), "[d_ff, d_out]");
    check(kBDown, dims_of({d_out}), "[d_out]");
    int64_t const columns = x.d[x.nbDims - 1];
    if (columns != kAny && d_model != kAny && columns != d_model) {
        throw Refusal("input x has shape " + text_of(x) + "; its last extent must be d_model = " +
                      std::to_string(d_model) + ", as in " + role_name(variant_, kWGate) + " [d_ff, d_model]");
    }
    Dims y = x;
    y.d[y.nbDims - 1] = d_out;
    check(kThresholds, dims_of({d_ff}), "[d_ff]");
    check(kNormWeight, dims_of({d_model}), "[d_model]");
    check(kNormBias, dims_of({d_model}), "[d_model]");
    check(kResidual, y, "that of y, [..., d_out]");
    if (d_ff != kAny && options_.hot > d_ff) {
        refuse("hot", std::to_string(options_.hot), "0 to d_ff = " + std::to_string(d_ff));
    }

    // Placeholders for what is not known are the smallest good values.
    twell_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = rows_of(x);
    problem.d_model = narrow(d_model, 8);
    problem.d_ff = narrow(d_ff, std::max(options_.hot, 1));
    problem.d_out = narrow(d_out, 8);
    problem.compression = options_.compression;
    problem.dtype = type == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
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
    if (char const* const complaint = twell_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (x " + text_of(x) + ", " + role_name(variant_, kWGate) + " " +
                      text_of(w_gate) + ", w_down " + text_of(w_down) + ")");
    }
    return problem;
}

// Writes into the problem which form scales have, by their shapes: [], [d_ff, 1], or of w_down [1, d_out].
void FeedForwardPlugin::check_scales(Shapes const& inputs, twell_problem& problem) const {
    auto const shape = [&](Role role) -> Dims const& { return inputs[slots_[role]]; };
    int64_t const d_ff = shape(kWGate).d[0];
    int64_t const d_out = shape(kWDown).d[1];
    bool const by_neuron = shape(kGateScale).nbDims != 0;
    auto const check = [&](Role role, Dims const& expected, char const* meaning) {
        check_shape(role_name(variant_, role), shape(role), expected, meaning);
    };
    if (by_neuron) {
        check(kGateScale, dims_of({d_ff, 1}), "none, or [d_ff, 1]");
    }
    if (slots_[kUpScale] >= 0) {
        check(kUpScale, by_neuron ? dims_of({d_ff, 1}) : dims_of({}), "that of w_gate_scale");
    }
    Dims const& down = shape(kDownScale);
    bool const by_output = down.nbDims == 2 && down.d[1] != 1;  // d_out is a multiple of 8
    if (down.nbDims != 0) {
        check(kDownScale, by_output ? dims_of({1, d_out}) : dims_of({d_ff, 1}),
              by_output ? "none, [d_ff, 1] or [1, d_out]" : "none, [1, d_out] or [d_ff, 1]");
    }
    problem.weight_dtype = TWELL_E4M3;
    problem.gate_up_scale = by_neuron ? TWELL_SCALE_NEURON : TWELL_SCALE_TENSOR;
    problem.down_scale = down.nbDims == 0 ? TWELL_SCALE_TENSOR : by_output ? TWELL_SCALE_OUTPUT : TWELL_SCALE_NEURON;
}

// ---- build ----

void FeedForwardPlugin::check_shapes(Shapes const& inputs) const {
    problem_of(inputs, DataType::kBF16);  // no limit depends on the type, which need not be known
}

void FeedForwardPlugin::set_output_shapes(DimsExprs const* inputs, DimsExprs* outputs, nvinfer1::IExprBuilder&) const {
    outputs[0] = inputs[slots_[kX]];
    outputs[0].d[outputs[0].nbDims - 1] = inputs[slots_[kWDown]].d[1];
}

// The problem with the most tokens of the profile: the one with the largest workspace. The weights' extents must be
// fixed, since the workspace may shrink where these grow.
twell_problem FeedForwardPlugin::largest_problem(DynamicPluginTensorDesc const* inputs) const {
    return problem_of(largest_shapes(inputs, slots_[kResidual]), inputs[slots_[kX]].desc.type);
}

void FeedForwardPlugin::configure(DynamicPluginTensorDesc const* inputs) { largest_problem(inputs); }

size_t FeedForwardPlugin::workspace_bytes(DynamicPluginTensorDesc const* inputs) const {
    twell_problem const problem = largest_problem(inputs);
    return twell_workspace_bytes(&problem);
}

// ---- runtime ----

FeedForwardPlugin* FeedForwardPlugin::attached() const {
    check_device();
    return new FeedForwardPlugin(*this);
}

void FeedForwardPlugin::run(PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs,
                            void* workspace, cudaStream_t stream) {
    twell_problem const problem = problem_of(runtime_shapes(descs), descs[slots_[kX]].type);
    auto const input = [&](Role role) { return slots_[role] < 0 ? nullptr : inputs[slots_[role]]; };
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
    check_launch(twell_mlp(&problem, &tensors, workspace, twell_workspace_bytes(&problem), stream));
}

// ---- serialisation ----

PluginFieldCollection const* FeedForwardPlugin::plan_fields() {
    serialized_ = std::make_unique<Serialized>(variant_, options_);
    return serialized_->collection();
}

// ---- creator ----

FeedForwardCreator::FeedForwardCreator(twell_variant variant)
    : CreatorBase(plugin_name(variant), field_names(variant)), variant_(variant) {}

nvinfer1::IPluginV3* FeedForwardCreator::create(char const* layer, PluginFieldCollection const* fields,
                                                TensorRTPhase phase) const {
    return new FeedForwardPlugin(variant_, layer, read_options(variant_, fields, phase));
}

}  // namespace twell

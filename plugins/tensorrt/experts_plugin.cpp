#include "experts_plugin.h"

#include <array>
#include <utility>
#include <vector>

#include "options.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr char const* kGate = "gate";
constexpr int32_t kExpertsSchema = 1;

std::vector<PluginField> experts_field_names() {
    return {known_field(field::kActivation, PluginFieldType::kCHAR),
            known_field(field::kThreshold, PluginFieldType::kFLOAT32), known_integer(kGate),
            known_integer(field::kScales), known_integer(field::kThresholds)};
}

ExpertsOptions read_experts_fields(PluginFieldCollection const* collection, TensorRTPhase phase) {
    FieldReader fields(collection);
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kExpertsSchema});
    }
    ExpertsOptions options;
    options.gate = fields.flag(kGate);
    options.activation = read_activation(options.gate ? TWELL_GATED : TWELL_PLAIN, fields, phase);
    options.threshold = read_threshold(options.activation, fields, phase);
    options.scales = fields.flag(field::kScales);
    options.thresholds = fields.flag(field::kThresholds);
    check_thresholds(options.thresholds, options.activation, options.threshold);
    fields.reject_rest(experts_field_names());
    return options;
}

std::array<Role, kExpertsRoles> roles_of(ExpertsOptions const& options) {
    InputType const matrix = options.scales ? InputType::kFp8 : InputType::kElement;
    return {{{"x", InputType::kElement, true},
             {"up", matrix, true},
             {"gate", matrix, options.gate},
             {"down", matrix, true},
             {"ids", InputType::kIndex, true, true},
             {"weights", InputType::kFloat32, true, true},
             {"up_scale", InputType::kFloat32, options.scales},
             {"gate_scale", InputType::kFloat32, options.scales && options.gate},
             {"down_scale", InputType::kFloat32, options.scales},
             {"thresholds", InputType::kFloat32, options.thresholds}}};
}

// Which form scales of these shapes have: [], [experts, 1, 1], [experts, d_ff, 1] or [experts, 1, d_out].
int32_t form_of(Dims const& scales) {
    if (scales.nbDims != 3) {
        return TWELL_SCALE_TENSOR;
    }
    // Of experts with one neuron two forms are the same; d_out is a multiple of 16.
    return scales.d[2] != 1 ? TWELL_SCALE_OUTPUT : scales.d[1] != 1 ? TWELL_SCALE_NEURON : TWELL_SCALE_EXPERT;
}

}  // namespace

// ---- constructor ----

ExpertsPlugin::ExpertsPlugin(std::string layer, ExpertsOptions const& options)
    : KernelPlugin(kExpertsName, std::move(layer), roles_of(options)), options_(options) {}

// ---- checks shared by build and runtime ----

std::string ExpertsPlugin::other_types() const {
    return std::string("ids, weights") + (options_.scales ? ", matrices, their scales" : "") +
           (options_.thresholds ? ", thresholds" : "");
}

twell_experts_problem ExpertsPlugin::problem_of(Shapes const& inputs, Types const& types) const {
    check(inputs, kExpertsUp, dims_of({kAny, kAny, kAny}), "[experts, d_ff, d_model]");
    int64_t const experts = shape(inputs, kExpertsUp).d[0];
    int64_t const d_ff = shape(inputs, kExpertsUp).d[1];
    int64_t const d_model = shape(inputs, kExpertsUp).d[2];
    check(inputs, kExpertsGate, dims_of({experts, d_ff, d_model}), "[experts, d_ff, d_model]");
    check(inputs, kExpertsDown, dims_of({experts, d_ff, kAny}), "[experts, d_ff, d_out]");
    int64_t const d_out = shape(inputs, kExpertsDown).d[2];
    check(inputs, kExpertsX, dims_of({kAny, d_model}), "[tokens, d_model]");
    int64_t const tokens = inputs[kExpertsX].d[0];
    check(inputs, kExpertsIds, dims_of({tokens, kAny}), "[tokens, top]");
    Dims const& ids = shape(inputs, kExpertsIds);
    if (ids.d[1] == kAny) {  // which the workspace depends on
        throw Refusal("input ids has shape " + text_of(ids) + "; its last extent, top, must be fixed");
    }
    check(inputs, kExpertsWeights, dims_of({tokens, ids.d[1]}), "[tokens, top]");
    check(inputs, kExpertsThresholds, dims_of({experts, d_ff}), "[experts, d_ff]");

    // Placeholders for unknown extents are the smallest good values.
    twell_experts_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = rows_of(inputs[kExpertsX]);
    problem.d_model = narrow(d_model, 16);
    problem.experts = narrow(experts, 1);
    problem.top = narrow(ids.d[1], 1);
    problem.d_ff = narrow(d_ff, 1);
    problem.d_out = narrow(d_out, 16);
    problem.dtype = types[kExpertsX] == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.weight_dtype = problem.dtype;
    problem.variant = options_.gate ? TWELL_GATED : TWELL_PLAIN;
    problem.activation = options_.activation;
    problem.threshold = options_.threshold;
    problem.id_bytes = types[slot(kExpertsIds)] == DataType::kINT64 ? 8 : 4;
    problem.up = {int64_t{problem.d_ff} * problem.d_model, problem.d_model};
    problem.gate = options_.gate ? problem.up : twell_expert_strides{};
    problem.down = {int64_t{problem.d_ff} * problem.d_out, problem.d_out};
    if (options_.scales) {
        check_scales(inputs, problem);
    }
    check_problem(twell_experts_validate(&problem), inputs, {kExpertsX, kExpertsUp, kExpertsDown, kExpertsIds});
    return problem;
}

// Writes into the problem which form scales have, by their shapes.
void ExpertsPlugin::check_scales(Shapes const& inputs, twell_experts_problem& problem) const {
    int64_t const experts = shape(inputs, kExpertsDown).d[0];
    int64_t const d_ff = shape(inputs, kExpertsDown).d[1];
    int64_t const d_out = shape(inputs, kExpertsDown).d[2];
    auto const expected = [&](int32_t form) {
        return form == TWELL_SCALE_TENSOR
                   ? dims_of({})
                   : dims_of({experts, form == TWELL_SCALE_NEURON ? d_ff : 1, form == TWELL_SCALE_OUTPUT ? d_out : 1});
    };
    Dims const& up = shape(inputs, kExpertsUpScale);
    bool const of_rows = form_of(up) != TWELL_SCALE_OUTPUT;
    problem.weight_dtype = TWELL_E4M3;
    problem.gate_up_scale = of_rows ? form_of(up) : static_cast<int32_t>(TWELL_SCALE_NEURON);
    problem.down_scale = form_of(shape(inputs, kExpertsDownScale));
    check(inputs, kExpertsUpScale, expected(problem.gate_up_scale), "none, [experts, 1, 1] or [experts, d_ff, 1]");
    check(inputs, kExpertsGateScale, up, "that of up_scale");
    check(inputs, kExpertsDownScale, expected(problem.down_scale),
          "none, [experts, 1, 1], [experts, d_ff, 1] or [experts, 1, d_out]");
}

// ---- build ----

void ExpertsPlugin::set_output_shapes(DimsExprs const* inputs, DimsExprs* outputs, nvinfer1::IExprBuilder&) const {
    outputs[0] = inputs[kExpertsX];
    outputs[0].d[1] = inputs[slot(kExpertsDown)].d[2];
}

// ---- runtime ----

void ExpertsPlugin::launch(twell_experts_problem const& problem, void const* const* inputs, void* const* outputs,
                           void* workspace, cudaStream_t stream) const {
    auto const input = [&](ExpertsRole role) { return has(role) ? inputs[slot(role)] : nullptr; };
    twell_experts_tensors tensors{};
    tensors.struct_bytes = sizeof(tensors);
    tensors.x = input(kExpertsX);
    tensors.gate = input(kExpertsGate);
    tensors.up = input(kExpertsUp);
    tensors.down = input(kExpertsDown);
    tensors.ids = input(kExpertsIds);
    tensors.weights = input(kExpertsWeights);
    tensors.y = outputs[0];
    tensors.gate_scale = input(kExpertsGateScale);
    tensors.up_scale = input(kExpertsUpScale);
    tensors.down_scale = input(kExpertsDownScale);
    tensors.thresholds = input(kExpertsThresholds);
    check_launch(twell_experts(&problem, &tensors, workspace, bytes_of(problem), stream));
}

// ---- serialisation ----

std::unique_ptr<PlanFields> ExpertsPlugin::plan_fields() const {
    auto fields = std::make_unique<PlanFields>(kExpertsSchema);
    fields->add(field::kActivation, options_.activation);
    fields->add(field::kThreshold, options_.threshold);
    fields->add(kGate, options_.gate);
    fields->add(field::kScales, options_.scales);
    fields->add(field::kThresholds, options_.thresholds);
    return fields;
}

// ---- creator ----

ExpertsCreator::ExpertsCreator() : CreatorBase(kExpertsName, experts_field_names()) {}

nvinfer1::IPluginV3* ExpertsCreator::create(char const* layer, PluginFieldCollection const* fields,
                                            TensorRTPhase phase) const {
    return new ExpertsPlugin(layer, read_with_advice(phase, "libtwell_plugins.so", twell_version(),
                                                     [&] { return read_experts_fields(fields, phase); }));
}

}  // namespace twell

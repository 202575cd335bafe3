#include "linear_plugin.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "options.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr char const* kSplits = "splits";
constexpr char const* kChoose = "choose";  // which older graphs and plans lack
constexpr int32_t kLinearSchema = 1;

// The field that says whether an input is there; null: it always is.
constexpr std::array<char const*, kLinearRoles> kFlags = {nullptr,     nullptr,    "bias",  "norm_weight",
                                                          "norm_bias", "residual", "scales"};

std::vector<PluginField> linear_field_names() {
    std::vector<PluginField> fields{known_field(field::kNorm, PluginFieldType::kCHAR),
                                    known_field(field::kEps, PluginFieldType::kFLOAT32), known_integer(kSplits),
                                    known_integer(kChoose)};
    std::transform(kFlags.begin() + kLinearBias, kFlags.end(), std::back_inserter(fields), known_integer);
    return fields;
}

LinearOptions read_linear_fields(PluginFieldCollection const* collection, TensorRTPhase phase) {
    FieldReader fields(collection);
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kLinearSchema});
    }
    LinearOptions options;
    options.norm = read_norm(fields, phase);
    options.eps = read_eps(fields);
    std::string const allowed = "1 to " + std::to_string(TWELL_MAX_SPLITS) + " positive multiples of 8";
    options.splits = fields.integers(kSplits, TWELL_MAX_SPLITS, allowed);
    for (int32_t const width : options.splits) {
        if (width <= 0 || width % 8 != 0 || width > TWELL_MAX_WIDTH) {
            refuse(kSplits, std::to_string(width), allowed);
        }
    }
    options.choose = fields.newer_flag(kChoose);
    if (options.choose && options.splits.size() > 1) {
        refuse(kChoose, "1", "0 with several outputs");
    }
    for (size_t i = 0; i < kLinearRoles; ++i) {
        options.has[i] = kFlags[i] == nullptr || fields.flag(kFlags[i]);
    }
    check_norm_inputs(options.norm, options.has[kLinearNormWeight], options.has[kLinearNormBias]);
    if (options.has[kLinearResidual] && options.splits.size() > 1) {
        refuse(kFlags[kLinearResidual], "1", "0 with several outputs");
    }
    fields.reject_rest(linear_field_names());
    return options;
}

std::array<Role, kLinearRoles> roles_of(LinearOptions const& options) {
    InputType const weight = options.has[kLinearScale] ? InputType::kFp8 : InputType::kElement;
    std::array<Role, kLinearRoles> roles{{{"x", InputType::kElement, true},
                                          {"weight", weight, true},
                                          {"bias", InputType::kElement, true},
                                          {"norm_weight", InputType::kElement, true},
                                          {"norm_bias", InputType::kElement, true},
                                          {"residual", InputType::kElement, true, true},
                                          {"weight_scale", InputType::kFloat32, true}}};
    for (size_t i = 0; i < kLinearRoles; ++i) {
        roles[i].present = options.has[i];
    }
    return roles;
}

}  // namespace

// ---- constructor ----

LinearPlugin::LinearPlugin(std::string layer, LinearOptions const& options)
    : KernelPlugin(kLinearName, std::move(layer), roles_of(options)), options_(options) {}

// ---- checks shared by build and runtime ----

twell_linear_problem LinearPlugin::problem_of(Shapes const& inputs, Types const& types) const {
    int64_t const out = std::accumulate(options_.splits.begin(), options_.splits.end(), int64_t{0});
    check(inputs, kLinearWeight, dims_of({out, kAny}), "[out, in], out the sum of splits");
    int64_t const in = shape(inputs, kLinearWeight).d[1];
    check(inputs, kLinearBias, dims_of({out}), "[out]");
    check(inputs, kLinearNormWeight, dims_of({in}), "[in]");
    check(inputs, kLinearNormBias, dims_of({in}), "[in]");
    check_rows(inputs, "in", kLinearWeight, "[out, in]");
    check_residual(inputs, kLinearResidual, out, "out");
    int32_t scale_form = TWELL_SCALE_TENSOR;
    if (has(kLinearScale) && shape(inputs, kLinearScale).nbDims != 0) {
        bool const by_block = shape(inputs, kLinearScale).d[0] == scale_blocks(out);
        scale_form = by_block ? TWELL_SCALE_BLOCK : TWELL_SCALE_NEURON;
        check(inputs, kLinearScale, by_block ? dims_of({scale_blocks(out), scale_blocks(in)}) : dims_of({out, 1}),
              "none, [out / 128, in / 128] or [out, 1]");
    }

    twell_linear_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = rows_of(inputs[kLinearX]);
    problem.in = narrow(in, 8);
    problem.out = narrow(out, 8);
    problem.dtype = types[kLinearX] == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.weight_dtype = has(kLinearScale) ? static_cast<int32_t>(TWELL_E4M3) : problem.dtype;
    problem.weight_scale = scale_form;
    problem.norm = options_.norm;
    problem.eps = options_.eps;
    std::copy(options_.splits.begin(), options_.splits.end(), problem.splits);
    problem.choose = options_.choose ? 1 : 0;
    check_problem(twell_linear_validate(&problem), inputs, {kLinearX, kLinearWeight});
    return problem;
}

// ---- build ----

void LinearPlugin::set_output_shapes(DimsExprs const* inputs, DimsExprs* outputs,
                                     nvinfer1::IExprBuilder& builder) const {
    for (size_t i = 0; i < options_.splits.size(); ++i) {
        outputs[i] = inputs[kLinearX];
        if (options_.choose) {
            --outputs[i].nbDims;
            continue;
        }
        outputs[i].d[outputs[i].nbDims - 1] = builder.constant(options_.splits[i]);
    }
}

// ---- runtime ----

void LinearPlugin::launch(twell_linear_problem const& problem, void const* const* inputs, void* const* outputs,
                          void* workspace, cudaStream_t stream) const {
    auto const input = [&](LinearRole role) { return has(role) ? inputs[slot(role)] : nullptr; };
    twell_linear_tensors tensors{};
    tensors.struct_bytes = sizeof(tensors);
    tensors.x = input(kLinearX);
    tensors.weight = input(kLinearWeight);
    tensors.bias = input(kLinearBias);
    tensors.norm_weight = input(kLinearNormWeight);
    tensors.norm_bias = input(kLinearNormBias);
    tensors.residual = input(kLinearResidual);
    tensors.weight_scale = input(kLinearScale);
    std::copy_n(outputs, options_.splits.size(), tensors.y);
    check_launch(twell_linear(&problem, &tensors, workspace, bytes_of(problem), stream));
}

// ---- serialisation ----

std::unique_ptr<PlanFields> LinearPlugin::plan_fields() const {
    auto fields = std::make_unique<PlanFields>(kLinearSchema);
    fields->add(field::kNorm, options_.norm);
    fields->add(field::kEps, options_.eps);
    fields->add(kSplits, options_.splits);
    fields->add(kChoose, options_.choose);
    for (size_t i = kLinearBias; i < kLinearRoles; ++i) {
        fields->add(kFlags[i], options_.has[i]);
    }
    return fields;
}

// ---- creator ----

LinearCreator::LinearCreator() : CreatorBase(kLinearName, linear_field_names()) {}

nvinfer1::IPluginV3* LinearCreator::create(char const* layer, PluginFieldCollection const* fields,
                                           TensorRTPhase phase) const {
    return new LinearPlugin(layer, read_with_advice(phase, "libtwell_plugins.so", twell_version(),
                                                    [&] { return read_linear_fields(fields, phase); }));
}

}  // namespace twell

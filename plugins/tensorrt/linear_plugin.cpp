#include "linear_plugin.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "options.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

constexpr char const* kNorm = "norm";
constexpr char const* kEps = "eps";
constexpr char const* kSplits = "splits";
constexpr char const* kChoose = "choose";  // which older graphs and plans lack
// In plans only: raised whenever the meaning of the plan fields changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 1;

// An input, and the field that says whether it is there; null: it always is.
struct Role {
    char const* name;
    char const* flag;
};
constexpr Role kRolesOfLayer[] = {{"x", nullptr},
                                  {"weight", nullptr},
                                  {"bias", "bias"},
                                  {"norm_weight", "norm_weight"},
                                  {"norm_bias", "norm_bias"},
                                  {"residual", "residual"},
                                  {"weight_scale", "scales"}};
static_assert(std::size(kRolesOfLayer) == kLinearRoles && kLinearRoles <= static_cast<int>(kMostInputs));

std::vector<PluginField> field_names() {
    std::vector<PluginField> fields{{kNorm, nullptr, PluginFieldType::kCHAR, 1},
                                    {kEps, nullptr, PluginFieldType::kFLOAT32, 1},
                                    {kSplits, nullptr, PluginFieldType::kINT32, 1},
                                    {kChoose, nullptr, PluginFieldType::kINT32, 1}};
    for (Role const& role : kRolesOfLayer) {
        if (role.flag != nullptr) {
            fields.emplace_back(role.flag, nullptr, PluginFieldType::kINT32, 1);
        }
    }
    return fields;
}

LinearOptions read_fields(PluginFieldCollection const* collection, TensorRTPhase phase) {
    FieldReader fields(collection);
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kSchemaVersion});
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
    options.choose = fields.has(kChoose) && fields.integer(kChoose, {0, 1}) == 1;
    if (options.choose && options.splits.size() > 1) {
        refuse(kChoose, "1", "0 with several outputs");
    }
    for (size_t i = 0; i < kLinearRoles; ++i) {
        char const* const flag = kRolesOfLayer[i].flag;
        options.has[i] = flag == nullptr || fields.integer(flag, {0, 1}) == 1;
    }
    check_norm_inputs(options.norm, options.has[kLinearNormWeight], options.has[kLinearNormBias]);
    if (options.has[kLinearResidual] && options.splits.size() > 1) {
        refuse(kRolesOfLayer[kLinearResidual].flag, "1", "0 with several outputs");
    }
    fields.reject_rest(field_names());
    return options;
}

std::vector<Input> inputs_of(LinearOptions const& options) {
    std::vector<Input> inputs;
    for (size_t i = 0; i < kLinearRoles; ++i) {
        if (options.has[i]) {
            bool const is_fp8 = i == kLinearWeight && options.has[kLinearScale];
            inputs.push_back({kRolesOfLayer[i].name, i == kLinearScale ? InputType::kFloat32
                                                     : is_fp8          ? InputType::kFp8
                                                                       : InputType::kElement});
        }
    }
    return inputs;
}

}  // namespace

// ---- constructor ----

LinearPlugin::LinearPlugin(std::string layer, LinearOptions const& options)
    : PluginBase(kLinearName, std::move(layer), inputs_of(options)), options_(options), slots_(slots_of(options.has)) {}

LinearPlugin::LinearPlugin(LinearPlugin const& other) : LinearPlugin(other.layer(), other.options_) {}

// ---- checks shared by build and runtime ----

int32_t LinearPlugin::output_count() const { return static_cast<int32_t>(options_.splits.size()); }

std::string LinearPlugin::allowed_types(DataType first) const {
    std::string const others = options_.has[kLinearScale] ? "all inputs but the weight and its scale" : "all inputs";
    return others + " must be bf16, or all fp16 (x is " + text_of(first) + ")";
}

// The problem that these input shapes pose. Extents may be kAny; then only what is known is checked, and the result
// holds placeholders.
twell_linear_problem LinearPlugin::problem_of(Shapes const& inputs, DataType type) const {
    Dims const& x = inputs[slots_[kLinearX]];
    if (x.nbDims < 1 || x.nbDims > Dims::MAX_DIMS) {
        throw Refusal("input x has rank " + std::to_string(x.nbDims) + "; expected [..., in] of rank 1 to 8");
    }
    auto const check = [&](LinearRole role, Dims const& expected, char const* meaning) {
        if (slots_[role] >= 0) {
            check_shape(kRolesOfLayer[role].name, inputs[slots_[role]], expected, meaning);
        }
    };
    int64_t out = 0;
    for (int32_t const width : options_.splits) {
        out += width;
    }
    check(kLinearWeight, dims_of({out, kAny}), "[out, in], out the sum of splits");
    int64_t const in = inputs[slots_[kLinearWeight]].d[1];
    int64_t const columns = x.d[x.nbDims - 1];
    if (columns != kAny && in != kAny && columns != in) {
        throw Refusal("input x has shape " + text_of(x) + "; its last extent must be in = " + std::to_string(in) +
                      ", as in weight [out, in]");
    }
    check(kLinearBias, dims_of({out}), "[out]");
    check(kLinearNormWeight, dims_of({in}), "[in]");
    check(kLinearNormBias, dims_of({in}), "[in]");
    Dims y = x;
    y.d[y.nbDims - 1] = out;
    check(kLinearResidual, y, "that of y, [..., out]");
    bool const scaled = slots_[kLinearScale] >= 0;
    bool const by_output = scaled && inputs[slots_[kLinearScale]].nbDims != 0;
    if (by_output) {
        check(kLinearScale, dims_of({out, 1}), "none, or [out, 1]");
    }

    twell_linear_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = rows_of(x);
    problem.in = narrow(in, 8);
    problem.out = narrow(out, 8);
    problem.dtype = type == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.weight_dtype = scaled ? static_cast<int32_t>(TWELL_E4M3) : problem.dtype;
    problem.weight_scale = by_output ? TWELL_SCALE_NEURON : TWELL_SCALE_TENSOR;
    problem.norm = options_.norm;
    problem.eps = options_.eps;
    std::copy(options_.splits.begin(), options_.splits.end(), problem.splits);
    problem.choose = options_.choose ? 1 : 0;
    if (char const* const complaint = twell_linear_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (x " + text_of(x) + ", weight " +
                      text_of(inputs[slots_[kLinearWeight]]) + ")");
    }
    return problem;
}

// ---- build ----

void LinearPlugin::check_shapes(Shapes const& inputs) const {
    problem_of(inputs, DataType::kBF16);  // no limit depends on the type, which need not be known
}

void LinearPlugin::set_output_shapes(DimsExprs const* inputs, DimsExprs* outputs,
                                     nvinfer1::IExprBuilder& builder) const {
    for (size_t i = 0; i < options_.splits.size(); ++i) {
        outputs[i] = inputs[slots_[kLinearX]];
        if (options_.choose) {
            --outputs[i].nbDims;
            continue;
        }
        outputs[i].d[outputs[i].nbDims - 1] = builder.constant(options_.splits[i]);
    }
}

// The problem with the most tokens of the profile: the one with the largest workspace. The extents of all but x and
// the residual must be fixed.
twell_linear_problem LinearPlugin::largest_problem(DynamicPluginTensorDesc const* inputs) const {
    return problem_of(largest_shapes(inputs, slots_[kLinearResidual]), inputs[slots_[kLinearX]].desc.type);
}

void LinearPlugin::configure(DynamicPluginTensorDesc const* inputs) { largest_problem(inputs); }

size_t LinearPlugin::workspace_bytes(DynamicPluginTensorDesc const* inputs) const {
    twell_linear_problem const problem = largest_problem(inputs);
    return twell_linear_workspace_bytes(&problem);
}

// ---- runtime ----

LinearPlugin* LinearPlugin::attached() const {
    check_device();
    return new LinearPlugin(*this);
}

void LinearPlugin::run(PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) {
    twell_linear_problem const problem = problem_of(runtime_shapes(descs), descs[slots_[kLinearX]].type);
    auto const input = [&](LinearRole role) { return slots_[role] < 0 ? nullptr : inputs[slots_[role]]; };
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
    size_t const bytes = twell_linear_workspace_bytes(&problem);
    check_launch(twell_linear(&problem, &tensors, workspace, bytes, stream));
}

// ---- serialisation ----

PluginFieldCollection const* LinearPlugin::plan_fields() {
    integers_ = {kSchemaVersion, options_.norm, options_.choose ? 1 : 0};
    for (bool const there : options_.has) {
        integers_.push_back(there ? 1 : 0);
    }
    fields_ = {{kSchema, integers_.data(), PluginFieldType::kINT32, 1},
               {kNorm, integers_.data() + 1, PluginFieldType::kINT32, 1},
               {kEps, &options_.eps, PluginFieldType::kFLOAT32, 1},
               {kSplits, options_.splits.data(), PluginFieldType::kINT32, output_count()},
               {kChoose, integers_.data() + 2, PluginFieldType::kINT32, 1}};
    for (size_t i = 0; i < kLinearRoles; ++i) {
        if (kRolesOfLayer[i].flag != nullptr) {
            fields_.emplace_back(kRolesOfLayer[i].flag, &integers_[3 + i], PluginFieldType::kINT32, 1);
        }
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
}

// ---- creator ----

LinearCreator::LinearCreator() : CreatorBase(kLinearName, field_names()) {}

nvinfer1::IPluginV3* LinearCreator::create(char const* layer, PluginFieldCollection const* fields,
                                           TensorRTPhase phase) const {
    return new LinearPlugin(layer, read_with_advice(phase, "libtwell_plugins.so", twell_version(),
                                                    [&] { return read_fields(fields, phase); }));
}

}  // namespace twell

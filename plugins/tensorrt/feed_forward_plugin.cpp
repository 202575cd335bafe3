#include "feed_forward_plugin.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "common.h"
#include "fields.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

}  // namespace

// ---- constructor ----

FeedForwardPlugin::FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options)
    : PluginBase(plugin_name(variant), std::move(layer)), variant_(variant), options_(options) {
    bool const gated = variant == TWELL_GATED;
    bool const present[kRoles] = {true, true,           options.b_gate,  gated, gated && options.b_up,
                                  true, options.b_down, options.residual};
    for (int32_t role = 0; role < kRoles; ++role) {
        slots_[role] = present[role] ? input_count_++ : -1;
    }
}

FeedForwardPlugin::FeedForwardPlugin(FeedForwardPlugin const& other)
    : FeedForwardPlugin(other.variant_, other.layer(), other.options_) {}

// ---- checks shared by build and runtime ----

char const* FeedForwardPlugin::role_name(Role role) const {
    constexpr char const* kGatedNames[] = {"x", "w_gate", "b_gate", "w_up", "b_up", "w_down", "b_down", "residual"};
    // The kernels call the only projection before the activation "gate", whatever the block.
    constexpr char const* kPlainNames[] = {"x", "w_up", "b_up", "", "", "w_down", "b_down", "residual"};
    return variant_ == TWELL_GATED ? kGatedNames[role] : kPlainNames[role];
}

std::string FeedForwardPlugin::expected_inputs() const {
    std::string out;
    for (int32_t role = 0; role < kRoles; ++role) {
        if (slots_[role] >= 0) {
            out += (out.empty() ? "" : ", ") + std::string(role_name(static_cast<Role>(role)));
        }
    }
    return out;
}

void FeedForwardPlugin::check_input_count(int64_t count) const {
    if (count != input_count_) {
        throw Refusal("got " + std::to_string(count) + " inputs; expected " + std::to_string(input_count_) + ": " +
                      expected_inputs());
    }
}

void FeedForwardPlugin::check_types(DataType const* types) const {
    for (int32_t role = 0; role < kRoles; ++role) {
        if (slots_[role] < 0) {
            continue;
        }
        DataType const type = types[slots_[role]];
        if (!is_supported(type) || type != types[slots_[kX]]) {
            throw Refusal("input " + std::string(role_name(static_cast<Role>(role))) + " is " + text_of(type) +
                          "; all inputs must be bf16, or all fp16 (x is " + text_of(types[slots_[kX]]) + ")");
        }
    }
}

// Holds an input of rank 1 (expected[1] is kAny) or 2 against what the other inputs say.
void FeedForwardPlugin::check_shape(Shapes const& inputs, Role role, std::array<int64_t, 2> const& expected,
                                    char const* meaning) const {
    if (slots_[role] < 0) {
        return;
    }
    Dims const& dims = inputs[slots_[role]];
    bool const is_bias = role == kBGate || role == kBUp || role == kBDown;
    int32_t const rank = is_bias ? 1 : 2;
    bool good = dims.nbDims == rank;
    for (int32_t i = 0; good && i < rank; ++i) {
        good = dims.d[i] == kAny || expected[i] == kAny || dims.d[i] == expected[i];
    }
    if (!good) {
        Dims wanted{};
        wanted.nbDims = rank;
        std::copy_n(expected.begin(), rank, wanted.d);
        throw Refusal("input " + std::string(role_name(role)) + " has shape " + text_of(dims) + "; expected " +
                      meaning + " = " + text_of(wanted));
    }
}

// Holds the residual against the shape of y: the leading extents of x, and d_out.
void FeedForwardPlugin::check_residual(Shapes const& inputs) const {
    if (slots_[kResidual] < 0) {
        return;
    }
    Dims const& dims = inputs[slots_[kResidual]];
    Dims expected = inputs[slots_[kX]];
    expected.d[expected.nbDims - 1] = inputs[slots_[kWDown]].d[1];
    bool good = dims.nbDims == expected.nbDims;
    for (int32_t i = 0; good && i < dims.nbDims; ++i) {
        good = dims.d[i] == kAny || expected.d[i] == kAny || dims.d[i] == expected.d[i];
    }
    if (!good) {
        throw Refusal("input residual has shape " + text_of(dims) +
                      "; expected that of y, [..., d_out] = " + text_of(expected));
    }
}

// The problem that these input shapes pose. Extents may be kAny; then only what is known is checked, and the result
// holds placeholders.
twell_problem FeedForwardPlugin::problem_of(Shapes const& inputs, DataType type) const {
    Dims const& x = inputs[slots_[kX]];
    if (x.nbDims < 1 || x.nbDims > Dims::MAX_DIMS) {
        throw Refusal("input x has rank " + std::to_string(x.nbDims) + "; expected [..., d_model] of rank 1 to 8");
    }
    check_shape(inputs, kWGate, {kAny, kAny}, "[d_ff, d_model]");
    check_shape(inputs, kWDown, {kAny, kAny}, "[d_ff, d_out]");
    int64_t const d_ff = inputs[slots_[kWGate]].d[0];
    int64_t const d_model = inputs[slots_[kWGate]].d[1];
    int64_t const d_out = inputs[slots_[kWDown]].d[1];
    check_shape(inputs, kBGate, {d_ff, kAny}, "[d_ff]");
    check_shape(inputs, kWUp, {d_ff, d_model}, "[d_ff, d_model]");
    check_shape(inputs, kBUp, {d_ff, kAny}, "[d_ff]");
    check_shape(inputs, kWDown, {d_ff, d_out}, "[d_ff, d_out]");
    check_shape(inputs, kBDown, {d_out, kAny}, "[d_out]");
    int64_t const columns = x.d[x.nbDims - 1];
    if (columns != kAny && d_model != kAny && columns != d_model) {
        throw Refusal("input x has shape " + text_of(x) + "; its last extent must be d_model = " +
                      std::to_string(d_model) + ", as in " + role_name(kWGate) + " [d_ff, d_model]");
    }
    check_residual(inputs);
    if (d_ff != kAny && options_.hot > d_ff) {
        refuse("hot", std::to_string(options_.hot), "0 to d_ff = " + std::to_string(d_ff));
    }
    int64_t tokens = 1;
    for (int32_t i = 0; i < x.nbDims - 1; ++i) {
        if (x.d[i] != kAny && __builtin_mul_overflow(tokens, x.d[i], &tokens)) {
            tokens = std::numeric_limits<int64_t>::max();
        }
    }

    // What 32 bits do not hold is beyond every limit. Placeholders for what is not known are the smallest good values.
    auto const narrow = [](int64_t extent, int32_t placeholder) {
        constexpr int64_t kBeyondLimits = std::numeric_limits<int32_t>::max() / 8 * 8;
        return extent == kAny ? placeholder : static_cast<int32_t>(std::min(extent, kBeyondLimits));
    };
    twell_problem problem{};
    problem.struct_bytes = sizeof(problem);
    problem.tokens = tokens;
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
    if (char const* const complaint = twell_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (x " + text_of(x) + ", " + role_name(kWGate) + " " +
                      text_of(inputs[slots_[kWGate]]) + ", w_down " + text_of(inputs[slots_[kWDown]]) + ")");
    }
    return problem;
}

// ---- build ----

int32_t FeedForwardPlugin::getOutputDataTypes(DataType* output_types, int32_t output_count, DataType const* input_types,
                                              int32_t input_count) const noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        check_types(input_types);
        std::fill_n(output_types, output_count, input_types[slots_[kX]]);
        return 0;
    });
}

int32_t FeedForwardPlugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
                                           DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder&) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        Shapes shapes{};
        for (int32_t i = 0; i < input_count; ++i) {
            shapes[i] = known_dims(inputs[i]);
        }
        problem_of(shapes, DataType::kBF16);  // the dtype is not known here and no limit depends on it
        DimsExprs const& x = inputs[slots_[kX]];
        for (int32_t i = 0; i < output_count; ++i) {
            outputs[i] = x;
            outputs[i].d[x.nbDims - 1] = inputs[slots_[kWDown]].d[1];
        }
        return 0;
    });
}

bool FeedForwardPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* in_out,
                                                  int32_t input_count, int32_t output_count) noexcept {
    if (in_out == nullptr || input_count != input_count_ || output_count != 1 || pos < 0 || pos > input_count) {
        return false;
    }
    PluginTensorDesc const& desc = in_out[pos].desc;
    return desc.format == TensorFormat::kLINEAR && is_supported(desc.type) && desc.type == in_out[0].desc.type;
}

// The problem with the most tokens of the profile: the one with the largest workspace. The weights' extents must be
// fixed, since the workspace may shrink where these grow.
twell_problem FeedForwardPlugin::largest_problem(DynamicPluginTensorDesc const* inputs, int32_t input_count) const {
    check_input_count(input_count);
    Shapes shapes{};
    std::array<DataType, kRoles> types{};
    for (int32_t i = 0; i < input_count; ++i) {
        // The largest extents of a residual may be an estimate, other than those of x.
        shapes[i] = i == slots_[kResidual] ? inputs[i].desc.dims : inputs[i].max;
        types[i] = inputs[i].desc.type;
    }
    check_types(types.data());
    for (int32_t role = 0; role < kRoles; ++role) {
        if (role == kX || role == kResidual || slots_[role] < 0) {
            continue;
        }
        DynamicPluginTensorDesc const& weight = inputs[slots_[role]];
        if (!std::equal(weight.max.d, weight.max.d + weight.max.nbDims, weight.min.d)) {
            throw Refusal("input " + std::string(role_name(static_cast<Role>(role))) + " has shapes from " +
                          text_of(weight.min) + " to " + text_of(weight.max) + "; expected a fixed shape");
        }
    }
    return problem_of(shapes, types[slots_[kX]]);
}

int32_t FeedForwardPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t input_count,
                                           DynamicPluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        largest_problem(in, input_count);
        return 0;
    });
}

size_t FeedForwardPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                           DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return guarded<size_t>(0, [&] {
        twell_problem const problem = largest_problem(inputs, input_count);
        return twell_workspace_bytes(&problem);
    });
}

// ---- runtime ----

nvinfer1::IPluginV3* FeedForwardPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
        check_device();
        return new FeedForwardPlugin(*this);
    });
}

twell_problem FeedForwardPlugin::runtime_problem(PluginTensorDesc const* inputs) const {
    Shapes shapes{};
    for (int32_t i = 0; i < input_count_; ++i) {
        shapes[i] = inputs[i].dims;
    }
    return problem_of(shapes, inputs[slots_[kX]].type);
}

int32_t FeedForwardPlugin::onShapeChange(PluginTensorDesc const* in, int32_t input_count, PluginTensorDesc const*,
                                         int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        std::array<DataType, kRoles> types{};
        for (int32_t i = 0; i < input_count; ++i) {
            types[i] = in[i].type;
        }
        check_types(types.data());
        runtime_problem(in);
        return 0;
    });
}

int32_t FeedForwardPlugin::enqueue(PluginTensorDesc const* input_desc, PluginTensorDesc const*,
                                   void const* const* inputs, void* const* outputs, void* workspace,
                                   cudaStream_t stream) noexcept {
    return guarded<int32_t>(-1, [&] {
        twell_problem const problem = runtime_problem(input_desc);
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
        tensors.y = outputs[0];
        cudaError_t const status = twell_mlp(&problem, &tensors, workspace, twell_workspace_bytes(&problem), stream);
        if (status != cudaSuccess) {
            std::string message =
                std::string("the kernels failed: ") + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
            if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
                message += ". This library was built without code for this GPU; rebuild it with TWELL_CUDA_ARCHS";
            }
            throw Refusal(message);
        }
        return 0;
    });
}

// ---- serialisation ----

PluginFieldCollection const* FeedForwardPlugin::getFieldsToSerialize() noexcept {
    return guarded<PluginFieldCollection const*>(nullptr, [&] {
        serialized_ = std::make_unique<Serialized>(variant_, options_);
        return serialized_->collection();
    });
}

// ---- creator ----

FeedForwardCreator::FeedForwardCreator(twell_variant variant)
    : CreatorBase(plugin_name(variant), field_names(variant)), variant_(variant) {}

nvinfer1::IPluginV3* FeedForwardCreator::createPlugin(char const* name, PluginFieldCollection const* fields,
                                                      TensorRTPhase phase) noexcept {
    char const* const layer = name == nullptr ? "" : name;
    return guarded<nvinfer1::IPluginV3*>(plugin_name(variant_), layer, nullptr, [&] {
        return new FeedForwardPlugin(variant_, layer, read_options(variant_, fields, phase));
    });
}

}  // namespace twell

#include "append_plugin.h"

#include <cuda_runtime_api.h>
#include <twell/attention.h>

#include <algorithm>
#include <array>
#include <utility>

#include "../tensorrt/common.h"
#include "../tensorrt/fields.h"

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
using nvinfer1::TensorFormat;
using nvinfer1::TensorRTPhase;

constexpr char const* kSlotNames[kAppendSlots] = {"keys", "values", "new_keys", "new_values", "starts", "counts"};

// In plans only: raised whenever the meaning of what a plan holds changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 1;
constexpr int32_t kElementBytes = 2;

using Shapes = std::array<Dims, kAppendSlots>;

void check_count(int64_t count) {
    if (count != kAppendSlots) {
        throw Refusal("got " + std::to_string(count) +
                      " inputs; expected 6: keys, values, new_keys, new_values, starts, counts");
    }
}

void check_types(std::array<DataType, kAppendSlots> const& types) {
    for (int32_t slot = kSlotKeys; slot < kAppendSlots; ++slot) {
        bool const counts = slot >= kSlotStarts;
        if (counts ? types[slot] != DataType::kINT32 : !is_supported(types[slot]) || types[slot] != types[kSlotKeys]) {
            throw Refusal("input " + std::string(kSlotNames[slot]) + " is " + text_of(types[slot]) + "; expected " +
                          (counts ? "int32" : "bf16, or fp16, for all keys and values"));
        }
    }
}

void check_shape(int32_t slot, Dims const& dims, std::array<int64_t, 4> const& expected, int32_t rank,
                 char const* meaning) {
    bool good = dims.nbDims == rank;
    for (int32_t i = 0; good && i < rank; ++i) {
        good = dims.d[i] == kAny || expected[i] == kAny || dims.d[i] == expected[i];
    }
    if (!good) {
        Dims wanted{};
        wanted.nbDims = rank;
        std::copy_n(expected.begin(), rank, wanted.d);
        throw Refusal("input " + std::string(kSlotNames[slot]) + " has shape " + text_of(dims) + "; expected " +
                      meaning + " = " + text_of(wanted));
    }
}

void check_shapes(Shapes const& shapes) {
    char const* const cache = "[batch, kv_heads, length, width]";
    char const* const rows = "[batch, tokens, kv_heads, width]";
    Dims const& keys = shapes[kSlotKeys];
    Dims const& values = shapes[kSlotValues];
    Dims const& fresh = shapes[kSlotNewKeys];
    check_shape(kSlotKeys, keys, {kAny, kAny, kAny, kAny}, 4, cache);
    check_shape(kSlotValues, values, {keys.d[0], keys.d[1], keys.d[2], kAny}, 4, cache);
    check_shape(kSlotNewKeys, fresh, {keys.d[0], kAny, keys.d[1], keys.d[3]}, 4, rows);
    check_shape(kSlotNewValues, shapes[kSlotNewValues], {keys.d[0], fresh.d[1], keys.d[1], values.d[3]}, 4, rows);
    check_shape(kSlotStarts, shapes[kSlotStarts], {keys.d[0]}, 1, "[batch]");
    check_shape(kSlotCounts, shapes[kSlotCounts], {keys.d[0]}, 1, "[batch]");
}

int64_t bytes_of(Dims const& dims) {
    int64_t bytes = kElementBytes;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        bytes *= dims.d[i];
    }
    return bytes;
}

}  // namespace

AppendPlugin::AppendPlugin(std::string layer) : PluginBase(kAppendName, std::move(layer)) {}

// ---- build ----

int32_t AppendPlugin::getOutputDataTypes(DataType* output_types, int32_t output_count, DataType const* input_types,
                                         int32_t input_count) const noexcept {
    return guarded<int32_t>(-1, [&] {
        check_count(input_count);
        std::array<DataType, kAppendSlots> types{};
        std::copy_n(input_types, kAppendSlots, types.begin());
        check_types(types);
        std::fill_n(output_types, output_count, types[kSlotKeys]);
        return 0;
    });
}

int32_t AppendPlugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
                                      DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder&) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_count(input_count);
        Shapes shapes{};
        std::transform(inputs, inputs + input_count, shapes.begin(), known_dims);
        check_shapes(shapes);
        std::copy_n(inputs, output_count, outputs);
        return 0;
    });
}

bool AppendPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* in_out, int32_t input_count,
                                             int32_t output_count) noexcept {
    if (in_out == nullptr || input_count != kAppendSlots || output_count != kAppendOutputs || pos < 0 ||
        pos >= kAppendSlots + kAppendOutputs) {
        return false;
    }
    PluginTensorDesc const& desc = in_out[pos].desc;
    if (desc.format != TensorFormat::kLINEAR) {
        return false;
    }
    if (pos == kSlotStarts || pos == kSlotCounts) {
        return desc.type == DataType::kINT32;
    }
    return is_supported(desc.type) && desc.type == in_out[kSlotKeys].desc.type;
}

int32_t AppendPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t input_count,
                                      DynamicPluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_count(input_count);
        std::array<DataType, kAppendSlots> types{};
        Shapes shapes{};
        for (int32_t slot = 0; slot < kAppendSlots; ++slot) {
            types[slot] = in[slot].desc.type;
            shapes[slot] = in[slot].desc.dims;
        }
        check_types(types);
        check_shapes(shapes);
        return 0;
    });
}

int32_t AppendPlugin::getAliasedInput(int32_t output) noexcept {
    return output == kSlotKeys || output == kSlotValues ? output : -1;
}

// ---- runtime ----

nvinfer1::IPluginV3* AppendPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept { return clone(); }

int32_t AppendPlugin::onShapeChange(PluginTensorDesc const* in, int32_t input_count, PluginTensorDesc const*,
                                    int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_count(input_count);
        Shapes shapes{};
        std::transform(in, in + input_count, shapes.begin(), [](PluginTensorDesc const& desc) { return desc.dims; });
        check_shapes(shapes);
        return 0;
    });
}

int32_t AppendPlugin::enqueue(PluginTensorDesc const* input_desc, PluginTensorDesc const*, void const* const* inputs,
                              void* const* outputs, void*, cudaStream_t stream) noexcept {
    return guarded<int32_t>(-1, [&] {
        auto const check = [](cudaError_t status) {
            if (status != cudaSuccess) {
                throw Refusal(std::string("cannot append to the caches: ") + cudaGetErrorString(status));
            }
        };
        // A host binds input and output to one address. Where it does not, TensorRT passes both and copies nothing.
        for (int32_t slot : {kSlotKeys, kSlotValues}) {
            if (inputs[slot] != outputs[slot]) {
                auto const bytes = static_cast<size_t>(bytes_of(input_desc[slot].dims));
                check(cudaMemcpyAsync(outputs[slot], inputs[slot], bytes, cudaMemcpyDeviceToDevice, stream));
            }
        }
        Dims const& keys = input_desc[kSlotKeys].dims;
        Dims const& values = input_desc[kSlotValues].dims;
        twell_append_problem problem{};
        problem.batch = keys.d[0];
        problem.tokens = input_desc[kSlotNewKeys].dims.d[1];
        problem.length = keys.d[2];
        problem.kv_heads = static_cast<int32_t>(keys.d[1]);
        problem.key_bytes = static_cast<int32_t>(keys.d[3]) * kElementBytes;
        problem.value_bytes = static_cast<int32_t>(values.d[3]) * kElementBytes;
        twell_append_tensors tensors{};
        tensors.keys = outputs[kSlotKeys];
        tensors.values = outputs[kSlotValues];
        tensors.new_keys = inputs[kSlotNewKeys];
        tensors.new_values = inputs[kSlotNewValues];
        tensors.starts = static_cast<int32_t const*>(inputs[kSlotStarts]);
        tensors.counts = static_cast<int32_t const*>(inputs[kSlotCounts]);
        check(static_cast<cudaError_t>(twell_append_caches(&problem, &tensors, stream)));
        return 0;
    });
}

// ---- serialisation ----

PluginFieldCollection const* AppendPlugin::getFieldsToSerialize() noexcept {
    static PluginField const field{kSchema, &kSchemaVersion, PluginFieldType::kINT32, 1};
    static PluginFieldCollection const collection{1, &field};
    return &collection;
}

// ---- creator ----

AppendCreator::AppendCreator() : CreatorBase(kAppendName, {}) {}

nvinfer1::IPluginV3* AppendCreator::createPlugin(char const* name, PluginFieldCollection const* fields,
                                                 TensorRTPhase phase) noexcept {
    char const* const layer = name == nullptr ? "" : name;
    return guarded<nvinfer1::IPluginV3*>(kAppendName, layer, nullptr, [&] {
        read_with_advice(phase, "libtwell_attention.so", twell_attention_version(), [&] {
            FieldReader reader(fields);
            if (phase == TensorRTPhase::kRUNTIME) {
                reader.integer(kSchema, {kSchemaVersion});
            }
            reader.reject_rest({});
            return 0;
        });
        return new AppendPlugin(layer);
    });
}

}  // namespace twell

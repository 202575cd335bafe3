#include "append_plugin.h"

#include <cuda_runtime_api.h>
#include <twell/attention.h>

#include <utility>

#include "../tensorrt/fields.h"

namespace twell {
namespace {

using nvinfer1::Dims;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

// In plans only: raised whenever the meaning of what a plan holds changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 1;
constexpr int32_t kElementBytes = 2;

int64_t bytes_of(Dims const& dims) {
    int64_t bytes = kElementBytes;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        bytes *= dims.d[i];
    }
    return bytes;
}

}  // namespace

AppendPlugin::AppendPlugin(std::string layer)
    : PluginBase(kAppendName, std::move(layer),
                 {{"keys"},
                  {"values"},
                  {"new_keys"},
                  {"new_values"},
                  {"starts", InputType::kInt32},
                  {"counts", InputType::kInt32}}) {}

// ---- build ----

std::string AppendPlugin::allowed_types(nvinfer1::DataType) const {
    return "expected bf16, or fp16, for all keys and values";
}

void AppendPlugin::check_shapes(Shapes const& shapes) const {
    char const* const cache = "[batch, kv_heads, length, width]";
    char const* const rows = "[batch, tokens, kv_heads, width]";
    Dims const& keys = shapes[kSlotKeys];
    Dims const& values = shapes[kSlotValues];
    Dims const& fresh = shapes[kSlotNewKeys];
    auto const check = [&](AppendSlot slot, Dims const& expected, char const* meaning) {
        check_shape(input_name(slot), shapes[slot], expected, meaning);
    };
    check(kSlotKeys, dims_of({kAny, kAny, kAny, kAny}), cache);
    check(kSlotValues, dims_of({keys.d[0], keys.d[1], keys.d[2], kAny}), cache);
    check(kSlotNewKeys, dims_of({keys.d[0], kAny, keys.d[1], keys.d[3]}), rows);
    check(kSlotNewValues, dims_of({keys.d[0], fresh.d[1], keys.d[1], values.d[3]}), rows);
    check(kSlotStarts, dims_of({keys.d[0]}), "[batch]");
    check(kSlotCounts, dims_of({keys.d[0]}), "[batch]");
}

void AppendPlugin::configure(nvinfer1::DynamicPluginTensorDesc const* inputs) {
    check_shapes(shapes_of([&](size_t i) { return inputs[i].desc.dims; }));
}

int32_t AppendPlugin::getAliasedInput(int32_t output) noexcept {
    return output == kSlotKeys || output == kSlotValues ? output : -1;
}

// ---- runtime ----

void AppendPlugin::run(PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void*,
                       cudaStream_t stream) {
    auto const check = [](cudaError_t status) {
        if (status != cudaSuccess) {
            throw Refusal(std::string("cannot append to the caches: ") + cudaGetErrorString(status));
        }
    };
    // A host binds input and output to one address. Where it does not, TensorRT passes both and copies nothing.
    for (int32_t slot : {kSlotKeys, kSlotValues}) {
        if (inputs[slot] != outputs[slot]) {
            auto const bytes = static_cast<size_t>(bytes_of(descs[slot].dims));
            check(cudaMemcpyAsync(outputs[slot], inputs[slot], bytes, cudaMemcpyDeviceToDevice, stream));
        }
    }
    Dims const& keys = descs[kSlotKeys].dims;
    Dims const& values = descs[kSlotValues].dims;
    twell_append_problem problem{};
    problem.batch = keys.d[0];
    problem.tokens = descs[kSlotNewKeys].dims.d[1];
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
}

// ---- serialisation ----

PluginFieldCollection const* AppendPlugin::plan_fields() {
    static PluginField const field{kSchema, &kSchemaVersion, PluginFieldType::kINT32, 1};
    static PluginFieldCollection const collection{1, &field};
    return &collection;
}

// ---- creator ----

AppendCreator::AppendCreator() : CreatorBase(kAppendName, {}) {}

nvinfer1::IPluginV3* AppendCreator::create(char const* layer, PluginFieldCollection const* fields,
                                           TensorRTPhase phase) const {
    read_with_advice(phase, "libtwell_attention.so", twell_attention_version(), [&] {
        FieldReader reader(fields);
        if (phase == TensorRTPhase::kRUNTIME) {
            reader.integer(kSchema, {kSchemaVersion});
        }
        reader.reject_rest({});
        return 0;
    });
    return new AppendPlugin(layer);
}

}  // namespace twell

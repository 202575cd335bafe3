#include "append_plugin.h"

#include <cuda_runtime_api.h>
#include <twell/attention.h>

#include <utility>

namespace twell {
namespace {

using nvinfer1::Dims;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

constexpr int32_t kAppendSchema = 1;
constexpr int32_t kElementBytes = 2;

int64_t volume_of(Dims const& dims) {
    int64_t volume = 1;
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        volume *= dims.d[i];
    }
    return volume;
}

std::vector<Input> inputs_of(CacheOptions const& options) {
    std::vector<Input> inputs{{"keys", options.type()}, {"values", options.type()},    {"new_keys"},
                              {"new_values"},           {"starts", InputType::kInt32}, {"counts", InputType::kInt32}};
    if (options.rotated) {
        inputs.insert(inputs.end(), {{"cosines"}, {"sines"}});
    }
    return inputs;
}

}  // namespace

AppendPlugin::AppendPlugin(std::string layer, CacheOptions const& options)
    : PluginBase(kAppendName, std::move(layer), inputs_of(options)), options_(options) {}

// ---- build ----

std::string AppendPlugin::allowed_types(nvinfer1::DataType) const {
    return "expected bf16, or fp16, for all keys and values that are not in FP8";
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
    if (options_.rotated) {
        for (AppendSlot const slot : {kSlotKeyCosines, kSlotKeySines}) {
            check(slot, dims_of({keys.d[0], fresh.d[1], keys.d[3]}), "[batch, tokens, width]");
        }
        if ((keys.d[3] != kAny && keys.d[3] % 16 != 0) || (values.d[3] != kAny && values.d[3] % 8 != 0)) {
            throw Refusal("keys that are rotated must have a width of a multiple of 16, and values one of 8, got " +
                          text_of(keys) + " and " + text_of(values));
        }
    }
    if (options_.fp8 && ((keys.d[3] != kAny && keys.d[3] % 8 != 0) || (values.d[3] != kAny && values.d[3] % 8 != 0))) {
        throw Refusal("caches in FP8 must have widths of multiples of 8, got " + text_of(keys) + " and " +
                      text_of(values));
    }
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
            auto const bytes = static_cast<size_t>(volume_of(descs[slot].dims) * (options_.fp8 ? 1 : kElementBytes));
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
    problem.rotated = options_.rotated ? 1 : 0;
    problem.dtype = descs[kSlotNewKeys].type == nvinfer1::DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.fp8 = options_.fp8 ? 1 : 0;
    problem.key_scale = options_.key_scale;
    problem.value_scale = options_.value_scale;
    twell_append_tensors tensors{};
    tensors.keys = outputs[kSlotKeys];
    tensors.values = outputs[kSlotValues];
    tensors.new_keys = inputs[kSlotNewKeys];
    tensors.new_values = inputs[kSlotNewValues];
    tensors.starts = static_cast<int32_t const*>(inputs[kSlotStarts]);
    tensors.counts = static_cast<int32_t const*>(inputs[kSlotCounts]);
    if (options_.rotated) {
        tensors.cosines = inputs[kSlotKeyCosines];
        tensors.sines = inputs[kSlotKeySines];
    }
    check(static_cast<cudaError_t>(twell_append_caches(&problem, &tensors, stream)));
}

// ---- serialisation ----

std::unique_ptr<PlanFields> AppendPlugin::plan_fields() const {
    auto fields = std::make_unique<PlanFields>(kAppendSchema);
    options_.add_to(*fields);
    return fields;
}

// ---- creator ----

AppendCreator::AppendCreator() : CreatorBase(kAppendName, cache_fields()) {}

nvinfer1::IPluginV3* AppendCreator::create(char const* layer, PluginFieldCollection const* fields,
                                           TensorRTPhase phase) const {
    CacheOptions const options = read_with_advice(phase, "libtwell_attention.so", twell_attention_version(), [&] {
        FieldReader reader(fields);
        if (phase == TensorRTPhase::kRUNTIME) {
            reader.integer(kSchema, {kAppendSchema});
        }
        CacheOptions const given = read_cache_options(reader);
        reader.reject_rest(cache_fields());
        return given;
    });
    return new AppendPlugin(layer, options);
}

}  // namespace twell

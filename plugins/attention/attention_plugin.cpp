#include "attention_plugin.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
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

constexpr char const* kSlotNames[kAttentionSlots] = {"q", "k", "v", "lengths", "key_counts"};
constexpr char const* kCachedSlotNames[kAttentionSlots] = {"q", "keys", "values", "query_counts", "key_counts"};

constexpr char const* kScale = "scale";
constexpr char const* kCausal = "causal";
constexpr char const* kLengths = "lengths";
// In plans only. The first is raised whenever the meaning of the plan fields changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 1;
constexpr char const* kWorkspace = "workspace_mib";

// The least workspace that TensorRT is asked for. Attention without its own kernels' memory for parts of a result needs
// none or little, but what it takes depends on shapes, GPU and cuDNN, and a builder may have none of the three. It is
// memory that all layers of a context share.
constexpr int32_t kLeastWorkspaceMib = 32;

std::vector<PluginField> field_names(bool cached) {
    if (cached) {
        return {{kScale, nullptr, PluginFieldType::kFLOAT32, 1}};
    }
    return {{kScale, nullptr, PluginFieldType::kFLOAT32, 1},
            {kCausal, nullptr, PluginFieldType::kINT32, 1},
            {kLengths, nullptr, PluginFieldType::kINT32, 1}};
}

AttentionOptions read_fields(PluginFieldCollection const* collection, TensorRTPhase phase, bool cached) {
    FieldReader fields(collection);
    AttentionOptions options;
    options.cached = cached;
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kSchemaVersion});
        options.workspace_mib = fields.integer(kWorkspace, 0, std::numeric_limits<int32_t>::max());
    }
    options.scale = fields.number(kScale, "finite");
    if (!std::isfinite(options.scale)) {
        refuse(kScale, std::isnan(options.scale) ? "nan" : "infinity", "finite");
    }
    if (!cached) {
        options.causal = fields.integer(kCausal, {0, 1}) == 1;
        options.lengths = fields.integer(kLengths, {0, 1}) == 1;
    }
    fields.reject_rest(field_names(cached));
    return options;
}

bool is_gpu_there() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// What cuDNN needs for a problem on the current GPU, asked once a process: the layers of a model are alike.
size_t ask_cudnn(twell_attention_problem const& problem) {
    static std::mutex& mutex = *new std::mutex;
    static auto& answers = *new std::map<twell_attention_problem, size_t, ProblemOrder>;
    std::lock_guard<std::mutex> const lock(mutex);
    auto const found = answers.find(problem);
    if (found != answers.end()) {
        return found->second;
    }
    size_t const bytes = Attention().prepare(problem);
    answers.emplace(problem, bytes);
    return bytes;
}

int64_t mib_of(size_t bytes) { return static_cast<int64_t>((bytes + (1U << 20) - 1) >> 20); }

int32_t workspace_mib(twell_attention_problem const& largest) {
    int64_t const asked = is_gpu_there() ? mib_of(ask_cudnn(largest)) : 0;
    return static_cast<int32_t>(std::max<int64_t>(asked, kLeastWorkspaceMib));
}

bool fits(int64_t extent, int64_t expected) { return extent == kAny || expected == kAny || extent == expected; }

void check_shape(char const* slot, Dims const& dims, std::vector<int64_t> const& expected, char const* meaning) {
    bool good = dims.nbDims == static_cast<int32_t>(expected.size());
    for (int32_t i = 0; good && i < dims.nbDims; ++i) {
        good = fits(dims.d[i], expected[i]);
    }
    if (!good) {
        Dims wanted{};
        wanted.nbDims = static_cast<int32_t>(expected.size());
        std::copy(expected.begin(), expected.end(), wanted.d);
        throw Refusal("input " + std::string(slot) + " has shape " + text_of(dims) + "; expected " + meaning + " = " +
                      text_of(wanted));
    }
}

int64_t known(int64_t first, int64_t second) { return first == kAny ? second : first; }

}  // namespace

// ---- constructor ----

AttentionPlugin::AttentionPlugin(std::string layer, AttentionOptions const& options)
    : PluginBase(options.cached ? kCachedAttentionName : kAttentionName, std::move(layer)), options_(options) {}

AttentionPlugin::AttentionPlugin(AttentionPlugin const& other) : AttentionPlugin(other.layer(), other.options_) {}

// ---- checks shared by build and runtime ----

void AttentionPlugin::check_input_count(int64_t count) const {
    if (count != input_count()) {
        std::string names;
        for (int32_t slot = 0; slot < input_count(); ++slot) {
            names += (slot == 0 ? "" : ", ") + std::string(slot_name(slot));
        }
        throw Refusal("got " + std::to_string(count) + " inputs; expected " + std::to_string(input_count()) + ": " +
                      names);
    }
}

char const* AttentionPlugin::slot_name(int32_t slot) const {
    return (options_.cached ? kCachedSlotNames : kSlotNames)[slot];
}

void AttentionPlugin::check_types(DataType const* types) const {
    for (int32_t slot = kSlotQ; slot <= kSlotV; ++slot) {
        if (!is_supported(types[slot]) || types[slot] != types[kSlotQ]) {
            throw Refusal("input " + std::string(slot_name(slot)) + " is " + text_of(types[slot]) + "; q, " +
                          slot_name(kSlotK) + " and " + slot_name(kSlotV) + " must all be bf16, or all fp16 (q is " +
                          text_of(types[kSlotQ]) + ")");
        }
    }
    for (int32_t slot = kSlotLengths; slot < input_count(); ++slot) {
        if (types[slot] != DataType::kINT32) {
            throw Refusal("input " + std::string(slot_name(slot)) + " is " + text_of(types[slot]) + "; expected int32");
        }
    }
}

// The problem that these input shapes pose. Extents may be kAny; then only what is known is checked, and the result
// holds placeholders.
twell_attention_problem AttentionPlugin::problem_of(Shapes const& inputs, DataType type) const {
    Dims const& q = inputs[kSlotQ];
    Dims const& k = inputs[kSlotK];
    char const* const keyed = options_.cached ? "[batch, kv_heads, length, width]" : "[batch, keys, kv_heads, width]";
    check_shape(slot_name(kSlotQ), q, {kAny, kAny, kAny, kAny}, "[batch, tokens, heads, width]");
    check_shape(slot_name(kSlotK), k, {q.d[0], options_.causal ? q.d[1] : kAny, kAny, q.d[3]}, keyed);
    int64_t const batch = known(q.d[0], k.d[0]);
    int64_t const width = known(q.d[3], k.d[3]);
    check_shape(slot_name(kSlotV), inputs[kSlotV], {batch, k.d[1], k.d[2], width}, keyed);
    for (int32_t slot = kSlotLengths; slot < input_count(); ++slot) {
        check_shape(slot_name(slot), inputs[slot], {known(batch, inputs[kSlotV].d[0])}, "[batch]");
    }

    // What 32 bits do not hold is beyond every limit. Placeholders for what is not known are good values.
    auto const narrow = [](int64_t extent, int64_t placeholder) {
        return static_cast<int32_t>(std::min<int64_t>(known(extent, placeholder), std::numeric_limits<int32_t>::max()));
    };
    twell_attention_problem problem{};
    problem.batch = known(batch, 1);
    problem.tokens = known(q.d[1], options_.causal ? known(k.d[1], 1) : 1);
    problem.keys = known(k.d[key_axis()], options_.causal || options_.cached ? problem.tokens : 1);
    problem.kv_heads = narrow(k.d[head_axis()], 1);
    problem.heads = narrow(q.d[2], problem.kv_heads);
    problem.width = narrow(width, 8);
    problem.dtype = type == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.causal = options_.causal ? 1 : 0;
    problem.lengths = options_.lengths ? 1 : 0;
    problem.scale = options_.scale;
    problem.cached = options_.cached ? 1 : 0;
    if (char const* const complaint = twell_attention_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (q " + text_of(q) + ", k " + text_of(k) + ")");
    }
    return problem;
}

// ---- build ----

int32_t AttentionPlugin::getOutputDataTypes(DataType* output_types, int32_t output_count, DataType const* input_types,
                                            int32_t input_count) const noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        check_types(input_types);
        std::fill_n(output_types, output_count, input_types[kSlotQ]);
        return 0;
    });
}

int32_t AttentionPlugin::getOutputShapes(DimsExprs const* inputs, int32_t input_count, DimsExprs const*, int32_t,
                                         DimsExprs* outputs, int32_t output_count, nvinfer1::IExprBuilder&) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        Shapes shapes{};
        std::transform(inputs, inputs + input_count, shapes.begin(), known_dims);
        problem_of(shapes, DataType::kBF16);  // the dtype is not known here and no limit depends on it
        std::fill_n(outputs, output_count, inputs[kSlotQ]);
        return 0;
    });
}

bool AttentionPlugin::supportsFormatCombination(int32_t pos, DynamicPluginTensorDesc const* in_out, int32_t input_count,
                                                int32_t output_count) noexcept {
    if (in_out == nullptr || input_count != this->input_count() || output_count != 1 || pos < 0 || pos > input_count) {
        return false;
    }
    PluginTensorDesc const& desc = in_out[pos].desc;
    if (desc.format != TensorFormat::kLINEAR) {
        return false;
    }
    if (pos >= kSlotLengths && pos < input_count) {
        return desc.type == DataType::kINT32;
    }
    return is_supported(desc.type) && desc.type == in_out[kSlotQ].desc.type;
}

// The problem with the largest extents of the profile. Those of computed tensors are bounds that need not agree, so the
// least of them holds.
twell_attention_problem AttentionPlugin::largest_problem(DynamicPluginTensorDesc const* inputs,
                                                         int32_t input_count) const {
    check_input_count(input_count);
    Shapes shapes{};
    std::array<DataType, kAttentionSlots> types{};
    for (int32_t i = 0; i < input_count; ++i) {
        shapes[i] = inputs[i].desc.dims;
        types[i] = inputs[i].desc.type;
    }
    check_types(types.data());
    twell_attention_problem problem = problem_of(shapes, types[kSlotQ]);
    auto const least = [inputs](std::vector<AttentionSlot> const& slots, int32_t axis) {
        int64_t bound = std::numeric_limits<int32_t>::max();
        for (AttentionSlot const slot : slots) {
            bound = std::min(bound, inputs[slot].max.d[axis]);
        }
        return bound;
    };
    problem.batch = least({kSlotQ, kSlotK, kSlotV}, 0);
    problem.tokens = least(options_.causal ? std::vector{kSlotQ, kSlotK, kSlotV} : std::vector{kSlotQ}, 1);
    problem.keys = options_.causal ? problem.tokens : least({kSlotK, kSlotV}, key_axis());
    problem.heads = static_cast<int32_t>(least({kSlotQ}, 2));
    problem.kv_heads = static_cast<int32_t>(least({kSlotK, kSlotV}, head_axis()));
    problem.width = static_cast<int32_t>(least({kSlotQ, kSlotK, kSlotV}, 3));
    if (char const* const complaint = twell_attention_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (q up to " + text_of(inputs[kSlotQ].max) + ", k up to " +
                      text_of(inputs[kSlotK].max) + ")");
    }
    return problem;
}

int32_t AttentionPlugin::configurePlugin(DynamicPluginTensorDesc const* in, int32_t input_count,
                                         DynamicPluginTensorDesc const*, int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        options_.workspace_mib = workspace_mib(largest_problem(in, input_count));
        return 0;
    });
}

size_t AttentionPlugin::getWorkspaceSize(DynamicPluginTensorDesc const* inputs, int32_t input_count,
                                         DynamicPluginTensorDesc const*, int32_t) const noexcept {
    return guarded<size_t>(
        0, [&] { return static_cast<size_t>(workspace_mib(largest_problem(inputs, input_count))) << 20; });
}

// ---- runtime ----

nvinfer1::IPluginV3* AttentionPlugin::attachToContext(nvinfer1::IPluginResourceContext*) noexcept {
    return guarded<nvinfer1::IPluginV3*>(nullptr, [&] {
        auto attached = std::make_unique<AttentionPlugin>(*this);
        attached->attention_ = std::make_unique<Attention>();
        return attached.release();
    });
}

twell_attention_problem AttentionPlugin::runtime_problem(PluginTensorDesc const* inputs) const {
    Shapes shapes{};
    for (int32_t i = 0; i < input_count(); ++i) {
        shapes[i] = inputs[i].dims;
    }
    return problem_of(shapes, inputs[kSlotQ].type);
}

// Here, not at enqueue, cuDNN builds its plan: that allocates, and may compile.
int32_t AttentionPlugin::onShapeChange(PluginTensorDesc const* in, int32_t input_count, PluginTensorDesc const*,
                                       int32_t) noexcept {
    return guarded<int32_t>(-1, [&] {
        check_input_count(input_count);
        std::array<DataType, kAttentionSlots> types{};
        std::transform(in, in + input_count, types.begin(), [](PluginTensorDesc const& desc) { return desc.type; });
        check_types(types.data());
        twell_attention_problem const problem = runtime_problem(in);
        if (attention_ == nullptr) {
            attention_ = std::make_unique<Attention>();
        }
        int64_t const needed = mib_of(attention_->prepare(problem));
        int64_t const given = std::max(options_.workspace_mib, kLeastWorkspaceMib);
        if (needed > given) {
            throw Refusal("cuDNN needs " + std::to_string(needed) + " MiB of workspace for q " +
                          text_of(in[kSlotQ].dims) + ", k " + text_of(in[kSlotK].dims) + "; the plan has " +
                          std::to_string(given) + ". Compile it on a machine with this GPU and this cuDNN");
        }
        return 0;
    });
}

int32_t AttentionPlugin::enqueue(PluginTensorDesc const* input_desc, PluginTensorDesc const*, void const* const* inputs,
                                 void* const* outputs, void* workspace, cudaStream_t stream) noexcept {
    return guarded<int32_t>(-1, [&] {
        if (attention_ == nullptr) {
            throw Refusal("run before its shapes were set");
        }
        twell_attention_tensors tensors{};
        tensors.q = inputs[kSlotQ];
        tensors.k = inputs[kSlotK];
        tensors.v = inputs[kSlotV];
        if (options_.cached) {
            tensors.query_lengths = static_cast<int32_t const*>(inputs[kSlotQueryCounts]);
            tensors.lengths = static_cast<int32_t const*>(inputs[kSlotKeyCounts]);
        } else if (options_.lengths) {
            tensors.lengths = static_cast<int32_t const*>(inputs[kSlotLengths]);
        }
        tensors.y = outputs[0];
        attention_->run(runtime_problem(input_desc), tensors, workspace, stream);
        return 0;
    });
}

// ---- serialisation ----

SerializedAttention::SerializedAttention(AttentionOptions const& options)
    : integers_{kSchemaVersion, options.workspace_mib, options.causal ? 1 : 0, options.lengths ? 1 : 0},
      scale_(options.scale),
      fields_{{kSchema, &integers_[0], PluginFieldType::kINT32, 1},
              {kWorkspace, &integers_[1], PluginFieldType::kINT32, 1},
              {kScale, &scale_, PluginFieldType::kFLOAT32, 1}} {
    if (!options.cached) {
        fields_.push_back({kCausal, &integers_[2], PluginFieldType::kINT32, 1});
        fields_.push_back({kLengths, &integers_[3], PluginFieldType::kINT32, 1});
    }
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

PluginFieldCollection const* AttentionPlugin::getFieldsToSerialize() noexcept {
    return guarded<PluginFieldCollection const*>(nullptr, [&] {
        serialized_ = std::make_unique<SerializedAttention>(options_);
        return serialized_->collection();
    });
}

// ---- creator ----

AttentionCreator::AttentionCreator(char const* name)
    : CreatorBase(name, field_names(std::string(name) == kCachedAttentionName)) {}

nvinfer1::IPluginV3* AttentionCreator::createPlugin(char const* name, PluginFieldCollection const* fields,
                                                    TensorRTPhase phase) noexcept {
    char const* const layer = name == nullptr ? "" : name;
    bool const cached = std::string(getPluginName()) == kCachedAttentionName;
    return guarded<nvinfer1::IPluginV3*>(getPluginName(), layer, nullptr, [&] {
        AttentionOptions const options = read_with_advice(phase, "libtwell_attention.so", twell_attention_version(),
                                                          [&] { return read_fields(fields, phase, cached); });
        return new AttentionPlugin(layer, options);
    });
}

}  // namespace twell

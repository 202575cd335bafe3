#include "attention_plugin.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "over_caches.h"

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorRTPhase;

constexpr char const* kScale = "scale";
constexpr char const* kCausal = "causal";
constexpr char const* kLengths = "lengths";
constexpr char const* kWorkspace = "workspace_mib";  // in plans only
constexpr int32_t kAttentionSchema = 1;

// The least workspace that TensorRT is asked for. Attention without its own kernels' memory for parts of a result needs
// none or little, but what it takes depends on shapes, GPU and cuDNN, and a builder may have none of the three. It is
// memory that all layers of a context share.
constexpr int32_t kLeastWorkspaceMib = 32;

std::vector<PluginField> field_names(bool cached) {
    std::vector<PluginField> names =
        cached ? cache_fields() : std::vector{known_integer(kCausal), known_integer(kLengths)};
    names.insert(names.begin(), known_field(kScale, PluginFieldType::kFLOAT32));
    return names;
}

AttentionOptions read_fields(PluginFieldCollection const* collection, TensorRTPhase phase, bool cached) {
    FieldReader fields(collection);
    AttentionOptions options;
    options.cached = cached;
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kAttentionSchema});
        options.workspace_mib = fields.integer(kWorkspace, 0, std::numeric_limits<int32_t>::max());
    }
    options.scale = fields.number(kScale, "finite");
    if (!std::isfinite(options.scale)) {
        refuse(kScale, std::isnan(options.scale) ? "nan" : "infinity", "finite");
    }
    if (cached) {
        options.cache = read_cache_options(fields);
    } else {
        options.causal = fields.flag(kCausal);
        options.lengths = fields.flag(kLengths);
    }
    fields.reject_rest(field_names(cached));
    return options;
}

bool is_gpu_there() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// The bytes of workspace that cuDNN needs for a problem on the current GPU, asked once a process: the layers of a model
// are alike.
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
    return static_cast<int32_t>(std::max(asked, kLeastWorkspaceMib + mib_of(rotated_bytes(largest))));
}

int64_t known(int64_t first, int64_t second) { return first == kAny ? second : first; }

std::vector<Input> inputs_of(AttentionOptions const& options) {
    if (options.cached) {
        std::vector<Input> inputs{{"q"},
                                  {"keys", options.cache.type()},
                                  {"values", options.cache.type()},
                                  {"query_counts", InputType::kInt32},
                                  {"key_counts", InputType::kInt32}};
        if (options.cache.rotated) {
            inputs.insert(inputs.end(), {{"cosines"}, {"sines"}});
        }
        return inputs;
    }
    std::vector<Input> inputs{{"q"}, {"k"}, {"v"}};
    if (options.lengths) {
        inputs.push_back({"lengths", InputType::kInt32});
    }
    return inputs;
}

}  // namespace

// ---- constructor ----

AttentionPlugin::AttentionPlugin(std::string layer, AttentionOptions const& options)
    : PluginBase(options.cached ? kCachedAttentionName : kAttentionName, std::move(layer), inputs_of(options)),
      options_(options) {}

AttentionPlugin::AttentionPlugin(AttentionPlugin const& other) : AttentionPlugin(other.layer(), other.options_) {}

// ---- checks shared by build and runtime ----

std::string AttentionPlugin::allowed_types(DataType first) const {
    return std::string("q, ") + input_name(kSlotK) + " and " + input_name(kSlotV) +
           " must all be bf16, or all fp16 (q is " + text_of(first) + ")";
}

// The problem that these input shapes pose. Extents may be kAny; then only known ones are checked, and the result holds
// placeholders.
twell_attention_problem AttentionPlugin::problem_of(Shapes const& inputs, DataType type) const {
    Dims const& q = inputs[kSlotQ];
    Dims const& k = inputs[kSlotK];
    char const* const keyed = options_.cached ? "[batch, kv_heads, length, width]" : "[batch, keys, kv_heads, width]";
    auto const check = [&](int32_t slot, Dims const& expected, char const* meaning) {
        check_shape(input_name(slot), inputs[slot], expected, meaning);
    };
    check(kSlotQ, dims_of({kAny, kAny, kAny, kAny}), "[batch, tokens, heads, width]");
    check(kSlotK, dims_of({q.d[0], options_.causal ? q.d[1] : kAny, kAny, q.d[3]}), keyed);
    int64_t const batch = known(q.d[0], k.d[0]);
    int64_t const width = known(q.d[3], k.d[3]);
    check(kSlotV, dims_of({batch, k.d[1], k.d[2], width}), keyed);
    int32_t const last = std::min<int32_t>(input_count(), kSlotCosines);
    for (int32_t slot = kSlotLengths; slot < last; ++slot) {
        check(slot, dims_of({known(batch, inputs[kSlotV].d[0])}), "[batch]");
    }
    for (int32_t slot = kSlotCosines; slot < input_count(); ++slot) {
        check(slot, dims_of({batch, q.d[1], width}), "[batch, tokens, width]");
    }

    // Placeholders for unknown extents are good values.
    twell_attention_problem problem{};
    problem.batch = known(batch, 1);
    problem.tokens = known(q.d[1], options_.causal ? known(k.d[1], 1) : 1);
    problem.keys = known(k.d[key_axis()], options_.causal || options_.cached ? problem.tokens : 1);
    problem.kv_heads = narrow(k.d[head_axis()], 1);
    problem.heads = narrow(q.d[2], problem.kv_heads);
    problem.width = narrow(width, 16);
    problem.dtype = type == DataType::kHALF ? TWELL_FP16 : TWELL_BF16;
    problem.causal = options_.causal ? 1 : 0;
    problem.lengths = options_.lengths ? 1 : 0;
    problem.scale = options_.scale;
    problem.cached = options_.cached ? 1 : 0;
    problem.rotated = options_.cache.rotated ? 1 : 0;
    problem.fp8 = options_.cache.fp8 ? 1 : 0;
    problem.key_scale = options_.cache.key_scale;
    problem.value_scale = options_.cache.value_scale;
    if (char const* const complaint = twell_attention_validate(&problem); complaint != nullptr) {
        throw Refusal(std::string(complaint) + " (q " + text_of(q) + ", k " + text_of(k) + ")");
    }
    if (options_.cache.fp8 && width != kAny && !knows_width(problem.width)) {
        throw Refusal("caches in FP8 need heads of a width of 64, 80, 96, 128 or 256, got " + text_of(k));
    }
    return problem;
}

// ---- build ----

void AttentionPlugin::check_shapes(Shapes const& inputs) const {
    problem_of(inputs, DataType::kBF16);  // no limit depends on the type, which need not be known
}

// The problem with the largest extents of the profile. Those of computed tensors are bounds that need not agree, so the
// least of them holds.
twell_attention_problem AttentionPlugin::largest_problem(DynamicPluginTensorDesc const* inputs) const {
    Shapes const shapes = shapes_of([&](size_t i) { return inputs[i].desc.dims; });
    twell_attention_problem problem = problem_of(shapes, inputs[kSlotQ].desc.type);
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

void AttentionPlugin::configure(DynamicPluginTensorDesc const* inputs) {
    options_.workspace_mib = workspace_mib(largest_problem(inputs));
}

size_t AttentionPlugin::workspace_bytes(DynamicPluginTensorDesc const* inputs) const {
    return static_cast<size_t>(workspace_mib(largest_problem(inputs))) << 20;
}

// ---- runtime ----

AttentionPlugin* AttentionPlugin::attached() const {
    auto attached = std::make_unique<AttentionPlugin>(*this);
    attached->attention_ = std::make_unique<Attention>();
    attached->attention_->open();  // a missing cuDNN is refused here, not where a shape needs it
    return attached.release();
}

twell_attention_problem AttentionPlugin::runtime_problem(PluginTensorDesc const* inputs) const {
    return problem_of(runtime_shapes(inputs), inputs[kSlotQ].type);
}

// Here, not at run(), cuDNN builds its plan: that allocates, and may compile.
void AttentionPlugin::prepare(PluginTensorDesc const* inputs) {
    twell_attention_problem const problem = runtime_problem(inputs);
    if (attention_ == nullptr) {
        attention_ = std::make_unique<Attention>();
    }
    int64_t const needed = mib_of(attention_->prepare(problem));
    int64_t const given = std::max(options_.workspace_mib, kLeastWorkspaceMib);
    if (needed > given) {
        throw Refusal("cuDNN needs " + std::to_string(needed) + " MiB of workspace for q " +
                      text_of(inputs[kSlotQ].dims) + ", k " + text_of(inputs[kSlotK].dims) + "; the plan has " +
                      std::to_string(given) + ". Compile it on a machine with this GPU and this cuDNN");
    }
}

void AttentionPlugin::run(PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs,
                          void* workspace, cudaStream_t stream) {
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
        if (options_.cache.rotated) {
            tensors.cosines = inputs[kSlotCosines];
            tensors.sines = inputs[kSlotSines];
        }
    } else if (options_.lengths) {
        tensors.lengths = static_cast<int32_t const*>(inputs[kSlotLengths]);
    }
    tensors.y = outputs[0];
    attention_->run(runtime_problem(descs), tensors, workspace, stream);
}

// ---- serialisation ----

std::unique_ptr<PlanFields> AttentionPlugin::plan_fields() const {
    auto fields = std::make_unique<PlanFields>(kAttentionSchema);
    fields->add(kWorkspace, options_.workspace_mib);
    fields->add(kScale, options_.scale);
    options_.cache.add_to(*fields);
    if (!options_.cached) {
        fields->add(kCausal, options_.causal);
        fields->add(kLengths, options_.lengths);
    }
    return fields;
}

// ---- creator ----

AttentionCreator::AttentionCreator(char const* name)
    : CreatorBase(name, field_names(std::string(name) == kCachedAttentionName)),
      cached_(std::string(name) == kCachedAttentionName) {}

nvinfer1::IPluginV3* AttentionCreator::create(char const* layer, PluginFieldCollection const* fields,
                                              TensorRTPhase phase) const {
    AttentionOptions const options = read_with_advice(phase, "libtwell_attention.so", twell_attention_version(),
                                                      [&] { return read_fields(fields, phase, cached_); });
    return new AttentionPlugin(layer, options);
}

}  // namespace twell

// Attention as TensorRT layers: TwellAttention and TwellCachedAttention. See README.md beside this file for inputs,
// fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/attention.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../tensorrt/plugin_base.h"
#include "attention.h"
#include "cache_options.h"

namespace twell {

// ---- names ----

constexpr char const* kAttentionName = "TwellAttention";
constexpr char const* kCachedAttentionName = "TwellCachedAttention";

// ---- tensor slots ----

// Behind v TwellAttention may have lengths, and TwellCachedAttention has how many queries and keys each sequence has.
// Inputs that rotate q may come last.
enum AttentionSlot : int32_t { kSlotQ, kSlotK, kSlotV, kSlotLengths, kSlotKeyCounts, kSlotCosines, kSlotSines };
constexpr AttentionSlot kSlotQueryCounts = kSlotLengths;

// ---- fields ----

struct AttentionOptions {
    float scale = 1.0F;
    bool causal = false;
    bool lengths = false;  // whether that input is there
    bool cached = false;   // whether k and v are caches: the name of the plugin says so
    CacheOptions cache;    // only if cached
    // The workspace that a plan's builder was asked for, in MiB; not a field of a node.
    int32_t workspace_mib = 0;
};

class AttentionPlugin final : public PluginBase<AttentionPlugin> {
  public:
    AttentionPlugin(std::string layer, AttentionOptions const& options);
    // Without the plans: each context has its own.
    AttentionPlugin(AttentionPlugin const& other);

  private:
    std::string allowed_types(nvinfer1::DataType first) const override;
    void check_shapes(Shapes const& inputs) const override;
    void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) override;
    size_t workspace_bytes(nvinfer1::DynamicPluginTensorDesc const* inputs) const override;
    AttentionPlugin* attached() const override;
    void prepare(nvinfer1::PluginTensorDesc const* inputs) override;
    void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
             cudaStream_t stream) override;
    std::unique_ptr<PlanFields> plan_fields() const override;

    // The axis of k and v that counts keys, and that of their heads.
    int32_t key_axis() const { return options_.cached ? 2 : 1; }
    int32_t head_axis() const { return options_.cached ? 1 : 2; }
    twell_attention_problem problem_of(Shapes const& inputs, nvinfer1::DataType type) const;
    twell_attention_problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs) const;
    twell_attention_problem runtime_problem(nvinfer1::PluginTensorDesc const* inputs) const;

    AttentionOptions options_;
    std::unique_ptr<Attention> attention_;  // of a plugin that is attached to a context
};

class AttentionCreator final : public CreatorBase {
  public:
    // `name` is that of one of the two plugins.
    explicit AttentionCreator(char const* name);

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;

    bool const cached_;
};

}  // namespace twell

// Attention as TensorRT layers: TwellAttention and TwellCachedAttention. See README.md beside this file for inputs,
// fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/attention.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../tensorrt/plugin_base.h"
#include "attention.h"

namespace twell {

// ---- names ----

constexpr char const* kAttentionName = "TwellAttention";
constexpr char const* kCachedAttentionName = "TwellCachedAttention";

// ---- tensor slots ----

// Behind v TwellAttention may have lengths, and TwellCachedAttention has how many queries and keys each sequence has.
enum AttentionSlot : int32_t { kSlotQ, kSlotK, kSlotV, kSlotLengths, kSlotKeyCounts, kAttentionSlots };
constexpr AttentionSlot kSlotQueryCounts = kSlotLengths;

// ---- fields ----

struct AttentionOptions {
    float scale = 1.0F;
    bool causal = false;
    bool lengths = false;  // whether that input is there
    bool cached = false;   // whether k and v are caches: the name of the plugin says so
    // What a plan's builder was asked for, in MiB. No field of a node.
    int32_t workspace_mib = 0;
};

// Options as plan fields, led by the version of this set of fields. `collection` points into the object.
class SerializedAttention {
  public:
    explicit SerializedAttention(AttentionOptions const& options);
    SerializedAttention(SerializedAttention const&) = delete;
    SerializedAttention& operator=(SerializedAttention const&) = delete;

    nvinfer1::PluginFieldCollection const* collection() const { return &collection_; }

  private:
    std::array<int32_t, 4> integers_;
    float scale_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

class AttentionPlugin final : public PluginBase<AttentionPlugin> {
  public:
    AttentionPlugin(std::string layer, AttentionOptions const& options);
    // Without the plans: each context has its own.
    AttentionPlugin(AttentionPlugin const& other);

    // ---- build ----
    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count,
                               nvinfer1::DataType const* input_types, int32_t input_count) const noexcept override;
    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count,
                            nvinfer1::DimsExprs const* shape_inputs, int32_t shape_input_count,
                            nvinfer1::DimsExprs* outputs, int32_t output_count,
                            nvinfer1::IExprBuilder& builder) noexcept override;
    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* in_out, int32_t input_count,
                                   int32_t output_count) noexcept override;
    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const* out, int32_t output_count) noexcept override;
    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const* outputs,
                            int32_t output_count) const noexcept override;

    // ---- runtime ----
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t input_count,
                          nvinfer1::PluginTensorDesc const* out, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const* output_desc,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;

    // ---- serialisation ----
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;

  private:
    using Shapes = std::array<nvinfer1::Dims, kAttentionSlots>;

    int32_t input_count() const {
        return options_.cached ? kAttentionSlots : kSlotLengths + (options_.lengths ? 1 : 0);
    }
    // The axis of k and v that counts keys, and that of their heads.
    int32_t key_axis() const { return options_.cached ? 2 : 1; }
    int32_t head_axis() const { return options_.cached ? 1 : 2; }
    char const* slot_name(int32_t slot) const;
    void check_input_count(int64_t count) const;
    void check_types(nvinfer1::DataType const* types) const;
    twell_attention_problem problem_of(Shapes const& inputs, nvinfer1::DataType type) const;
    twell_attention_problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count) const;
    twell_attention_problem runtime_problem(nvinfer1::PluginTensorDesc const* inputs) const;

    AttentionOptions options_;
    std::unique_ptr<Attention> attention_;  // of a plugin that is attached to a context
    std::unique_ptr<SerializedAttention> serialized_;
};

class AttentionCreator final : public CreatorBase {
  public:
    // `name` is that of one of the two plugins.
    explicit AttentionCreator(char const* name);

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
};

}  // namespace twell

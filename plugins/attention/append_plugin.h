// Appending to key-value caches as a TensorRT layer: TwellAppendCaches. See README.md beside this file.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../tensorrt/plugin_base.h"

namespace twell {

// ---- names ----

constexpr char const* kAppendName = "TwellAppendCaches";

// ---- tensor slots ----

// The outputs are the first two, in the memory of these inputs.
enum AppendSlot : int32_t {
    kSlotKeys,
    kSlotValues,
    kSlotNewKeys,
    kSlotNewValues,
    kSlotStarts,
    kSlotCounts,
    kAppendSlots
};
constexpr int32_t kAppendOutputs = 2;

class AppendPlugin final : public PluginBase<AppendPlugin, nvinfer1::IPluginV3OneBuildV2, kAppendOutputs> {
  public:
    explicit AppendPlugin(std::string layer);
    AppendPlugin(AppendPlugin const& other) = default;

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
    int32_t getAliasedInput(int32_t output) noexcept override;

    // ---- runtime ----
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t input_count,
                          nvinfer1::PluginTensorDesc const* out, int32_t output_count) noexcept override;
    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const* output_desc,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept override;

    // ---- serialisation ----
    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept override;
};

class AppendCreator final : public CreatorBase {
  public:
    AppendCreator();

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;
};

}  // namespace twell

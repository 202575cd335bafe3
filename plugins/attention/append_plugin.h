// Appending to key-value caches as a TensorRT layer: TwellAppendCaches. See README.md beside this file.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <memory>
#include <string>

#include "../tensorrt/plugin_base.h"
#include "cache_options.h"

namespace twell {

// ---- names ----

constexpr char const* kAppendName = "TwellAppendCaches";

// ---- tensor slots ----

// The outputs are the first two, in the memory of these inputs. Inputs that rotate new keys may come last.
enum AppendSlot : int32_t {
    kSlotKeys,
    kSlotValues,
    kSlotNewKeys,
    kSlotNewValues,
    kSlotStarts,
    kSlotCounts,
    kSlotKeyCosines,
    kSlotKeySines
};
constexpr int32_t kAppendOutputs = 2;

class AppendPlugin final : public PluginBase<AppendPlugin, nvinfer1::IPluginV3OneBuildV2, kAppendOutputs> {
  public:
    AppendPlugin(std::string layer, CacheOptions const& options);
    AppendPlugin(AppendPlugin const& other) = default;

    int32_t getAliasedInput(int32_t output) noexcept override;

  private:
    std::string allowed_types(nvinfer1::DataType first) const override;
    void check_shapes(Shapes const& inputs) const override;
    void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) override;
    void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
             cudaStream_t stream) override;
    std::unique_ptr<PlanFields> plan_fields() const override;

    CacheOptions options_;
};

class AppendCreator final : public CreatorBase {
  public:
    AppendCreator();

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace twell

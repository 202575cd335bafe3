// One feed-forward block as a TensorRT layer: TwellGatedMlp (gate, up, down) and TwellMlp (up, down).
// See README.md beside this file for inputs, outputs, fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "options.h"
#include "plugin_base.h"

namespace twell {

// ---- names and versions ----

constexpr char const* plugin_name(twell_variant variant) {
    return variant == TWELL_GATED ? "TwellGatedMlp" : "TwellMlp";
}

// ---- tensor slots ----

// What a tensor is to the kernels; which input it is depends on the variant and on which optional inputs there are.
enum Role {
    kX,
    kWGate,
    kBGate,
    kWUp,
    kBUp,
    kWDown,
    kBDown,
    kResidual,
    kGateScale,
    kUpScale,
    kDownScale,
    kThresholds,
    kNormWeight,
    kNormBias,
    kRoles
};

// The two blocks differ in name, inputs and fields only, so they are one class with a variant.
class FeedForwardPlugin final : public PluginBase<FeedForwardPlugin> {
  public:
    FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options);
    FeedForwardPlugin(FeedForwardPlugin const& other);

  private:
    std::string allowed_types(nvinfer1::DataType first) const override;
    void check_shapes(Shapes const& inputs) const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                           nvinfer1::IExprBuilder&) const override;
    void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) override;
    size_t workspace_bytes(nvinfer1::DynamicPluginTensorDesc const* inputs) const override;
    FeedForwardPlugin* attached() const override;
    void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
             cudaStream_t stream) override;
    nvinfer1::PluginFieldCollection const* plan_fields() override;

    twell_problem problem_of(Shapes const& inputs, nvinfer1::DataType type) const;
    void check_scales(Shapes const& inputs, twell_problem& problem) const;
    twell_problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs) const;

    twell_variant const variant_;
    Options const options_;
    std::array<int32_t, kRoles> const slots_;  // the input of each role; -1 where the block has none
    std::unique_ptr<Serialized> serialized_;
};

class FeedForwardCreator final : public CreatorBase {
  public:
    explicit FeedForwardCreator(twell_variant variant);

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;

    twell_variant const variant_;
};

}  // namespace twell

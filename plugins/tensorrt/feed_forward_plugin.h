// One feed-forward block as a TensorRT layer: TwellGatedMlp (gate, up, down) and TwellMlp (up, down).
// See README.md beside this file for inputs, outputs, fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <cstddef>
#include <memory>
#include <string>

#include "kernel_plugin.h"
#include "options.h"

namespace twell {

// ---- names and versions ----

constexpr char const* plugin_name(twell_variant variant) {
    return variant == TWELL_GATED ? "TwellGatedMlp" : "TwellMlp";
}

// ---- tensor slots ----

// The role of a tensor in the kernels. Its input number depends on the variant and on which optional inputs there are.
enum BlockRole {
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
    kBlockRoles
};

// The two blocks differ in name, inputs and fields only, so they are one class with a variant.
class FeedForwardPlugin final : public KernelPlugin<FeedForwardPlugin, twell_problem, kBlockRoles> {
  public:
    FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options);

  private:
    std::string other_types() const override;
    twell_problem problem_of(Shapes const& inputs, Types const& types) const override;
    size_t bytes_of(twell_problem const& problem) const override { return twell_workspace_bytes(&problem); }
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                           nvinfer1::IExprBuilder&) const override;
    void launch(twell_problem const& problem, void const* const* inputs, void* const* outputs, void* workspace,
                cudaStream_t stream) const override;
    std::unique_ptr<PlanFields> plan_fields() const override { return plan_fields_of(variant_, options_); }

    void check_scales(Shapes const& inputs, twell_problem& problem) const;
    int32_t check_scale(Shapes const& inputs, BlockRole role, nvinfer1::Dims const& matrix, bool is_down) const;

    twell_variant const variant_;
    Options const options_;
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

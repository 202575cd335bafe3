// A linear layer with its norm and its residual as a TensorRT layer: TwellLinear.
// See README.md beside this file for inputs, outputs, fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plugin_base.h"

namespace twell {

// ---- names and versions ----

constexpr char const* kLinearName = "TwellLinear";

// ---- tensor slots ----

// What a tensor is to the kernels; which input it is depends on which optional inputs there are.
enum LinearRole {
    kLinearX,
    kLinearWeight,
    kLinearBias,
    kLinearNormWeight,
    kLinearNormBias,
    kLinearResidual,
    kLinearScale,
    kLinearRoles
};

struct LinearOptions {
    int32_t norm = TWELL_NORM_NONE;  // twell_norm
    float eps = 0.0F;
    std::vector<int32_t> splits;           // the width of each output
    bool choose = false;                   // the index of the largest element instead of all
    std::array<bool, kLinearRoles> has{};  // which inputs are present
};

class LinearPlugin final : public PluginBase<LinearPlugin> {
  public:
    LinearPlugin(std::string layer, LinearOptions const& options);
    LinearPlugin(LinearPlugin const& other);

  private:
    int32_t output_count() const override;
    bool chooses() const override { return options_.choose; }
    std::string allowed_types(nvinfer1::DataType first) const override;
    void check_shapes(Shapes const& inputs) const override;
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                           nvinfer1::IExprBuilder& builder) const override;
    void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) override;
    size_t workspace_bytes(nvinfer1::DynamicPluginTensorDesc const* inputs) const override;
    LinearPlugin* attached() const override;
    void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
             cudaStream_t stream) override;
    nvinfer1::PluginFieldCollection const* plan_fields() override;

    twell_linear_problem problem_of(Shapes const& inputs, nvinfer1::DataType type) const;
    twell_linear_problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs) const;

    LinearOptions const options_;
    std::array<int32_t, kLinearRoles> const slots_;  // the input of each role; -1 where the layer has none
    // What plan_fields() points to.
    std::vector<int32_t> integers_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

class LinearCreator final : public CreatorBase {
  public:
    LinearCreator();

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace twell

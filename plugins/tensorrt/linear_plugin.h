// A linear layer with its norm and its residual as a TensorRT layer: TwellLinear.
// See README.md beside this file for inputs, outputs, fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernel_plugin.h"

namespace twell {

// ---- names and versions ----

constexpr char const* kLinearName = "TwellLinear";

// ---- tensor slots ----

// The role of a tensor in the kernels. Its input number depends on which optional inputs there are.
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

class LinearPlugin final : public KernelPlugin<LinearPlugin, twell_linear_problem, kLinearRoles> {
  public:
    LinearPlugin(std::string layer, LinearOptions const& options);

  private:
    int32_t output_count() const override { return static_cast<int32_t>(options_.splits.size()); }
    bool chooses() const override { return options_.choose; }
    std::string other_types() const override { return has(kLinearScale) ? "the weight and its scale" : ""; }
    twell_linear_problem problem_of(Shapes const& inputs, Types const& types) const override;
    size_t bytes_of(twell_linear_problem const& problem) const override {
        return twell_linear_workspace_bytes(&problem);
    }
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                           nvinfer1::IExprBuilder& builder) const override;
    void launch(twell_linear_problem const& problem, void const* const* inputs, void* const* outputs, void* workspace,
                cudaStream_t stream) const override;
    std::unique_ptr<PlanFields> plan_fields() const override;

    LinearOptions const options_;
};

class LinearCreator final : public CreatorBase {
  public:
    LinearCreator();

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace twell

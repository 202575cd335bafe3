// Experts as a TensorRT layer: TwellExperts, feed-forward blocks; each token uses a few of them. See README.md beside
// this file for inputs, outputs, fields and limits.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell_experts.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "kernel_plugin.h"

namespace twell {

// ---- names and versions ----

constexpr char const* kExpertsName = "TwellExperts";

// ---- tensor slots ----

// The role of a tensor in the kernels. Its input number depends on which optional inputs there are.
enum ExpertsRole {
    kExpertsX,
    kExpertsUp,
    kExpertsGate,
    kExpertsDown,
    kExpertsIds,
    kExpertsWeights,
    kExpertsUpScale,
    kExpertsGateScale,
    kExpertsDownScale,
    kExpertsThresholds,
    kExpertsRoles
};

struct ExpertsOptions {
    int32_t activation = TWELL_RELU;  // twell_activation
    float threshold = 0.0F;           // TWELL_FATRELU only
    // Whether these inputs are present.
    bool gate = false;
    bool scales = false;      // whether weights are of fp8, each with its scales
    bool thresholds = false;  // of TWELL_FATRELU with threshold 0 only
};

class ExpertsPlugin final : public KernelPlugin<ExpertsPlugin, twell_experts_problem, kExpertsRoles> {
  public:
    ExpertsPlugin(std::string layer, ExpertsOptions const& options);

  private:
    std::string other_types() const override;
    twell_experts_problem problem_of(Shapes const& inputs, Types const& types) const override;
    size_t bytes_of(twell_experts_problem const& problem) const override {
        return twell_experts_workspace_bytes(&problem);
    }
    void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                           nvinfer1::IExprBuilder&) const override;
    void launch(twell_experts_problem const& problem, void const* const* inputs, void* const* outputs, void* workspace,
                cudaStream_t stream) const override;
    std::unique_ptr<PlanFields> plan_fields() const override;

    void check_scales(Shapes const& inputs, twell_experts_problem& problem) const;

    ExpertsOptions const options_;
};

class ExpertsCreator final : public CreatorBase {
  public:
    ExpertsCreator();

  private:
    nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                nvinfer1::TensorRTPhase phase) const override;
};

}  // namespace twell

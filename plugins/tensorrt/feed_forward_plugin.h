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
#include <vector>

#include "options.h"
#include "plugin_base.h"

namespace twell {

// ---- names and versions ----

constexpr char const* plugin_name(twell_variant variant) {
    return variant == TWELL_GATED ? "TwellGatedMlp" : "TwellMlp";
}

// ---- tensor slots ----

// What a tensor is to the kernels; which input it is depends on the variant and on which optional inputs there are.
enum Role { kX, kWGate, kBGate, kWUp, kBUp, kWDown, kBDown, kResidual, kRoles };

// The two blocks differ in name, inputs and fields only, so they are one class with a variant.
class FeedForwardPlugin final : public PluginBase<FeedForwardPlugin> {
  public:
    FeedForwardPlugin(twell_variant variant, std::string layer, Options const& options);
    FeedForwardPlugin(FeedForwardPlugin const& other);

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
    // A block has at most one input for each role.
    using Shapes = std::array<nvinfer1::Dims, kRoles>;

    char const* role_name(Role role) const;
    std::string expected_inputs() const;
    void check_input_count(int64_t count) const;
    void check_types(nvinfer1::DataType const* types) const;
    void check_shape(Shapes const& inputs, Role role, std::array<int64_t, 2> const& expected,
                     char const* meaning) const;
    void check_residual(Shapes const& inputs) const;
    twell_problem problem_of(Shapes const& inputs, nvinfer1::DataType type) const;
    twell_problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count) const;
    twell_problem runtime_problem(nvinfer1::PluginTensorDesc const* inputs) const;

    twell_variant const variant_;
    Options const options_;
    std::array<int32_t, kRoles> slots_{};  // the input of each role; -1 where the block has none
    int32_t input_count_ = 0;
    std::unique_ptr<Serialized> serialized_;
};

class FeedForwardCreator final : public CreatorBase {
  public:
    explicit FeedForwardCreator(twell_variant variant);

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept override;

  private:
    twell_variant const variant_;
};

}  // namespace twell

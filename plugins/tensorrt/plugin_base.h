// Shared by all plugin classes and their creators: the methods that TensorRT calls, in terms of few of a plugin's.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "fields.h"
#include "names.h"

namespace twell {

// `Plugin` is the class that derives from this one; clone() copies it. `Build` is the interface that it is built by.
// All inputs have the element type of the first one without a fixed type, but for those that have a fixed one; outputs
// have the type of the first input.
template <class Plugin, class Build = nvinfer1::IPluginV3OneBuild, int32_t OUTPUTS = 1>
class PluginBase : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public Build,
                   public nvinfer1::IPluginV3OneRuntime {
  public:
    PluginBase& operator=(PluginBase const&) = delete;

    nvinfer1::IPluginCapability* getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept final {
        switch (type) {
            case nvinfer1::PluginCapabilityType::kCORE:
                return static_cast<nvinfer1::IPluginV3OneCore*>(this);
            case nvinfer1::PluginCapabilityType::kBUILD:
                return static_cast<Build*>(this);
            case nvinfer1::PluginCapabilityType::kRUNTIME:
                return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }

    nvinfer1::IPluginV3* clone() noexcept final {
        return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return new Plugin(self()); });
    }

    char const* getPluginName() const noexcept final { return name_; }
    char const* getPluginVersion() const noexcept final { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }
    int32_t getNbOutputs() const noexcept final { return output_count(); }

    // ---- build ----

    int32_t getOutputDataTypes(nvinfer1::DataType* output_types, int32_t output_count,
                               nvinfer1::DataType const* input_types, int32_t input_count) const noexcept final {
        return status_of([&] {
            check_input_count(inputs_, input_count);
            check_types([&](size_t i) { return input_types[i]; });
            std::fill_n(output_types, output_count, chooses() ? nvinfer1::DataType::kINT64 : input_types[0]);
        });
    }

    int32_t getOutputShapes(nvinfer1::DimsExprs const* inputs, int32_t input_count, nvinfer1::DimsExprs const*, int32_t,
                            nvinfer1::DimsExprs* outputs, int32_t, nvinfer1::IExprBuilder& builder) noexcept final {
        return status_of([&] {
            check_input_count(inputs_, input_count);
            check_shapes(shapes_of([&](size_t i) { return known_dims(inputs[i]); }));
            set_output_shapes(inputs, outputs, builder);
        });
    }

    bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* in_out, int32_t input_count,
                                   int32_t output_count) noexcept final {
        if (in_out == nullptr || input_count != this->input_count() || output_count != this->output_count() ||
            pos < 0 || pos >= input_count + output_count) {
            return false;
        }
        nvinfer1::PluginTensorDesc const& desc = in_out[pos].desc;
        if (desc.format != nvinfer1::TensorFormat::kLINEAR) {
            return false;
        }
        if (pos >= input_count) {
            return desc.type == (chooses() ? nvinfer1::DataType::kINT64 : in_out[0].desc.type);
        }
        return may_be(inputs_[pos].type, desc.type, in_out[element_slot()].desc.type);
    }

    int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept final {
        return status_of([&] {
            check_profile(in, input_count);
            configure(in);
        });
    }

    size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count,
                            nvinfer1::DynamicPluginTensorDesc const*, int32_t) const noexcept final {
        return guarded<size_t>(0, [&] {
            check_profile(inputs, input_count);
            return workspace_bytes(inputs);
        });
    }

    // ---- runtime ----

    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final {
        return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return attached(); });
    }

    int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t input_count, nvinfer1::PluginTensorDesc const*,
                          int32_t) noexcept final {
        return status_of([&] {
            check_input_count(inputs_, input_count);
            check_types([&](size_t i) { return in[i].type; });
            prepare(in);
        });
    }

    int32_t enqueue(nvinfer1::PluginTensorDesc const* input_desc, nvinfer1::PluginTensorDesc const*,
                    void const* const* inputs, void* const* outputs, void* workspace,
                    cudaStream_t stream) noexcept final {
        return status_of([&] { run(input_desc, inputs, outputs, workspace, stream); });
    }

    // ---- serialisation ----

    nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final {
        return guarded<nvinfer1::PluginFieldCollection const*>(nullptr, [&] {
            plan_fields_ = plan_fields();
            return plan_fields_->collection();
        });
    }

  protected:
    // `name` is a constant of the program; `layer` names the node in messages; `inputs` are those that are present.
    PluginBase(char const* name, std::string layer, std::vector<Input> inputs)
        : name_(name), layer_(std::move(layer)), inputs_(std::move(inputs)) {}
    PluginBase(PluginBase const& other) : PluginBase(other.name_, other.layer_, other.inputs_) {}
    ~PluginBase() override = default;

    // ---- what a plugin has: each may throw, which becomes a message in the host's log and a failure ----

    virtual int32_t output_count() const { return OUTPUTS; }
    // Whether the outputs are int64: indices of elements.
    virtual bool chooses() const { return false; }
    // The allowed types of an input, to follow "; ".
    virtual std::string allowed_types(nvinfer1::DataType first) const = 0;
    // Holds the inputs against each other. Extents may be kAny: then only known ones are checked.
    virtual void check_shapes(Shapes const& inputs) const = 0;
    // Sets all outputs' shapes. By default they are those of as many inputs.
    virtual void set_output_shapes(nvinfer1::DimsExprs const* inputs, nvinfer1::DimsExprs* outputs,
                                   nvinfer1::IExprBuilder&) const {
        std::copy_n(inputs, OUTPUTS, outputs);
    }
    // Takes a profile, whose number of inputs and types have been checked, while a network is built.
    virtual void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) = 0;
    virtual size_t workspace_bytes(nvinfer1::DynamicPluginTensorDesc const*) const { return 0; }
    // Returns a new plugin for an execution context.
    virtual Plugin* attached() const { return new Plugin(self()); }
    // Checks shapes at run time, and gets ready for them; the number of inputs and types have been checked.
    virtual void prepare(nvinfer1::PluginTensorDesc const* inputs) { check_shapes(runtime_shapes(inputs)); }
    virtual void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs,
                     void* workspace, cudaStream_t stream) = 0;
    // Returns what a plan holds.
    virtual std::unique_ptr<PlanFields> plan_fields() const = 0;

    Plugin const& self() const { return static_cast<Plugin const&>(*this); }
    std::string const& layer() const { return layer_; }
    int32_t input_count() const { return static_cast<int32_t>(inputs_.size()); }
    // The first input that has the element type.
    size_t element_slot() const {
        auto const is_element = [](Input const& input) { return input.type == InputType::kElement; };
        return static_cast<size_t>(std::find_if(inputs_.begin(), inputs_.end(), is_element) - inputs_.begin());
    }
    char const* input_name(int32_t slot) const { return inputs_[slot].name; }

    Shapes runtime_shapes(nvinfer1::PluginTensorDesc const* inputs) const {
        return shapes_of([&](size_t i) { return inputs[i].dims; });
    }

    // Gathers a shape of each input.
    template <typename ShapeOf>
    Shapes shapes_of(ShapeOf&& shape_of) const {
        Shapes shapes{};
        for (size_t i = 0; i < inputs_.size(); ++i) {
            shapes[i] = shape_of(i);
        }
        return shapes;
    }

  private:
    // Runs the body of an override: see common.h.
    template <typename Result, typename Body>
    Result guarded(Result failure, Body&& body) const noexcept {
        return twell::guarded(name_, layer_.c_str(), failure, std::forward<Body>(body));
    }

    // As guarded(), for a body that returns nothing: 0, or -1 where it fails.
    template <typename Body>
    int32_t status_of(Body&& body) const noexcept {
        return guarded<int32_t>(-1, [&] {
            body();
            return 0;
        });
    }

    template <typename TypeOf>
    void check_types(TypeOf&& type_of) const {
        for (size_t i = 0; i < inputs_.size(); ++i) {
            nvinfer1::DataType const type = type_of(i);
            InputType const expected = inputs_[i].type;
            nvinfer1::DataType const first = type_of(element_slot());
            if (!may_be(expected, type, first)) {
                throw Refusal("input " + std::string(inputs_[i].name) + " is " + text_of(type) + "; " +
                              (expected == InputType::kElement ? allowed_types(first)
                                                               : std::string("expected ") + text_of(expected)));
            }
        }
    }

    void check_profile(nvinfer1::DynamicPluginTensorDesc const* inputs, int32_t input_count) const {
        check_input_count(inputs_, input_count);
        check_types([&](size_t i) { return inputs[i].desc.type; });
    }

    char const* const name_;
    std::string const layer_;
    std::vector<Input> const inputs_;
    std::unique_ptr<PlanFields> plan_fields_;  // which a host may read until it asks again
};

class CreatorBase : public nvinfer1::IPluginCreatorV3One {
  public:
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept final { return &collection_; }
    char const* getPluginName() const noexcept final { return name_; }
    char const* getPluginVersion() const noexcept final { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }

    nvinfer1::IPluginV3* createPlugin(char const* name, nvinfer1::PluginFieldCollection const* fields,
                                      nvinfer1::TensorRTPhase phase) noexcept final {
        char const* const layer = name == nullptr ? "" : name;
        return guarded<nvinfer1::IPluginV3*>(name_, layer, nullptr, [&] { return create(layer, fields, phase); });
    }

  protected:
    CreatorBase(char const* name, std::vector<nvinfer1::PluginField> fields)
        : name_(name), fields_(std::move(fields)), collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {}
    ~CreatorBase() override = default;

    // Returns a new plugin, or throws a Refusal of fields.
    virtual nvinfer1::IPluginV3* create(char const* layer, nvinfer1::PluginFieldCollection const* fields,
                                        nvinfer1::TensorRTPhase phase) const = 0;

  private:
    char const* const name_;
    std::vector<nvinfer1::PluginField> const fields_;
    nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace twell

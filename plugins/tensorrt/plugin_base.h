// What all plugin classes, and their creators, answer alike.
#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common.h"
#include "names.h"

namespace twell {

// `Plugin` is the class that derives from this one; clone() copies it. `Build` is the interface that it is built by.
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
        return guarded<nvinfer1::IPluginV3*>(nullptr, [&] { return new Plugin(static_cast<Plugin const&>(*this)); });
    }

    char const* getPluginName() const noexcept final { return name_; }
    char const* getPluginVersion() const noexcept final { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }
    int32_t getNbOutputs() const noexcept final { return OUTPUTS; }

  protected:
    // `name` is a constant of the program; `layer` names the node in messages.
    PluginBase(char const* name, std::string layer) : name_(name), layer_(std::move(layer)) {}
    PluginBase(PluginBase const& other) : PluginBase(other.name_, other.layer_) {}
    ~PluginBase() override = default;

    // Runs the body of an override: see common.h.
    template <typename Result, typename Body>
    Result guarded(Result failure, Body&& body) const noexcept {
        return twell::guarded(name_, layer_.c_str(), failure, std::forward<Body>(body));
    }

    std::string const& layer() const { return layer_; }

  private:
    char const* const name_;
    std::string const layer_;
};

class CreatorBase : public nvinfer1::IPluginCreatorV3One {
  public:
    nvinfer1::PluginFieldCollection const* getFieldNames() noexcept final { return &collection_; }
    char const* getPluginName() const noexcept final { return name_; }
    char const* getPluginVersion() const noexcept final { return kPluginVersion; }
    char const* getPluginNamespace() const noexcept final { return kPluginNamespace; }

  protected:
    CreatorBase(char const* name, std::vector<nvinfer1::PluginField> fields)
        : name_(name), fields_(std::move(fields)), collection_{static_cast<int32_t>(fields_.size()), fields_.data()} {}
    ~CreatorBase() override = default;

  private:
    char const* const name_;
    std::vector<nvinfer1::PluginField> const fields_;
    nvinfer1::PluginFieldCollection const collection_;
};

}  // namespace twell

// A plugin library adds to registration.cpp its plugins, and an exported function, with another name in each library,
// that registers them.
#pragma once

#include <NvInferRuntime.h>

#include <vector>

namespace twell {

// The creators of the plugins in this library. Never destroyed: a host may still hold them when static objects are
// taken down at exit.
std::vector<nvinfer1::IPluginCreatorV3One*> const& creators();

// Adds the plugins to every TensorRT in this process, where they are missing; returns whether there is one, and all
// have them. Plans name one namespace: empty, null and "twell" all stand for it, and any other is refused.
bool initialise(char const* plugin_namespace) noexcept;

}  // namespace twell

// Names that the plugins of this project share.
#pragma once

namespace twell {

// TensorRT names all three where it does not find a plugin: these and the plugin's; the version alone says twellc.
constexpr char const* kPluginNamespace = "twell";
constexpr char const* kPluginVersion = "twellc-3";

}  // namespace twell

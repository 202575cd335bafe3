// What the plugins of this project have in common by name.
#pragma once

namespace twell {

constexpr char const* kPluginNamespace = "twell";
// Not a plain number: hosts print it where the plugin is missing, and it should lead to this project.
constexpr char const* kPluginVersion = "twellc-2";

}  // namespace twell

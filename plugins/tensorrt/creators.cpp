// The plugins of libtwell_plugins.so.
#include <twell/twell.h>

#include "experts_plugin.h"
#include "feed_forward_plugin.h"
#include "linear_plugin.h"
#include "registration.h"

namespace twell {

std::vector<nvinfer1::IPluginCreatorV3One*> const& creators() {
    static auto const& all = *new std::vector<nvinfer1::IPluginCreatorV3One*>{
        new FeedForwardCreator(TWELL_GATED), new FeedForwardCreator(TWELL_PLAIN), new LinearCreator(),
        new ExpertsCreator()};
    return all;
}

}  // namespace twell

// The name is modelled on initLibNvInferPlugins, but messages go to the logger of TensorRT itself.
extern "C" TWELL_API bool initLibTwellPlugins(void* /*logger*/, char const* plugin_namespace) noexcept {
    return twell::initialise(plugin_namespace);
}

// The plugins of libtwell_attention.so.
#include <twell/attention.h>

#include "../tensorrt/registration.h"
#include "append_plugin.h"
#include "attention_plugin.h"

namespace twell {

std::vector<nvinfer1::IPluginCreatorV3One*> const& creators() {
    static auto const& all = *new std::vector<nvinfer1::IPluginCreatorV3One*>{
        new AttentionCreator(kAttentionName), new AttentionCreator(kCachedAttentionName), new AppendCreator};
    return all;
}

}  // namespace twell

// As initLibTwellPlugins of the other library.
extern "C" TWELL_API bool initLibTwellAttention(void* /*logger*/, char const* plugin_namespace) noexcept {
    return twell::initialise(plugin_namespace);
}

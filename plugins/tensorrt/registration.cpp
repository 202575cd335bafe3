// The two symbols that IPluginRegistry::loadLibrary looks up. TensorRT calls setLoggerFinder first, then getCreators.
#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <cstdint>

#include "feed_forward_plugin.h"
#include "host.h"

extern "C" {

TWELL_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { twell::host::set_logger_finder(finder); }

TWELL_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept {
    // Never destroyed: a host may still hold the creators when static objects are taken down at exit.
    static auto* const gated = new twell::FeedForwardCreator(TWELL_GATED);
    static auto* const plain = new twell::FeedForwardCreator(TWELL_PLAIN);
    static nvinfer1::IPluginCreatorInterface* const creators[] = {gated, plain};
    count = 2;
    return creators;
}

}  // extern "C"

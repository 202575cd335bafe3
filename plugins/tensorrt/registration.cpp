// How the plugins of a library get into a TensorRT. Three ways:
//
//   1. TensorRT opens it itself: IPluginRegistry::loadLibrary, trtexec --dynamicPlugins, a plan that embeds it. It then
//      calls setLoggerFinder and getCreators.
//   2. Somebody else opens it in a process where TensorRT is already (trtexec --staticPlugins, Triton's plugins=,
//      Polygraphy, ctypes, LD_PRELOAD into a program linked with TensorRT): its constructor adds the plugins to every
//      TensorRT that it finds.
//   3. It is there before TensorRT: with LD_PRELOAD, or opened with RTLD_GLOBAL. Its hooks stand in front of the
//      functions with which a program first reaches TensorRT, and add the plugins there. Opened with RTLD_LOCAL before
//      TensorRT it is never called; then initLibTwellPlugins (initLibTwellAttention) is left.
//
// All of them may happen in one process, in any order and more than once.
#include "registration.h"

#include <dlfcn.h>
#include <twell/twell.h>
#include <unwind.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "host.h"
#include "names.h"

namespace twell {
namespace {

// A host keeps pointers into this library, so a dlclose by the program that opened it must not unload it.
void stay_loaded() {
    Dl_info self{};
    if (dladdr(reinterpret_cast<void const*>(&stay_loaded), &self) != 0) {
        dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    }
}

// Adds the plugins to every TensorRT in this process; returns whether there is one, and all of them have the plugins.
// Takes no lock: a registry may call back into a logger, and that into Python, which has another lock.
bool add_to_all_hosts() noexcept {
    try {
        std::vector<host::Host> const hosts = host::find_hosts();
        bool good = !hosts.empty();
        for (host::Host const& target : hosts) {
            if (target.abi == host::Abi::kUnknown) {
                static std::atomic<bool> said = false;
                if (!said.exchange(true)) {
                    std::fprintf(stderr,
                                 "[twell] warning: no plugins for %s, version %d: this library knows TensorRT 10, "
                                 "TensorRT 11 and TensorRT-RTX from 1.5\n",
                                 target.path.c_str(), target.version);
                }
                good = false;
                continue;
            }
            stay_loaded();
            for (nvinfer1::IPluginCreatorV3One* creator : creators()) {
                good &= host::add_creator(target, *creator, creator->getPluginName(), kPluginVersion, kPluginNamespace);
            }
            host::use_logger_of(target);
        }
        return good;
    } catch (...) {
        std::fputs("[twell] error: could not look for TensorRT in this process\n", stderr);
        return false;
    }
}

_Unwind_Reason_Code look_for_tensorrt(_Unwind_Context* frame, void* found) {
    Dl_info owner{};
    auto const* address = reinterpret_cast<void const*>(_Unwind_GetIP(frame));
    if (dladdr(address, &owner) != 0 && host::is_tensorrt(owner.dli_fname)) {
        *static_cast<bool*>(found) = true;
        return _URC_END_OF_STACK;
    }
    return _URC_NO_REASON;
}

// Whether a TensorRT is among the callers. Then it is about to ask getCreators, and would find every creator there
// already: loadLibrary would log an error and return null, and a plan that embeds this library would be refused.
bool opened_by_tensorrt() {
    bool found = false;
    _Unwind_Backtrace(look_for_tensorrt, &found);
    return found;
}

__attribute__((constructor)) void on_load() {
    if (!opened_by_tensorrt()) {
        add_to_all_hosts();
    }
}

// The function that a call from `caller` would have reached without the hook. Where several TensorRTs are in one
// process, each caller has its own.
template <typename Function>
Function* behind_hook(char const* name, void const* caller) {
    Dl_info owner{};
    void* symbol = nullptr;
    if (dladdr(caller, &owner) != 0) {
        if (void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD)) {
            symbol = dlsym(library, name);
            dlclose(library);
        }
    }
    // A program's own name need not be a path. dlsym never finds the hooks: see exports.map.
    return reinterpret_cast<Function*>(symbol == nullptr ? dlsym(RTLD_DEFAULT, name) : symbol);
}

// A program's call reaches the hooks of one library only, the first; so that one serves the other, too.
void on_hook() noexcept {
    add_to_all_hosts();
    for (char const* name : {"initLibTwellPlugins", "initLibTwellAttention"}) {
        if (auto* const init = reinterpret_cast<bool (*)(void*, char const*)>(dlsym(RTLD_DEFAULT, name))) {
            init(nullptr, kPluginNamespace);
        }
    }
}

}  // namespace

bool initialise(char const* plugin_namespace) noexcept {
    if (plugin_namespace != nullptr && *plugin_namespace != '\0' &&
        std::strcmp(plugin_namespace, kPluginNamespace) != 0) {
        host::log(host::Severity::kError,
                  "initLibTwell: the plugins have the namespace 'twell'; pass it, or an empty one");
        return false;
    }
    return add_to_all_hosts();
}

}  // namespace twell

extern "C" {

TWELL_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) noexcept { twell::host::set_logger_finder(finder); }

TWELL_API nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept {
    static auto const& all =
        *new std::vector<nvinfer1::IPluginCreatorInterface*>(twell::creators().begin(), twell::creators().end());
    count = static_cast<int32_t>(all.size());
    return all.data();
}

// ---- hooks: see exports.map ----

TWELL_API void* hook_create_builder(void* logger, int32_t version) noexcept {
    twell::on_hook();
    auto* const create =
        twell::behind_hook<void*(void*, int32_t)>("createInferBuilder_INTERNAL", __builtin_return_address(0));
    return create == nullptr ? nullptr : create(logger, version);
}
__asm__(".symver hook_create_builder, createInferBuilder_INTERNAL@TWELL_HOOKS");

TWELL_API void* hook_create_runtime(void* logger, int32_t version) noexcept {
    twell::on_hook();
    auto* const create =
        twell::behind_hook<void*(void*, int32_t)>("createInferRuntime_INTERNAL", __builtin_return_address(0));
    return create == nullptr ? nullptr : create(logger, version);
}
__asm__(".symver hook_create_runtime, createInferRuntime_INTERNAL@TWELL_HOOKS");

TWELL_API void* hook_get_registry() noexcept {
    twell::on_hook();
    auto* const get = twell::behind_hook<void*()>("getPluginRegistry", __builtin_return_address(0));
    return get == nullptr ? nullptr : get();
}
__asm__(".symver hook_get_registry, getPluginRegistry@TWELL_HOOKS");

}  // extern "C"

#include "host.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>

namespace twell::host {
namespace {

// Where a layout has the virtual functions that are called here: their places in the vtables of the Itanium C++ ABI.
struct Slots {
    size_t log;               // of ILogger
    size_t find_logger;       // of ILoggerFinder
    size_t register_creator;  // of IPluginRegistry
    size_t get_creator;
};
constexpr Slots kTrt10Slots = {0, 0, 12, 14};
constexpr Slots kTrt11Slots = {4, 4, 8, 10};

Slots const* slots_of(Abi abi) {
    switch (abi) {
        case Abi::kTrt10:
            return &kTrt10Slots;
        case Abi::kTrt11:
            return &kTrt11Slots;
        case Abi::kUnknown:
            break;
    }
    return nullptr;
}

// Calls a virtual function. Not through a class of our own: a compiler that sees every class that derives from it,
// none, would take the call for impossible.
template <typename Result, typename... Arguments>
Result call(void* object, size_t slot, Arguments... arguments) {
    using Function = Result (*)(void*, Arguments...);
    return (*static_cast<Function**>(object))[slot](object, arguments...);
}

struct Finder {
    void* object = nullptr;
    Abi abi = Abi::kUnknown;
};

// Functions with a local static, not globals: a host may call in before or after this library's static initialisers.
std::mutex& finder_mutex() {
    static std::mutex& mutex = *new std::mutex;
    return mutex;
}

Finder& finder() {
    static Finder& instance = *new Finder;
    return instance;
}

// The loggers of hosts whose ILoggerFinder is not known, under finder_mutex().
std::vector<Host>& logging_hosts() {
    static std::vector<Host>& instance = *new std::vector<Host>;
    return instance;
}

bool log_through(void* logger, Slots const& slots, Severity severity, char const* message) {
    if (logger == nullptr) {
        return false;
    }
    call<void>(logger, slots.log, severity, message);
    return true;
}

std::string_view file_name(char const* path) {
    std::string_view name = path == nullptr ? "" : path;
    name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0: no slash, the whole name
    return name;
}

// The name alone has no version where an application opened the unversioned development link.
int32_t version_of(void* library) {
    auto const get_version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
    return get_version == nullptr ? 0 : get_version();  // 10000 * major + 100 * minor + patch
}

Abi abi_of_version(std::string_view name, int32_t version) {
    if (name.starts_with("libtensorrt_rtx")) {
        // RTX counts from 1 again. 1.5 and 1.7 have the layout of TensorRT 11; older ones were never seen.
        return version >= 10500 && version < 20000 ? Abi::kTrt11 : Abi::kUnknown;
    }
    int32_t const major = name.starts_with("libnvinfer") ? version / 10000 : 0;
    return major == 10 ? Abi::kTrt10 : major == 11 ? Abi::kTrt11 : Abi::kUnknown;
}

int collect_tensorrt(dl_phdr_info* info, size_t, void* paths) {
    if (is_tensorrt(info->dlpi_name)) {
        static_cast<std::vector<std::string>*>(paths)->emplace_back(info->dlpi_name);
    }
    return 0;
}

}  // namespace

bool is_tensorrt(char const* path) noexcept {
    std::string_view const name = file_name(path);
    return name.starts_with("libnvinfer") || name.starts_with("libtensorrt_rtx");
}

std::vector<Host> find_hosts() {
    std::vector<std::string> paths;
    dl_iterate_phdr(collect_tensorrt, &paths);
    std::vector<Host> hosts;
    for (std::string const& path : paths) {
        void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        if (library == nullptr) {
            continue;
        }
        // libnvinfer_plugin and its like have no registry; the one found through them is their libnvinfer's.
        auto const get_registry = reinterpret_cast<void* (*)()>(dlsym(library, "getPluginRegistry"));
        void* registry = get_registry == nullptr ? nullptr : get_registry();
        bool const known =
            std::any_of(hosts.begin(), hosts.end(), [registry](Host const& host) { return host.registry == registry; });
        if (registry != nullptr && !known) {
            int32_t const version = version_of(library);
            auto const get_logger = reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"));
            hosts.push_back({path, version, abi_of_version(file_name(path.c_str()), version), registry, get_logger});
        }
        dlclose(library);
    }
    return hosts;
}

bool add_creator(Host const& host, nvinfer1::IPluginCreatorInterface& creator, char const* name, char const* version,
                 char const* plugin_namespace) noexcept {
    Slots const* const slots = slots_of(host.abi);
    if (slots == nullptr) {
        return false;
    }
    auto const is_there = [&] {
        return call<void*>(host.registry, slots->get_creator, name, version, plugin_namespace) != nullptr;
    };
    return is_there() || call<bool>(host.registry, slots->register_creator, &creator, plugin_namespace) ||
           is_there();  // another thread was faster
}

Abi abi_of(void const* object) noexcept {
    if (object == nullptr) {
        return Abi::kUnknown;
    }
    void const* vtable = nullptr;
    std::memcpy(&vtable, object, sizeof(vtable));
    Dl_info owner{};
    if (dladdr(vtable, &owner) == 0 || owner.dli_fname == nullptr) {
        return Abi::kUnknown;
    }
    void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return Abi::kUnknown;
    }
    int32_t const version = version_of(library);
    dlclose(library);
    return abi_of_version(file_name(owner.dli_fname), version);
}

void use_logger_of(Host const& host) {
    std::lock_guard<std::mutex> const lock(finder_mutex());
    auto& hosts = logging_hosts();
    bool const known =
        std::any_of(hosts.begin(), hosts.end(), [&host](Host const& other) { return other.registry == host.registry; });
    if (host.get_logger != nullptr && !known) {
        hosts.push_back(host);
    }
}

void set_logger_finder(void* object) noexcept {
    try {
        Finder const found{object, abi_of(object)};
        std::lock_guard<std::mutex> const lock(finder_mutex());
        finder() = found;
    } catch (...) {
        std::fputs("[twell] could not remember the host's logger\n", stderr);
    }
}

void log(Severity severity, char const* message) noexcept {
    try {
        Finder target;
        std::vector<Host> hosts;
        {
            std::lock_guard<std::mutex> const lock(finder_mutex());
            target = finder();
            hosts = logging_hosts();
        }
        bool logged = false;
        if (Slots const* const slots = slots_of(target.abi); slots != nullptr) {
            logged = log_through(call<void*>(target.object, slots->find_logger), *slots, severity, message);
        }
        for (auto host = hosts.rbegin(); host != hosts.rend() && !logged; ++host) {
            if (Slots const* const slots = slots_of(host->abi); slots != nullptr) {
                logged = log_through(host->get_logger(), *slots, severity, message);
            }
        }
        if (logged) {
            return;
        }
    } catch (...) {
        // Fall through: the message matters more than why the host's logger failed.
    }
    if (severity == Severity::kError) {
        std::fprintf(stderr, "[twell] error: %s\n", message);
    }
}

}  // namespace twell::host

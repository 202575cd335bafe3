#include "host.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>

namespace twell::host {
#define TWELL_MIRROR __attribute__((visibility("default")))

// The virtual functions of the two layouts, in vtable order. Only called, never implemented here. They must not be
// local to this file nor hidden: a compiler that sees every derived class there is, none, would take the calls for
// impossible and turn them into calls of the pure virtual function.
namespace abi10 {
class TWELL_MIRROR Logger {
  public:
    virtual void log(Severity severity, char const* message) noexcept = 0;

  protected:
    virtual ~Logger() = default;
};
class TWELL_MIRROR LoggerFinder {
  public:
    virtual Logger* findLogger() = 0;

  protected:
    virtual ~LoggerFinder() = default;
};
class TWELL_MIRROR Registry {
  public:
    virtual void registerCreatorV2() = 0;
    virtual void getPluginCreatorList() = 0;
    virtual void getPluginCreator() = 0;
    virtual ~Registry() = default;  // two slots
    virtual void setErrorRecorder() = 0;
    virtual void getErrorRecorder() = 0;
    virtual void deregisterCreatorV2() = 0;
    virtual void isParentSearchEnabled() = 0;
    virtual void setParentSearchEnabled() = 0;
    virtual void loadLibrary() = 0;
    virtual void deregisterLibrary() = 0;
    virtual bool registerCreator(nvinfer1::IPluginCreatorInterface& creator, char const* plugin_namespace) noexcept = 0;
    virtual void getAllCreators() = 0;
    virtual nvinfer1::IPluginCreatorInterface* getCreator(char const* name, char const* version,
                                                          char const* plugin_namespace) noexcept = 0;
};
}  // namespace abi10

namespace abi11 {
// IVersionedInterface. Its functions are here for their slots alone, so their true signatures do not matter.
class TWELL_MIRROR Versioned {
  public:
    virtual void getAPILanguage() const noexcept = 0;
    virtual void getInterfaceInfo() const noexcept = 0;
    virtual ~Versioned() = default;
};
class TWELL_MIRROR Logger : public Versioned {
  public:
    virtual void log(Severity severity, char const* message) noexcept = 0;
};
class TWELL_MIRROR LoggerFinder : public Versioned {
  public:
    virtual Logger* findLogger() = 0;
};
class TWELL_MIRROR Registry {
  public:
    virtual ~Registry() = default;  // two slots
    virtual void setErrorRecorder() = 0;
    virtual void getErrorRecorder() = 0;
    virtual void isParentSearchEnabled() = 0;
    virtual void setParentSearchEnabled() = 0;
    virtual void loadLibrary() = 0;
    virtual void deregisterLibrary() = 0;
    virtual bool registerCreator(nvinfer1::IPluginCreatorInterface& creator, char const* plugin_namespace) noexcept = 0;
    virtual void getAllCreators() = 0;
    virtual nvinfer1::IPluginCreatorInterface* getCreator(char const* name, char const* version,
                                                          char const* plugin_namespace) noexcept = 0;
};
}  // namespace abi11

namespace {

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

template <typename Logger>
bool log_through(Logger* logger, Severity severity, char const* message) {
    if (logger == nullptr) {
        return false;
    }
    logger->log(severity, message);
    return true;
}

template <typename Registry>
bool add_through(void* object, nvinfer1::IPluginCreatorInterface& creator, char const* name, char const* version,
                 char const* plugin_namespace) noexcept {
    auto* registry = static_cast<Registry*>(object);
    return registry->getCreator(name, version, plugin_namespace) != nullptr ||
           registry->registerCreator(creator, plugin_namespace) ||
           registry->getCreator(name, version, plugin_namespace) != nullptr;  // another thread was faster
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
        // libnvinfer_plugin and its like have no registry; what is found through them is that of their libnvinfer.
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
    switch (host.abi) {
        case Abi::kTrt10:
            return add_through<abi10::Registry>(host.registry, creator, name, version, plugin_namespace);
        case Abi::kTrt11:
            return add_through<abi11::Registry>(host.registry, creator, name, version, plugin_namespace);
        case Abi::kUnknown:
            break;
    }
    return false;
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
        if (target.abi == Abi::kTrt10) {
            auto* logger = static_cast<abi10::LoggerFinder*>(target.object)->findLogger();
            logged = log_through(logger, severity, message);
        } else if (target.abi == Abi::kTrt11) {
            auto* logger = static_cast<abi11::LoggerFinder*>(target.object)->findLogger();
            logged = log_through(logger, severity, message);
        }
        for (auto host = hosts.rbegin(); host != hosts.rend() && !logged; ++host) {
            if (host->abi == Abi::kTrt10) {
                logged = log_through(static_cast<abi10::Logger*>(host->get_logger()), severity, message);
            } else if (host->abi == Abi::kTrt11) {
                logged = log_through(static_cast<abi11::Logger*>(host->get_logger()), severity, message);
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

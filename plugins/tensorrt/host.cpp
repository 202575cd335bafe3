#include "host.h"

#include <dlfcn.h>

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

template <typename LoggerFinder>
bool log_through(void* object, Severity severity, char const* message) {
    auto* logger = static_cast<LoggerFinder*>(object)->findLogger();
    if (logger == nullptr) {
        return false;
    }
    logger->log(severity, message);
    return true;
}

}  // namespace

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
    std::string_view name = owner.dli_fname;
    name.remove_prefix(name.rfind('/') + 1);  // npos + 1 is 0: no slash, the whole name

    // The name alone has no version where an application opened the unversioned development link.
    void* library = dlopen(owner.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
        return Abi::kUnknown;
    }
    auto const get_version = reinterpret_cast<int32_t (*)()>(dlsym(library, "getInferLibVersion"));
    int32_t const version = get_version == nullptr ? 0 : get_version();  // 10000 * major + 100 * minor + patch
    dlclose(library);

    if (name.starts_with("libtensorrt_rtx")) {
        // RTX counts from 1 again. 1.5 and 1.7 have the layout of TensorRT 11; older ones were never seen.
        return version >= 10500 && version < 20000 ? Abi::kTrt11 : Abi::kUnknown;
    }
    if (name.starts_with("libnvinfer")) {
        int32_t const major = version / 10000;
        return major == 10 ? Abi::kTrt10 : major == 11 ? Abi::kTrt11 : Abi::kUnknown;
    }
    return Abi::kUnknown;
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
        {
            std::lock_guard<std::mutex> const lock(finder_mutex());
            target = finder();
        }
        bool logged = false;
        if (target.abi == Abi::kTrt10) {
            logged = log_through<abi10::LoggerFinder>(target.object, severity, message);
        } else if (target.abi == Abi::kTrt11) {
            logged = log_through<abi11::LoggerFinder>(target.object, severity, message);
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

// A stand-in for TensorRT, small enough to have any layout: it loads the plugin library as IPluginRegistry::loadLibrary
// does and calls it through the published vtable order, with no TensorRT header.
//
// Compiled by test_registry.py as a library of a given name, with HOST_VERSION (what getInferLibVersion returns) and
// HOST_LAYOUT (10 or 11: where ILogger::log and ILoggerFinder::findLogger are).
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" int32_t getInferLibVersion() { return HOST_VERSION; }

struct InterfaceInfo {
    char const* kind;
    int32_t major;
    int32_t minor;
};

struct Versioned {
    virtual int32_t getAPILanguage() const noexcept { return 0; }
    virtual InterfaceInfo getInterfaceInfo() const noexcept { return {"", 1, 0}; }
    virtual ~Versioned() = default;
};

#if HOST_LAYOUT == 11
struct Logger : Versioned {
    virtual void log(int32_t severity, char const* message) noexcept { std::printf("log %d %s\n", severity, message); }
};
struct LoggerFinder : Versioned {
    virtual Logger* findLogger() { return &logger; }
    Logger logger;
};
#else
struct Logger {
    virtual void log(int32_t severity, char const* message) noexcept { std::printf("log %d %s\n", severity, message); }
    virtual ~Logger() = default;
};
struct LoggerFinder {
    virtual Logger* findLogger() { return &logger; }
    virtual ~LoggerFinder() = default;
    Logger logger;
};
#endif

struct Field {
    char const* name;
    void const* data;
    int32_t type;
    int32_t length;
};

struct Fields {
    int32_t count;
    Field const* fields;
};

struct Runtime : Versioned {
    virtual int32_t setTactic(int32_t) noexcept = 0;
    virtual int32_t onShapeChange(void const*, int32_t, void const*, int32_t) noexcept = 0;
    virtual int32_t enqueue(void const*, void const*, void const* const*, void* const*, void*, void*) noexcept = 0;
    virtual Versioned* attachToContext(void*) noexcept = 0;
    virtual Fields const* getFieldsToSerialize() noexcept = 0;
};

struct Plugin : Versioned {
    virtual Versioned* getCapabilityInterface(int32_t type) noexcept = 0;
    virtual Plugin* clone() noexcept = 0;
};

struct Creator : Versioned {
    virtual Plugin* createPlugin(char const* name, Fields const* fields, int32_t phase) noexcept = 0;
};

namespace {

LoggerFinder finder;
constexpr int32_t kBuild = 0;
constexpr int32_t kRuntime = 1;
constexpr int32_t kRuntimeCapability = 2;
constexpr int32_t kFloat32 = 1;
constexpr int32_t kInt32 = 5;
constexpr int32_t kChar = 6;

Runtime* runtime_of(Plugin* plugin) {
    return static_cast<Runtime*>(plugin->getCapabilityInterface(kRuntimeCapability));
}

void print_fields(Fields const* fields) {
    for (int32_t i = 0; i < fields->count; ++i) {
        Field const& field = fields->fields[i];
        if (field.type == kFloat32 && field.length == 1) {
            std::printf("field %s %g\n", field.name, static_cast<double>(*static_cast<float const*>(field.data)));
        } else if (field.type == kInt32 && field.length == 1) {
            std::printf("field %s %d\n", field.name, *static_cast<int32_t const*>(field.data));
        } else {
            std::printf("field %s of type %d and length %d\n", field.name, field.type, field.length);
        }
    }
}

// Creates a plugin, then another one from what the first would write into a plan.
void round_trip(Creator* creator) {
    float const threshold = 0.25F;
    int32_t const compression = 4;
    int32_t const yes = 1;
    int32_t const no = 0;
    Field const given[] = {{"activation", "fatrelu", kChar, 8},
                           {"threshold", &threshold, kFloat32, 1},
                           {"compression", &compression, kInt32, 1},
                           {"gate_bias", &no, kInt32, 1},
                           {"up_bias", &yes, kInt32, 1},
                           {"down_bias", &yes, kInt32, 1}};
    Fields const fields{6, given};
    Plugin* built = creator->createPlugin("layer0", &fields, kBuild);
    Plugin* cloned = built->clone();
    delete built;
    Plugin* restored = creator->createPlugin("layer0", runtime_of(cloned)->getFieldsToSerialize(), kRuntime);
    delete cloned;
    print_fields(runtime_of(restored)->getFieldsToSerialize());
    Versioned* attached = runtime_of(restored)->attachToContext(nullptr);
    std::printf("attached %d\n", attached != nullptr);
    delete attached;
    delete restored;
}

}  // namespace

extern "C" int run(char const* library) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        std::printf("dlopen failed: %s\n", dlerror());
        return 1;
    }
    using SetLoggerFinder = void (*)(void*);
    using GetCreators = Versioned* const* (*)(int32_t&);
    reinterpret_cast<SetLoggerFinder>(dlsym(handle, "setLoggerFinder"))(&finder);
    int32_t count = 0;
    Versioned* const* creators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"))(count);
    std::printf("creators %d\n", count);
    // Fields at fault: none at all.
    Plugin* refused = static_cast<Creator*>(creators[0])->createPlugin("layer0", nullptr, kBuild);
    std::printf("refused %d\n", refused == nullptr);
    round_trip(static_cast<Creator*>(creators[0]));
    std::fflush(stdout);
    return 0;
}

// A stand-in for TensorRT, small enough to have any layout: it loads the plugin library as IPluginRegistry::loadLibrary
// does and calls it through the published vtable order, with no TensorRT header.
//
// Compiled by test_registry.py and test_enqueue.py as a library of a given name, with HOST_VERSION (what
// getInferLibVersion returns) and HOST_LAYOUT (10 or 11: where ILogger::log and ILoggerFinder::findLogger are).
#include <dlfcn.h>

#include <cstddef>
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

// Tensor descriptions are passed on as they come, so their layout is known only to test_enqueue.py.
struct Build : Versioned {
    virtual int32_t configurePlugin(void const*, int32_t, void const*, int32_t) noexcept = 0;
    virtual int32_t getOutputDataTypes(int32_t*, int32_t, int32_t const*, int32_t) const noexcept = 0;
    virtual int32_t getOutputShapes(void const*, int32_t, void const*, int32_t, void*, int32_t, void*) noexcept = 0;
    virtual bool supportsFormatCombination(int32_t, void const*, int32_t, int32_t) noexcept = 0;
    virtual int32_t getNbOutputs() const noexcept = 0;
    virtual size_t getWorkspaceSize(void const*, int32_t, void const*, int32_t) const noexcept = 0;
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
constexpr int32_t kBuildCapability = 1;
constexpr int32_t kRuntimeCapability = 2;
constexpr int32_t kFloat32 = 1;
constexpr int32_t kInt32 = 5;
constexpr int32_t kChar = 6;

Runtime* runtime_of(Plugin* plugin) {
    return static_cast<Runtime*>(plugin->getCapabilityInterface(kRuntimeCapability));
}

Build* build_of(Plugin* plugin) { return static_cast<Build*>(plugin->getCapabilityInterface(kBuildCapability)); }

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
    int32_t const hot = 512;
    int32_t const yes = 1;
    int32_t const no = 0;
    Field const given[] = {{"activation", "fatrelu", kChar, 8},
                           {"threshold", &threshold, kFloat32, 1},
                           {"compression", &compression, kInt32, 1},
                           {"hot", &hot, kInt32, 1},
                           {"gate_bias", &no, kInt32, 1},
                           {"up_bias", &yes, kInt32, 1},
                           {"down_bias", &yes, kInt32, 1},
                           {"residual", &yes, kInt32, 1}};
    Fields const fields{8, given};
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

extern "C" {

// Loads the library and returns one of its creators, or null.
Creator* load(char const* library, int32_t index) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        std::printf("dlopen failed: %s\n", dlerror());
        return nullptr;
    }
    using SetLoggerFinder = void (*)(void*);
    using GetCreators = Versioned* const* (*)(int32_t&);
    reinterpret_cast<SetLoggerFinder>(dlsym(handle, "setLoggerFinder"))(&finder);
    int32_t count = 0;
    Versioned* const* creators = reinterpret_cast<GetCreators>(dlsym(handle, "getCreators"))(count);
    return index < count ? static_cast<Creator*>(creators[index]) : nullptr;
}

Plugin* create(Creator* creator, Fields const* fields) { return creator->createPlugin("layer0", fields, kBuild); }

int32_t configure(Plugin* plugin, void const* in, int32_t count, void const* out) {
    return build_of(plugin)->configurePlugin(in, count, out, 1);
}

size_t workspace_size(Plugin* plugin, void const* in, int32_t count, void const* out) {
    return build_of(plugin)->getWorkspaceSize(in, count, out, 1);
}

bool supports(Plugin* plugin, int32_t position, void const* in_out, int32_t count) {
    return build_of(plugin)->supportsFormatCombination(position, in_out, count, 1);
}

int32_t shape_change(Plugin* plugin, void const* in, int32_t count, void const* out) {
    return runtime_of(plugin)->onShapeChange(in, count, out, 1);
}

Plugin* attach(Plugin* plugin) { return static_cast<Plugin*>(runtime_of(plugin)->attachToContext(nullptr)); }

int32_t enqueue_attached(Plugin* plugin, void const* in, void const* out, void const* const* inputs,
                         void* const* outputs, void* workspace, void* stream) {
    return runtime_of(plugin)->enqueue(in, out, inputs, outputs, workspace, stream);
}

// Attaches to a context as an engine would, and runs there.
int32_t enqueue(Plugin* plugin, void const* in, void const* out, void const* const* inputs, void* const* outputs,
                void* workspace, void* stream) {
    Plugin* attached = attach(plugin);
    if (attached == nullptr) {
        return -1;
    }
    int32_t const status = enqueue_attached(attached, in, out, inputs, outputs, workspace, stream);
    delete attached;
    return status;
}

void destroy(Plugin* plugin) {
    delete plugin;
    std::fflush(stdout);
}

int run(char const* library) {
    Creator* creator = load(library, 0);
    int creators = 0;
    while (load(library, creators) != nullptr) {
        ++creators;
    }
    std::printf("creators %d\n", creators);
    // Fields at fault: none at all.
    std::printf("refused %d\n", creator->createPlugin("layer0", nullptr, kBuild) == nullptr);
    round_trip(creator);
    std::fflush(stdout);
    return 0;
}

}  // extern "C"

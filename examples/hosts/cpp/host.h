// What the programs here share: TensorRT and the plugins opened by the names of their libraries, and a plan opened in
// it.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

class Logger : public nvinfer1::ILogger {
  public:
    void log(Severity severity, char const* message) noexcept override {
        if (severity <= Severity::kWARNING) {
            std::fprintf(stderr, "TensorRT: %s\n", message);
        }
    }
};

inline void* open_library(char const* path) {
    void* library = dlopen(path, RTLD_NOW);
    if (library == nullptr) {
        throw std::runtime_error(dlerror());
    }
    return library;
}

template <typename Function>
Function* find(void* library, char const* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
        throw std::runtime_error(dlerror());
    }
    return reinterpret_cast<Function*>(symbol);
}

// Opens libtwell_plugins.so or libtwell_attention.so, and returns whether a TensorRT has its plugins. This asks, and
// does nothing where opening was enough; with TensorRT opened after the plugins, it registers them.
inline bool open_plugins(char const* path) {
    void* library = open_library(path);
    bool const of_attention = dlsym(library, "initLibTwellAttention") != nullptr;
    char const* name = of_attention ? "initLibTwellAttention" : "initLibTwellPlugins";
    return find<bool(void*, char const*)>(library, name)(nullptr, "");
}

inline void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(status));
    }
}

inline std::vector<char> read(char const* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error(std::string(path) + ": cannot be read");
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

// Bytes of a tensor without padding.
inline size_t bytes_of(nvinfer1::Dims const& shape, nvinfer1::DataType type) {
    using nvinfer1::DataType;
    size_t bytes = type == DataType::kINT64                               ? 8
                   : type == DataType::kFLOAT || type == DataType::kINT32 ? 4
                   : type == DataType::kHALF || type == DataType::kBF16   ? 2
                                                                          : 1;
    for (int32_t i = 0; i < shape.nbDims; ++i) {
        bytes *= static_cast<size_t>(shape.d[i]);
    }
    return bytes;
}

struct DeviceDelete {
    void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceMemory = std::unique_ptr<void, DeviceDelete>;

// Memory on the GPU, zeroed.
inline DeviceMemory allocate(size_t bytes) {
    void* address = nullptr;
    check(cudaMalloc(&address, bytes));
    DeviceMemory memory(address);
    check(cudaMemset(address, 0, bytes));
    return memory;
}

// A plan that TensorRT has opened. The order of members is that of their lives.
struct Plan {
    Logger logger;
    std::unique_ptr<nvinfer1::IRuntime> runtime;
    std::unique_ptr<nvinfer1::ICudaEngine> engine;

    // The plugin libraries that the plan needs, with colons between them.
    Plan(char const* tensorrt_path, char const* plugin_paths, char const* plan_path) {
        // ---- register ----
        void* tensorrt = open_library(tensorrt_path);
        int32_t const version = find<int32_t()>(tensorrt, "getInferLibVersion")();
        std::istringstream paths(plugin_paths);
        for (std::string path; std::getline(paths, path, ':');) {
            if (!open_plugins(path.c_str())) {
                throw std::runtime_error(std::string(tensorrt_path) + ": does not take the TwELL plugins");
            }
        }
        std::printf("TwELL plugins: registered in %s, version %d.%d.%d\n", tensorrt_path, version / 10000,
                    version / 100 % 100, version % 100);

        // ---- open the plan ----
        // From here on the classes of the headers are used, and their layouts change between major versions.
        if (version / 10000 != NV_TENSORRT_MAJOR) {
            throw std::runtime_error("this program was compiled with the headers of TensorRT " +
                                     std::to_string(NV_TENSORRT_MAJOR) + "; compile it with those of " + tensorrt_path);
        }
        // Without one, TensorRT's lean runtime does not survive its own creation.
        int gpus = 0;
        cudaError_t const status = cudaGetDeviceCount(&gpus);
        if (status != cudaSuccess || gpus == 0) {
            throw std::runtime_error(std::string("no usable GPU: ") + cudaGetErrorString(status));
        }
        auto* const create = find<void*(void*, int32_t)>(tensorrt, "createInferRuntime_INTERNAL");
        runtime.reset(static_cast<nvinfer1::IRuntime*>(create(&logger, NV_TENSORRT_VERSION)));
        if (!runtime) {
            throw std::runtime_error("TensorRT does not start");
        }
        std::vector<char> const bytes = read(plan_path);
        engine.reset(runtime->deserializeCudaEngine(bytes.data(), bytes.size()));
        if (!engine) {
            throw std::runtime_error(std::string(plan_path) + ": TensorRT refuses the plan");
        }
    }
};

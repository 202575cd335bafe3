// Runs a plan on zeros, from a program that links neither TensorRT nor the plugins:
//
//   run_plan libnvinfer.so.10 libtwell_plugins.so bytelm.plan
//
// Opening the plugin library once TensorRT is there is all that registering takes.
#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

class Logger : public nvinfer1::ILogger {
  public:
    void log(Severity severity, char const* message) noexcept override {
        if (severity <= Severity::kWARNING) {
            std::fprintf(stderr, "TensorRT: %s\n", message);
        }
    }
};

void* open_library(char const* path) {
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

void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(status));
    }
}

std::vector<char> read(char const* path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        throw std::runtime_error(std::string(path) + ": cannot be read");
    }
    return {std::istreambuf_iterator<char>(file), {}};
}

// Bytes of a tensor without padding.
size_t bytes_of(nvinfer1::Dims const& shape, nvinfer1::DataType type) {
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

void run(char const* tensorrt_path, char const* plugins_path, char const* plan_path) {
    // ---- register ----
    void* tensorrt = open_library(tensorrt_path);
    void* plugins = open_library(plugins_path);
    int32_t const version = find<int32_t()>(tensorrt, "getInferLibVersion")();
    // Asks, and does nothing where opening was enough. With TensorRT opened after the plugins, it registers them.
    if (!find<bool(void*, char const*)>(plugins, "initLibTwellPlugins")(nullptr, "")) {
        throw std::runtime_error(std::string(tensorrt_path) + ": does not take the TwELL plugins");
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
    Logger logger;
    auto* const create = find<void*(void*, int32_t)>(tensorrt, "createInferRuntime_INTERNAL");
    std::unique_ptr<nvinfer1::IRuntime> runtime(static_cast<nvinfer1::IRuntime*>(create(&logger, NV_TENSORRT_VERSION)));
    if (!runtime) {
        throw std::runtime_error("TensorRT does not start");
    }
    std::vector<char> const plan = read(plan_path);
    std::unique_ptr<nvinfer1::ICudaEngine> engine(runtime->deserializeCudaEngine(plan.data(), plan.size()));
    if (!engine) {
        throw std::runtime_error(std::string(plan_path) + ": TensorRT refuses the plan");
    }

    // ---- run it ----
    std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());
    std::vector<std::unique_ptr<void, DeviceDelete>> memory;
    for (auto const mode : {nvinfer1::TensorIOMode::kINPUT, nvinfer1::TensorIOMode::kOUTPUT}) {
        for (int32_t i = 0; i < engine->getNbIOTensors(); ++i) {
            char const* const name = engine->getIOTensorName(i);
            if (engine->getTensorIOMode(name) != mode) {
                continue;
            }
            if (mode == nvinfer1::TensorIOMode::kINPUT) {
                // The shape that the first profile is tuned for.
                auto const shape = engine->getProfileShape(name, 0, nvinfer1::OptProfileSelector::kOPT);
                context->setInputShape(name, shape);
            }
            size_t const bytes = bytes_of(context->getTensorShape(name), engine->getTensorDataType(name));
            void* address = nullptr;
            check(cudaMalloc(&address, bytes));
            memory.emplace_back(address);
            check(cudaMemset(address, 0, bytes));
            context->setTensorAddress(name, address);
            std::printf("%s: %zu bytes\n", name, bytes);
        }
    }
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream));
    if (!context->enqueueV3(stream)) {
        throw std::runtime_error(std::string(plan_path) + ": the plan fails");
    }
    check(cudaStreamSynchronize(stream));
    check(cudaStreamDestroy(stream));
    std::printf("done\n");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: %s TENSORRT_LIBRARY PLUGIN_LIBRARY PLAN\n", argv[0]);
        return 2;
    }
    try {
        run(argv[1], argv[2], argv[3]);
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}

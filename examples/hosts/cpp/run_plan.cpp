// Runs a plan on zeros, from a program that links neither TensorRT nor the plugins:
//
//   run_plan libnvinfer.so.10 libtwell_plugins.so bytelm.plan
//
// Opening the plugin library once TensorRT is there is all that registering takes: see Plan in host.h.
#include "host.h"

namespace {

void run(char const* tensorrt_path, char const* plugins_path, char const* plan_path) {
    Plan plan(tensorrt_path, plugins_path, plan_path);
    auto& engine = plan.engine;
    std::unique_ptr<nvinfer1::IExecutionContext> context(engine->createExecutionContext());
    std::vector<DeviceMemory> memory;
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
            memory.push_back(allocate(bytes));
            context->setTensorAddress(name, memory.back().get());
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
        std::fprintf(stderr, "usage: %s TENSORRT_LIBRARY PLUGIN_LIBRARY[:ANOTHER] PLAN\n", argv[0]);
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

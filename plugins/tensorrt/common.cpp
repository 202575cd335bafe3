#include "common.h"

#include <cuda_runtime_api.h>

namespace twell {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

// Compute capability 8.0: the oldest with bf16 tensor cores and cp.async.
constexpr int32_t kOldestMajor = 8;

}  // namespace

std::string text_of(Dims const& dims) {
    std::string out = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        out += (i == 0 ? "" : ", ") + (dims.d[i] == kAny ? std::string("?") : std::to_string(dims.d[i]));
    }
    return out + "]";
}

char const* text_of(DataType type) {
    switch (type) {
        case DataType::kFLOAT:
            return "float32";
        case DataType::kHALF:
            return "fp16";
        case DataType::kBF16:
            return "bf16";
        case DataType::kINT8:
            return "int8";
        case DataType::kINT32:
            return "int32";
        case DataType::kINT64:
            return "int64";
        case DataType::kBOOL:
            return "bool";
        case DataType::kUINT8:
            return "uint8";
        case DataType::kFP8:
            return "fp8";
        default:
            return "another type";
    }
}

bool is_supported(DataType type) { return type == DataType::kBF16 || type == DataType::kHALF; }

nvinfer1::Dims known_dims(nvinfer1::DimsExprs const& expressions) {
    Dims dims{};
    dims.nbDims = expressions.nbDims;
    for (int32_t i = 0; i < expressions.nbDims; ++i) {
        dims.d[i] = expressions.d[i]->isConstant() ? expressions.d[i]->getConstantValue() : kAny;
    }
    return dims;
}

int32_t check_device() {
    int device = 0;
    int major = 0;
    int minor = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (status == cudaSuccess) {
        status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    }
    if (status != cudaSuccess) {
        throw Refusal(std::string("no usable GPU: ") + cudaGetErrorString(status));
    }
    if (major < kOldestMajor) {
        throw Refusal("GPU " + std::to_string(device) + " has compute capability " + std::to_string(major) + "." +
                      std::to_string(minor) + "; the kernels need 8.0 or newer");
    }
    return 10 * major + minor;
}

}  // namespace twell

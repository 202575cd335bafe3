#include "common.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "twell/twell.h"

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

bool may_be(InputType input, DataType type, DataType first) {
    switch (input) {
        case InputType::kInt32:
            return type == DataType::kINT32;
        case InputType::kInt64:
            return type == DataType::kINT64;
        case InputType::kIndex:
            return type == DataType::kINT32 || type == DataType::kINT64;
        case InputType::kFloat32:
            return type == DataType::kFLOAT;
        case InputType::kFp8:
            return type == DataType::kFP8 || type == DataType::kINT8;
        default:
            return is_supported(type) && type == first;
    }
}

char const* text_of(InputType type) {
    switch (type) {
        case InputType::kInt32:
            return text_of(DataType::kINT32);
        case InputType::kInt64:
            return text_of(DataType::kINT64);
        case InputType::kIndex:
            return "int32 or int64";
        case InputType::kFloat32:
            return text_of(DataType::kFLOAT);
        case InputType::kFp8:
            return "fp8, or int8 with its bytes";
        default:
            return "";
    }
}

Dims known_dims(nvinfer1::DimsExprs const& expressions) {
    Dims dims{};
    dims.nbDims = expressions.nbDims;
    for (int32_t i = 0; i < expressions.nbDims; ++i) {
        dims.d[i] = expressions.d[i]->isConstant() ? expressions.d[i]->getConstantValue() : kAny;
    }
    return dims;
}

Dims dims_of(std::initializer_list<int64_t> extents) {
    Dims dims{};
    dims.nbDims = static_cast<int32_t>(extents.size());
    std::copy(extents.begin(), extents.end(), dims.d);
    return dims;
}

int64_t scale_blocks(int64_t extent) {
    return extent == kAny ? kAny : (extent + TWELL_SCALE_BLOCK_SIZE - 1) / TWELL_SCALE_BLOCK_SIZE;
}

int64_t rows_of(Dims const& x) {
    int64_t rows = 1;
    for (int32_t i = 0; i < x.nbDims - 1; ++i) {
        if (x.d[i] != kAny && __builtin_mul_overflow(rows, x.d[i], &rows)) {
            rows = std::numeric_limits<int64_t>::max();
        }
    }
    return rows;
}

int32_t narrow(int64_t extent, int32_t placeholder) {
    constexpr int64_t kBeyondLimits = std::numeric_limits<int32_t>::max() / 8 * 8;
    return extent == kAny ? placeholder : static_cast<int32_t>(std::min(extent, kBeyondLimits));
}

bool may_equal(Dims const& dims, Dims const& expected) {
    return dims.nbDims == expected.nbDims &&
           std::equal(dims.d, dims.d + dims.nbDims, expected.d,
                      [](int64_t one, int64_t other) { return one == kAny || other == kAny || one == other; });
}

void check_input_count(std::vector<Input> const& inputs, int64_t count) {
    if (count != static_cast<int64_t>(inputs.size())) {
        std::string names;
        for (Input const& input : inputs) {
            names += (names.empty() ? ": " : ", ") + std::string(input.name);
        }
        throw Refusal("got " + std::to_string(count) + " inputs; expected " + std::to_string(inputs.size()) + names);
    }
}

void check_shape(char const* input, Dims const& dims, Dims const& expected, char const* meaning) {
    if (!may_equal(dims, expected)) {
        throw Refusal("input " + std::string(input) + " has shape " + text_of(dims) + "; expected " + meaning + " = " +
                      text_of(expected));
    }
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

void check_launch(cudaError_t status) {
    if (status == cudaSuccess) {
        return;
    }
    std::string message =
        std::string("the kernels failed: ") + cudaGetErrorName(status) + ", " + cudaGetErrorString(status);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
        message += ". This library was built without code for this GPU; rebuild it with TWELL_CUDA_ARCHS=all";
    }
    throw Refusal(message);
}

}  // namespace twell

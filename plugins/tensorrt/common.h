// Shared by all plugin classes: refusals, and the printing and checking of a host's arguments.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

#include "host.h"

namespace twell {

// Something that a user or a plan got wrong; what() is the whole message.
class Refusal : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// An extent that is not known before run time.
constexpr int64_t kAny = -1;

std::string text_of(nvinfer1::Dims const& dims);
char const* text_of(nvinfer1::DataType type);

// Whether the plugins take tensors of this type.
bool is_supported(nvinfer1::DataType type);

// Extents as they are known while a network is built; kAny for the others.
nvinfer1::Dims known_dims(nvinfer1::DimsExprs const& expressions);

// Which type an input of a plugin, or its outputs, have: the plugin's element type, or always the same one. kFp8 may
// also come as int8, byte by byte, since TensorRT has fp8 for GPUs of compute capability 8.9 or newer only. kIndex is
// int32 or int64.
enum class InputType { kElement, kInt32, kInt64, kIndex, kFloat32, kFp8 };

struct Input {
    char const* name;
    InputType type = InputType::kElement;
};

// Whether an input may be of `type` where the first one is of `first`.
bool may_be(InputType input, nvinfer1::DataType type, nvinfer1::DataType first);

// The name of an input's type; empty for the element type.
char const* text_of(InputType type);

// The shapes of a plugin's inputs, in order.
constexpr size_t kMostInputs = 14;
using Shapes = std::array<nvinfer1::Dims, kMostInputs>;

nvinfer1::Dims dims_of(std::initializer_list<int64_t> extents);

// Blocks of TWELL_SCALE_BLOCK along an extent; kAny of kAny.
int64_t scale_blocks(int64_t extent);

// The rows of x [..., columns]: extents that are not known count as 1, and extents beyond 64 bits as their largest
// number.
int64_t rows_of(nvinfer1::Dims const& x);

// An extent in 32 bits: a larger one is beyond every limit, too. `placeholder` is for one that is not known.
int32_t narrow(int64_t extent, int32_t placeholder);

// Whether two shapes may be the same; kAny is like any extent.
bool may_equal(nvinfer1::Dims const& dims, nvinfer1::Dims const& expected);

// Throws Refusal unless there are as many inputs as these.
void check_input_count(std::vector<Input> const& inputs, int64_t count);

// Throws Refusal unless the shape may be the expected one; `meaning` names the extents of that.
void check_shape(char const* input, nvinfer1::Dims const& dims, nvinfer1::Dims const& expected, char const* meaning);

// Throws Refusal unless the current GPU can run the plugins. Returns its compute capability, 90 for 9.0.
int32_t check_device();

// Throws Refusal if launching kernels failed.
void check_launch(cudaError_t status);

// Runs `body`. An exception becomes a message in the host's log and `failure`: none may reach the host.
template <typename Result, typename Body>
Result guarded(char const* plugin, char const* layer, Result failure, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        try {
            std::string const message = std::string(plugin) + " '" + layer + "': " + error.what();
            host::log(host::Severity::kError, message.c_str());
        } catch (...) {
            host::log(host::Severity::kError, error.what());
        }
    } catch (...) {
        host::log(host::Severity::kError, "unknown exception in a twell plugin");
    }
    return failure;
}

}  // namespace twell

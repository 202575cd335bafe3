// Queries about the device, and launches that may overlap the end of the kernel before.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <initializer_list>

#include "host/trace.h"
#include "twell/twell.h"

// Returns from the surrounding function if the call fails.
#define TWELL_TRY(...)                                                                   \
    do {                                                                                 \
        if (cudaError_t const failed_call = (__VA_ARGS__); failed_call != cudaSuccess) { \
            return failed_call;                                                          \
        }                                                                                \
    } while (false)

namespace twell {

inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
    for (cudaError_t const error : errors) {
        TWELL_TRY(error);
    }
    return cudaSuccess;
}

// Which kernels run, where there are several.
enum class Kernels : int32_t {
    kBest = 0,     // those that suit the device and the problem
    kGeneric = 1,  // the others are there to be tested and measured
    kSm90 = 2,     // cudaErrorNotSupported where they cannot run
};

struct Device {
    int major;
    int minor;
    int num_multiprocessors;
    int max_shared_bytes;  // of a block
    int l2_bytes;
    Text* trace = nullptr;  // where launches are written down, and not made
};

// A call, as all its launchers get it.
struct Call {
    twell_problem const& problem;
    twell_tensors const& tensors;
    Device const& device;
    cudaStream_t stream;
};

// Whether the library has kernels for compute capability 9.0 alone, and whether they run on a device. Where kHasSm90 is
// false, functions with _sm90 in their names do not exist: call them in `if constexpr (kHasSm90)`.
#if defined(TWELL_SM90A)
constexpr bool kHasSm90 = true;
#else
constexpr bool kHasSm90 = false;
#endif

inline bool is_sm90(Device const& device) { return kHasSm90 && device.major == 9 && device.minor == 0; }

// Attribute queries are cheap and allowed during stream capture.
inline cudaError_t query_device(Device& device) {
    int id = 0;
    TWELL_TRY(cudaGetDevice(&id));
    struct {
        int* value;
        cudaDeviceAttr attribute;
    } const queries[] = {{&device.major, cudaDevAttrComputeCapabilityMajor},
                         {&device.minor, cudaDevAttrComputeCapabilityMinor},
                         {&device.num_multiprocessors, cudaDevAttrMultiProcessorCount},
                         {&device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                         {&device.l2_bytes, cudaDevAttrL2CacheSize}};
    for (auto const& query : queries) {
        TWELL_TRY(cudaDeviceGetAttribute(query.value, query.attribute, id));
    }
    return cudaSuccess;
}

// Whether the code that the device runs waits in wait_for_previous_launch(). Code from PTX of an older architecture
// does not: on 10.0, for example, which has only that of compute_80. Static, as the list differs between source files.
static inline bool knows_dependent_launch(Device const& device) {
    constexpr int kFirst = 900;
    int const version = device.major * 100 + device.minor * 10;
    for (int const compiled : {__CUDA_ARCH_LIST__}) {
        if (compiled >= kFirst && compiled / 100 == device.major && compiled <= version) {
            return true;
        }
    }
    return false;
}

// Returns use(config) for the one of Configs for which is_chosen(config) holds.
template <class... Configs, class IsChosen, class Use>
cudaError_t with_config(IsChosen is_chosen, Use use) {
    cudaError_t result = cudaErrorInvalidConfiguration;
    ((is_chosen(Configs()) ? (result = use(Configs()), true) : false) || ...);
    return result;
}

// A launch in a line of words, after those of the launches before.
inline void write_launch(Text& text, Label const& name, Choice const& choice, dim3 grid, int threads,
                         int shared_bytes) {
    name.add_to(text);
    text.add(" | grid=%ux%u threads=%d shared=%d", grid.x, grid.y, threads, shared_bytes);
    if (choice.number.name != nullptr) {
        text.add(" %s=%lld", choice.number.name, static_cast<long long>(choice.number.value));
    }
    if (choice.most_used != 0) {
        text.add(" scratch=%lld/%lld", static_cast<long long>(choice.used), static_cast<long long>(choice.most_used));
    }
    text.add("\n");
}

// Launches a kernel that knows when to call wait_for_previous_launch (dependent_launch.cuh), mostly at once, so that
// its CTAs may be placed while the kernel before still runs.
//
// cluster: CTAs of one, from compute capability 9.0 on, unless the kernel says so itself.
// name, choice: for a trace.
// most_shared_bytes: of any launch of this kernel, if its launches differ. Launches by several threads set the same
// attribute, which must do for all of them.
template <class Params>
cudaError_t launch_dependent(Label const& name, void (*kernel)(Params), Params const& params, dim3 grid, int threads,
                             int shared_bytes, Device const& device, cudaStream_t stream, Choice const& choice = {},
                             int most_shared_bytes = 0, unsigned cluster = 0) {
    if (device.trace != nullptr) {
        write_launch(*device.trace, name, choice, grid, threads, shared_bytes);
        return cudaSuccess;
    }
    // Set at each launch, not once: the attribute belongs to the current device, and the call is cheap, idempotent,
    // thread-safe and allowed during stream capture.
    if (int const bytes = std::max(shared_bytes, most_shared_bytes); bytes != 0) {
        TWELL_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !knows_dependent_launch(device) ? 0 : cluster == 0 ? 1 : 2;
    return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace twell

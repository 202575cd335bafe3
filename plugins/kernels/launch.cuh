// What launchers ask of the device, and launches that may overlap the end of the kernel before.
#ifndef TWELL_KERNELS_LAUNCH_CUH_
#define TWELL_KERNELS_LAUNCH_CUH_

#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

namespace twell {

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
};

// Attribute queries are cheap and allowed during stream capture.
inline cudaError_t query_device(Device& device) {
    int id = 0;
    if (cudaError_t const error = cudaGetDevice(&id); error != cudaSuccess) {
        return error;
    }
    struct {
        int* value;
        cudaDeviceAttr attribute;
    } const queries[] = {{&device.major, cudaDevAttrComputeCapabilityMajor},
                         {&device.minor, cudaDevAttrComputeCapabilityMinor},
                         {&device.num_multiprocessors, cudaDevAttrMultiProcessorCount},
                         {&device.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                         {&device.l2_bytes, cudaDevAttrL2CacheSize}};
    for (auto const& query : queries) {
        if (cudaError_t const error = cudaDeviceGetAttribute(query.value, query.attribute, id); error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

// Launches a kernel that begins with wait_for_previous_launch (dependent_launch.cuh), so that its CTAs may be placed
// while the kernel before still runs.
//
// most_shared_bytes: of any launch of this kernel, if its launches differ. Launches by several threads set the same
// attribute, which must do for all of them.
template <class Params>
cudaError_t launch_dependent(void (*kernel)(Params), Params const& params, dim3 grid, int threads, int shared_bytes,
                             Device const& device, cudaStream_t stream, int most_shared_bytes = 0) {
    // Set at each launch, not once: the attribute belongs to the current device, and the call is cheap, idempotent,
    // thread-safe and allowed during stream capture.
    if (cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       std::max(shared_bytes, most_shared_bytes));
        error != cudaSuccess) {
        return error;
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = device.major >= 9 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace twell

#endif  // TWELL_KERNELS_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "gate.h"
#include "gate_generic.cuh"
#include "launch.cuh"
#include "problem.cuh"
#if defined(TWELL_SM90A)
#include "gate_sm90.h"
#endif

namespace twell {
namespace {

namespace generic = gate_generic;

// 64 x 64 a warp: the most reuse per fragment that the registers allow.
using ConfigLarge = generic::Config<128, 2, 4, 4>;
// Half as many rows: where large blocks would be half empty or leave multiprocessors idle.
using ConfigMedium = generic::Config<64, 2, 4, 4>;
// Up to 16 rows the weights' way through memory decides: a fifth stage keeps more bytes in flight.
using ConfigSmall = generic::Config<16, 1, 8, 5>;

template <class Cfg>
int64_t num_blocks(generic::Params const& params) {
    return (params.tokens + Cfg::BLOCK_M - 1) / Cfg::BLOCK_M * params.num_tiles;
}

template <class Element, class Cfg>
cudaError_t launch_config(generic::Params const& params, cudaStream_t stream) {
    auto* const kernel = generic::gate_kernel<Element, Cfg>;
    // Set at each launch, not once: the attribute belongs to the current device, and the call is cheap, idempotent,
    // thread-safe and allowed during stream capture.
    if (cudaError_t const error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSharedBytes);
        error != cudaSuccess) {
        return error;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(num_blocks<Cfg>(params)));
    config.blockDim = dim3(Cfg::kThreads);
    config.dynamicSmemBytes = Cfg::kSharedBytes;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, params);
}

template <class Element>
cudaError_t launch_generic(generic::Params const& params, int num_multiprocessors, cudaStream_t stream) {
    if (params.tokens <= ConfigSmall::BLOCK_M) {
        return launch_config<Element, ConfigSmall>(params, stream);
    }
    if (num_blocks<ConfigLarge>(params) < num_multiprocessors) {
        return launch_config<Element, ConfigMedium>(params, stream);
    }
    return launch_config<Element, ConfigLarge>(params, stream);
}

#if defined(TWELL_SM90A)
// From this many rows on the Hopper kernel is the faster one: below, the generic kernel has a configuration for few
// rows.
constexpr int64_t kFewestTokensSm90 = ConfigSmall::BLOCK_M + 1;

bool can_run_sm90(twell_problem const& problem, Device const& device) {
    return device.major == 9 && device.minor == 0 && gate_sm90_supports(problem);
}
#endif

}  // namespace

cudaError_t launch_gate(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, uint16_t* spilled,
                        cudaStream_t stream, Kernels choice) {
    Device device = {};
    if (cudaError_t const error = query_device(device); error != cudaSuccess) {
        return error;
    }
#if defined(TWELL_SM90A)
    if (can_run_sm90(problem, device) &&
        (choice == Kernels::kSm90 || (choice == Kernels::kBest && problem.tokens >= kFewestTokensSm90))) {
        return launch_gate_sm90(problem, tensors, packed, spilled, device, stream);
    }
#endif
    if (choice == Kernels::kSm90) {
        return cudaErrorNotSupported;
    }
    generic::Params params = {};
    params.x = static_cast<uint16_t const*>(tensors.x);
    params.w_gate = static_cast<uint16_t const*>(tensors.w_gate);
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.packed = packed;
    params.spilled = spilled;
    params.tokens = problem.tokens;
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    params.act = activation_of(problem);
    return problem.dtype == TWELL_BF16 ? launch_generic<Bf16>(params, device.num_multiprocessors, stream)
                                       : launch_generic<Fp16>(params, device.num_multiprocessors, stream);
}

}  // namespace twell

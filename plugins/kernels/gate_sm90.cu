#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "gate_sm90.cuh"
#include "gate_sm90.h"
#include "problem.cuh"

namespace twell {
namespace {

namespace sm90 = gate_sm90;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: this library does not link against the driver.
EncodeTiled find_encode_tiled() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                         : nullptr;
}

// Describes a matrix [rows, columns] of 16-bit elements, which TMA reads in boxes of [box_rows, BLOCK_K].
cudaError_t encode(CUtensorMap& map, void const* matrix, int64_t rows, int columns, int box_rows, int32_t dtype) {
    static EncodeTiled const encode_tiled = find_encode_tiled();
    if (encode_tiled == nullptr) {
        return cudaErrorSymbolNotFound;
    }
    cuuint64_t const extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    cuuint64_t const strides[1] = {static_cast<cuuint64_t>(columns) * 2};
    cuuint32_t const box[2] = {sm90::BLOCK_K, static_cast<cuuint32_t>(box_rows)};
    cuuint32_t const steps[2] = {1, 1};
    static_assert(sm90::BLOCK_K * 2 == 128, "a box's row is as long as the swizzle pattern");
    CUresult const result =
        encode_tiled(&map, dtype == TWELL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                     const_cast<void*>(matrix), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// What one launch needs beside the problem.
struct Launch {
    twell_problem const& problem;
    twell_tensors const& tensors;
    uint32_t* packed;
    int clusters;  // that the device holds
    cudaStream_t stream;
};

int64_t num_blocks(twell_problem const& problem, int tokens_per_block) {
    return (problem.tokens + tokens_per_block - 1) / tokens_per_block;
}

template <class Element, class Cfg>
cudaError_t launch_config(Launch const& launch) {
    twell_problem const& problem = launch.problem;
    sm90::Params params = {};
    if (cudaError_t const error =
            encode(params.x, launch.tensors.x, problem.tokens, problem.d_model, Cfg::kRowsLoaded, problem.dtype);
        error != cudaSuccess) {
        return error;
    }
    if (cudaError_t const error =
            encode(params.w_gate, launch.tensors.w_gate, problem.d_ff, problem.d_model, sm90::BLOCK_M, problem.dtype);
        error != cudaSuccess) {
        return error;
    }
    params.b_gate = static_cast<uint16_t const*>(launch.tensors.b_gate);
    params.packed = launch.packed;
    params.tokens = problem.tokens;
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.num_tiles = num_tiles(problem);
    params.num_blocks = static_cast<int>(num_blocks(problem, Cfg::BLOCK_N));
    params.words_per_tile = words_per_tile(problem);
    params.act = activation_of(problem);

    auto* const kernel = sm90::gate_kernel<Element, Cfg>;
    // Set at each launch: see gate.cu.
    if (cudaError_t const error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Cfg::kSharedBytes);
        error != cudaSuccess) {
        return error;
    }
    int const clusters = std::min(launch.clusters, params.num_blocks * params.num_tiles);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(clusters * sm90::kClusterSize));
    config.blockDim = dim3(sm90::kThreads);
    config.dynamicSmemBytes = Cfg::kSharedBytes;
    config.stream = launch.stream;
    return cudaLaunchKernelEx(&config, kernel, params);
}

// Tokens a block may have. Large blocks read the weights less often; the right one fills the last round.
template <int... kTokens>
struct Choices {};
using AllChoices = Choices<64, 88, 120, 152, 176, 208, 232, 256>;

// Clusters work in rounds. A round takes as long as its blocks have tokens and so much longer, for a tile's start and
// end and for the weights, which come anew for each block. Measured with d_model 2048 and d_ff 5632: see
// benchmarks/README.md.
constexpr int kTokensOfOverhead = 60;

template <int... kTokens>
int choose(Launch const& launch, Choices<kTokens...>) {
    int best = 0;
    int64_t best_cost = INT64_MAX;
    for (int const tokens : {kTokens...}) {
        int64_t const tiles = num_blocks(launch.problem, tokens) * num_tiles(launch.problem);
        int64_t const cost = (tiles + launch.clusters - 1) / launch.clusters * (tokens + kTokensOfOverhead);
        if (cost <= best_cost) {
            best = tokens;
            best_cost = cost;
        }
    }
    return best;
}

template <class Element, int... kTokens>
cudaError_t launch_choice(Launch const& launch, int tokens, Choices<kTokens...>) {
    cudaError_t result = cudaErrorInvalidValue;
    (void)((tokens == kTokens && (result = launch_config<Element, sm90::Config<kTokens>>(launch), true)) || ...);
    return result;
}

}  // namespace

bool gate_sm90_supports(twell_problem const& problem) { return problem.d_model % sm90::kDivisorOfK == 0; }

cudaError_t launch_gate_sm90(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed,
                             int num_multiprocessors, cudaStream_t stream) {
    Launch const launch = {problem, tensors, packed, num_multiprocessors / sm90::kClusterSize, stream};
    int const tokens = choose(launch, AllChoices{});
    return problem.dtype == TWELL_BF16 ? launch_choice<Bf16>(launch, tokens, AllChoices{})
                                       : launch_choice<Fp16>(launch, tokens, AllChoices{});
}

}  // namespace twell

// Host side of matmul_sm90.cuh: tensor maps and the choice of a configuration.
#ifndef TWELL_KERNELS_MATMUL_SM90_H_
#define TWELL_KERNELS_MATMUL_SM90_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "matmul_sm90.cuh"

namespace twell::matmul_sm90 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: this library does not link against the driver.
inline EncodeTiled find_encode_tiled() {
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

// Describes a matrix [rows, columns] of 16-bit elements, whose rows begin `stride` elements apart and which TMA moves
// in boxes of [box_rows, kRowElements].
inline cudaError_t encode(CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns, int64_t stride,
                          int box_rows, int32_t dtype) {
    static EncodeTiled const encode_tiled = find_encode_tiled();
    if (encode_tiled == nullptr) {
        return cudaErrorSymbolNotFound;
    }
    cuuint64_t const extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    cuuint64_t const strides[1] = {static_cast<cuuint64_t>(stride) * 2};
    cuuint32_t const box[2] = {kRowElements, static_cast<cuuint32_t>(box_rows)};
    cuuint32_t const steps[2] = {1, 1};
    static_assert(kBytesRow == 128, "a box's row is as long as the swizzle pattern");
    CUresult const result =
        encode_tiled(&map, dtype == TWELL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                     const_cast<void*>(matrix), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t encode(CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns, int box_rows,
                          int32_t dtype) {
    return encode(map, matrix, rows, columns, columns, box_rows, dtype);
}

// Tokens a block may have. Large blocks read the weights less often; the right one fills the last round.
template <int... kTokens>
struct Choices {};
using AllChoices = Choices<48, 64, 80, 96, 112, 128, 144, 160, 176, 208, 232, 256>;

inline int64_t num_blocks(int64_t tokens, int tokens_per_block) {
    return (tokens + tokens_per_block - 1) / tokens_per_block;
}

// Clusters work in rounds, one tile each. A slice takes as long as the tensor cores need for it, or as its bytes need
// to come in, and a round so much longer, for a tile's start and end. Measured on an H200, see benchmarks/README.md.
constexpr int kBytesPerCycle = 64;
constexpr int kCyclesOfOverhead = 4000;

// Cycles of a round of tiles, with so many weight matrices at once.
constexpr int64_t round_cycles(int tokens, int num_slices, int products) {
    constexpr int kTokenCycles = 2 * WGMMA_M * BLOCK_K / 2048;  // of each slice, by both consumers
    int const bytes = (products * BLOCK_M + tokens) * kBytesRow;
    return static_cast<int64_t>(num_slices) * std::max(tokens * products * kTokenCycles, bytes / kBytesPerCycle) +
           kCyclesOfOverhead;
}

template <int... kTokens>
int choose(int64_t tokens, int num_tiles, int num_slices, int products, int clusters, Choices<kTokens...>) {
    int best = 0;
    int64_t best_cost = INT64_MAX;
    for (int const choice : {kTokens...}) {
        int64_t const tiles = num_blocks(tokens, choice) * num_tiles;
        int64_t const cost = (tiles + clusters - 1) / clusters * round_cycles(choice, num_slices, products);
        if (cost <= best_cost) {
            best = choice;
            best_cost = cost;
        }
    }
    return best;
}

// Calls launch(std::integral_constant<int, tokens>()) for one of the choices.
template <class Launch, int... kTokens>
cudaError_t with_config(int tokens, Choices<kTokens...>, Launch launch) {
    cudaError_t result = cudaErrorInvalidValue;
    (void)((tokens == kTokens && (result = launch(std::integral_constant<int, kTokens>()), true)) || ...);
    return result;
}

inline cudaError_t first_error(std::initializer_list<cudaError_t> errors) {
    for (cudaError_t const error : errors) {
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

}  // namespace twell::matmul_sm90

#endif  // TWELL_KERNELS_MATMUL_SM90_H_

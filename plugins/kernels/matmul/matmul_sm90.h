// Host side of matmul_sm90.cuh: tensor maps and the kernel of a configuration.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "host/launch.h"
#include "host/problem.h"
#include "matmul/matmul_sm90.cuh"
#include "matmul/tiling_sm90.h"

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

// Matrices [count, rows, columns] of 16-bit elements; rows begin `row_stride` elements apart, matrices `stride`.
struct Matrices {
    void const* values;
    int64_t count;
    int64_t rows;
    int64_t columns;
    int64_t row_stride;
    int64_t stride;
};

// Describes matrices that TMA moves in boxes of [box_rows, kRowElements] of one.
// dimensions: 3, or 2 of a single matrix.
inline cudaError_t encode(Device const& device, CUtensorMap& map, Matrices const& matrices, int dimensions,
                          int box_rows, int32_t dtype) {
    if (device.trace != nullptr) {
        return cudaSuccess;  // a trace has no matrix
    }
    static EncodeTiled const encode_tiled = find_encode_tiled();
    if (encode_tiled == nullptr) {
        return cudaErrorSymbolNotFound;
    }
    cuuint64_t const extents[3] = {static_cast<cuuint64_t>(matrices.columns), static_cast<cuuint64_t>(matrices.rows),
                                   static_cast<cuuint64_t>(matrices.count)};
    cuuint64_t const strides[2] = {static_cast<cuuint64_t>(matrices.row_stride) * 2,
                                   static_cast<cuuint64_t>(matrices.stride) * 2};
    cuuint32_t const box[3] = {kRowElements, static_cast<cuuint32_t>(box_rows), 1};
    cuuint32_t const steps[3] = {1, 1, 1};
    static_assert(kBytesRow == 128, "a box's row is as long as the swizzle pattern");
    CUresult const result =
        encode_tiled(&map, dtype == TWELL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                     static_cast<cuuint32_t>(dimensions), const_cast<void*>(matrices.values), extents, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The same of one matrix.
inline cudaError_t encode(Device const& device, CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns,
                          int64_t stride, int box_rows, int32_t dtype) {
    return encode(device, map, {matrix, 1, rows, columns, stride, 0}, 2, box_rows, dtype);
}

inline cudaError_t encode(Device const& device, CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns,
                          int box_rows, int32_t dtype) {
    return encode(device, map, matrix, rows, columns, columns, box_rows, dtype);
}

// Describes scales [rows, tokens], whose rows begin `stride` apart, a multiple of 4, and which TMA moves in boxes of
// [1, box_tokens].
inline cudaError_t encode_scales(Device const& device, CUtensorMap& map, float const* scales, int64_t rows,
                                 int64_t tokens, int64_t stride, int box_tokens) {
    if (device.trace != nullptr) {
        return cudaSuccess;  // there are no scales
    }
    static EncodeTiled const encode_tiled = find_encode_tiled();
    if (encode_tiled == nullptr) {
        return cudaErrorSymbolNotFound;
    }
    cuuint64_t const extents[2] = {static_cast<cuuint64_t>(tokens), static_cast<cuuint64_t>(rows)};
    cuuint64_t const strides[1] = {static_cast<cuuint64_t>(stride) * sizeof(float)};
    cuuint32_t const box[2] = {static_cast<cuuint32_t>(box_tokens), 1};
    cuuint32_t const steps[2] = {1, 1};
    CUresult const result = encode_tiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(scales), extents,
                                         strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                         CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A kernel with several configurations, as the host sees it.
template <class Params>
struct Kernel {
    void (*function)(Params) = nullptr;
    int rows_loaded = 0;  // see Config
    int weight_rows_loaded = 0;
    int shared_bytes = 0;

    template <class Cfg>
    static Kernel of(void (*function)(Params)) {
        return {function, Cfg::kRowsLoaded, Cfg::kWeightRowsLoaded, Cfg::kSharedBytes};
    }
};

// Calls use(block, layout) for each of the tilings, as types std::integral_constant.
template <class Use, int... kShared, int... kOwn, int... kTall>
void for_each(Tilings<Choices<kShared...>, Choices<kOwn...>, Choices<kTall...>>, Use use) {
    (use(std::integral_constant<int, kShared>(), std::integral_constant<Layout, Layout::kSharesTokens>()), ...);
    (use(std::integral_constant<int, kOwn>(), std::integral_constant<Layout, Layout::kSharesWeights>()), ...);
    (use(std::integral_constant<int, kTall>(), std::integral_constant<Layout, Layout::kTall>()), ...);
}

// The tiling's kernel: that of give(block, layout) for its block and layout.
template <class Params, class Give, class Tilings>
Kernel<Params> find_kernel(Tiling const& tiling, Tilings tilings, Give give) {
    Kernel<Params> result;
    for_each(tilings, [&](auto block, auto layout) {
        if (tiling.block == block && tiling.layout == layout) {
            result = give(block, layout);
        }
    });
    return result;
}

// A kernel's row: what the CTAs of a cluster share, and the extent that its tilings choose.
inline Label label_of(char const* name, int block, Layout layout) {
    return {name,
            {{layout == Layout::kSharesTokens    ? "shared_tokens"
              : layout == Layout::kSharesWeights ? "own_tokens"
                                                 : "neurons",
              block}}};
}

template <class Tilings>
void list(Text& text, char const* name, Tilings tilings) {
    for_each(tilings, [&](auto block, auto layout) { add_line(text, label_of(name, block, layout)); });
}

}  // namespace twell::matmul_sm90

// FP8 weights, times their scales, in 16 bits.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"

namespace twell::widen {

constexpr int kThreads = 256;
constexpr int kMatrices = 3;

struct Matrix {
    E4m3 const* from;    // [rows, columns]
    uint16_t* to;        // the same
    float const* scale;  // of row r and column c at (r >> shift) * row_step + (c >> shift) * column_step
    int64_t vectors;     // rows * columns / kVector
    int columns;
    int row_step;
    int column_step;
    int shift;
};

struct Params {
    Matrix matrices[kMatrices];
    uint32_t const* needed;  // 0: nothing is to be done; final before this launch may start; or null
};

// NOTE: if weights are written, the next kernel may start when all CTAs have left, not before: it may read them through
// a cache that keeps what was there when it started.
template <class Element>
__global__ void __launch_bounds__(kThreads) widen_kernel(Params const params) {
    if (params.needed != nullptr && __ldcg(params.needed) == 0) {
        allow_dependent_launch();
        if (!ends_early(true)) {
            wait_for_previous_launch();
        }
        return;
    }
    wait_for_previous_launch();
    for (int m = 0; m < kMatrices; ++m) {
        Matrix const& matrix = params.matrices[m];
        int64_t const step = int64_t{gridDim.x} * kThreads;
        for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < matrix.vectors; i += step) {
            int const of_row = matrix.columns / kVector;
            int64_t const row = i / of_row;
            int const column = static_cast<int>(i - row * of_row) * kVector;
            float const* const scale = matrix.scale + (row >> matrix.shift) * matrix.row_step;
            float values[kVector];
            unpack<Element>(values, load_vector(matrix.from + i * kVector));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                values[k] *= scale[((column + k) >> matrix.shift) * matrix.column_step];
            }
            store_vector<Element>(matrix.to + i * kVector, values);
        }
    }
}

}  // namespace twell::widen

// Rows of several matrices that are brought together, or put back, in one launch: of the hot neurons, whose products
// want them one after the other, and of the others for the gate.
#pragma once

#include "device/dependent_launch.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kMostCopies = 4;

struct Copy {
    uint16_t const* from;
    uint16_t* to;
    int32_t const* from_rows;  // [rows] or null: row i
    int32_t const* to_rows;    // likewise
    int rows;
    int width;  // a multiple of kVector
};

struct CopyRowsParams {
    Copy copies[kMostCopies];
};

static __global__ __launch_bounds__(kThreads) void copy_rows_kernel(__grid_constant__ CopyRowsParams const params) {
    wait_for_previous_launch();
    Copy const& copy = params.copies[blockIdx.y];
    int const row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
    if (row >= copy.rows) {
        return;
    }
    int const lane = threadIdx.x % kWarpSize;
    auto const row_of = [row](int32_t const* rows) { return int64_t{rows == nullptr ? row : rows[row]}; };
    uint16_t const* const from = copy.from + row_of(copy.from_rows) * copy.width;
    uint16_t* const to = copy.to + row_of(copy.to_rows) * copy.width;
#pragma unroll 4
    for (int column = lane * kVector; column < copy.width; column += kWarpColumns) {
        *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<uint4 const*>(from + column);
    }
}

}  // namespace twell::training

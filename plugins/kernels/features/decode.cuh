// y of lists of features: sums of the rows of w_down that they name, each times its value, for every GPU from sm_80 on.
//
// A warp has kWarpColumns columns, a vector a lane. Some warps of a CTA share the list of a row; the first one adds up
// what they have, in their order. All rows of one slice of columns come before those of the next, so that the L2 cache
// holds rows that are read again. The order of a sum follows from the list's length: results are bitwise repeatable.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/epilogue.cuh"
#include "device/vector.cuh"

namespace twell::features {

constexpr int kDecodeWarps = 8;
// A multiprocessor's: the kernel is bound by loads in flight. On 12.0 registers would be spilled with three.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kDecodeBlocks = 2;
#else
constexpr int kDecodeBlocks = 3;
#endif
constexpr int kRowsAtOnce = 8;  // of w_down, whose loads are issued together

struct DecodeParams : BlockTensors {
    int32_t const* indices;
    uint16_t const* values;
    int64_t const* offsets;  // [tokens + 1]: a row's list is from its offset up to the next one's; or null:
    uint32_t const* counts;  // [tokens]: its length, from row * stride on; or null: that is `stride`
    int64_t stride;
    int64_t capacity;  // entries that there are: a row whose list ends behind them becomes NaN
    // In the place of y, which the last of several calls computes: what others have added up, and where it goes.
    float const* sums_before;  // [tokens, d_out] or null
    float* sums_after;         // the same
    int64_t tokens;
    int num_slices;
    int warps_of_row;  // 1 to kDecodeWarps, a power of two
};

// sums += values[i] * w_down[indices[i], columns] for the entries of kWarpSize lanes, `count` of them. A value of 0
// adds nothing, with any index and weights; else an index out of range makes the row NaN.
template <class Element>
__device__ __forceinline__ void add_entries(float (&sums)[kVector], DecodeParams const& params, uint16_t const* w_down,
                                            int32_t index, uint16_t value, int count) {
    bool const is_valid = static_cast<uint32_t>(index) < static_cast<uint32_t>(params.d_ff);
    float const factor = is_valid || (value & 0x7fffu) == 0 ? Element::to_float(value) : NAN;
    int32_t const neuron = is_valid ? index : 0;
    for (int begin = 0; begin < count; begin += kRowsAtOnce) {
        uint4 vectors[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            int64_t const n = __shfl_sync(0xffffffffu, neuron, min(begin + r, count - 1));
            vectors[r] = load_vector(w_down + n * params.d_out);
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            float const h = __shfl_sync(0xffffffffu, factor, min(begin + r, count - 1));
            float weights[kVector];
            unpack<Element>(weights, vectors[r]);
            bool const adds = begin + r < count && h != 0.0f;
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sums[k] = adds ? fmaf(h, weights[k], sums[k]) : sums[k];
            }
        }
    }
}

template <class Element>
__global__ void __launch_bounds__(kDecodeWarps* kWarpSize, kDecodeBlocks) decode_kernel(DecodeParams const params) {
    __shared__ float partial[kDecodeWarps][kVector][kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int const share = warp % params.warps_of_row;
    int64_t const item =
        static_cast<int64_t>(blockIdx.x) * (kDecodeWarps / params.warps_of_row) + warp / params.warps_of_row;
    int64_t const row = item % params.tokens;
    int const column = static_cast<int>(item / params.tokens) * kWarpColumns + lane * kVector;
    bool const exists = item < params.tokens * params.num_slices;
    float sums[kVector] = {};
    bool is_cut = false;
    if (exists) {
        int64_t const begin = params.offsets == nullptr ? row * params.stride : params.offsets[row];
        int64_t const count = params.offsets != nullptr  ? params.offsets[row + 1] - begin
                              : params.counts != nullptr ? params.counts[row]
                                                         : params.stride;
        is_cut = begin + count > params.capacity;
        // Lanes past the last column read the last vector and store nothing.
        uint16_t const* const w_down = params.w_down + min(column, params.d_out - kVector);
        for (int64_t i = share * kWarpSize; i < count && !is_cut; i += params.warps_of_row * kWarpSize) {
            int const listed = static_cast<int>(min(count - i, int64_t{kWarpSize}));
            int64_t const place = begin + i + min(lane, listed - 1);
            add_entries<Element>(sums, params, w_down, params.indices[place], params.values[place], listed);
        }
    }
    if (params.warps_of_row > 1) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            partial[warp][k][lane] = sums[k];
        }
        __syncthreads();
        for (int w = 1; share == 0 && w < params.warps_of_row; ++w) {
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sums[k] += partial[warp + w][k][lane];
            }
        }
    }
    if (!exists || share != 0 || column >= params.d_out) {
        return;
    }
    int64_t const place = row * params.d_out + column;
    if (is_cut) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            sums[k] = NAN;
        }
    }
    if (params.sums_before != nullptr) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            sums[k] += params.sums_before[place + k];
        }
    }
    if (params.sums_after != nullptr) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            params.sums_after[place + k] = sums[k];
        }
        return;
    }
    add_bias_and_residual<Element>(sums, params, row, column);
    store_vector<Element>(params.y + place, sums);
}

}  // namespace twell::features

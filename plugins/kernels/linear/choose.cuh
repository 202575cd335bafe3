// The largest element of each row of a linear layer's result, as torch.argmax finds it: of equals the first one, and
// the first NaN where there is one.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/vector.cuh"

namespace twell::linear_choose {

constexpr int kThreads = 512;
constexpr int kMostKeys = 256;  // of a row: one for each of so many CTAs of linear_few

// The larger key is the better choice; 0 is none. Its upper half orders elements, its lower one indices.
__device__ __forceinline__ uint64_t key_of(float rounded, int index) {
    float const value = rounded + 0.0f;  // -0 is 0
    uint32_t const bits = __float_as_uint(value);
    uint32_t const order = isnan(value) ? ~0u : bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(order) << 32 | ~static_cast<uint32_t>(index);
}

// By the first kLanes lanes and each kLanes after them: the largest of their keys, which each of them gets.
template <int kLanes = kWarpSize>
__device__ __forceinline__ uint64_t largest_of_lanes(uint64_t key) {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        key = max(key, __shfl_xor_sync(0xffffffffu, key, distance));
    }
    return key;
}

struct Params {
    uint64_t const* keys;  // [rows, kMostKeys], the first `keys_of_row` of each; or null: elements are read
    uint16_t const* y;     // [rows, out]
    int64_t* chosen;       // [rows]
    int keys_of_row;
    int out;
};

// A CTA has a row.
template <class Element>
__global__ void __launch_bounds__(kThreads) choose_kernel(Params const params) {
    __shared__ uint64_t of_warps[kThreads / kWarpSize];
    int const thread = static_cast<int>(threadIdx.x);
    wait_for_previous_launch();
    allow_dependent_launch();
    uint64_t key = 0;
    if (params.keys != nullptr) {
        static_assert(kMostKeys <= kThreads, "each has a thread");
        if (thread < params.keys_of_row) {
            key = params.keys[int64_t{blockIdx.x} * kMostKeys + thread];
        }
    } else {
        uint16_t const* const row = params.y + int64_t{blockIdx.x} * params.out;
#pragma unroll 4
        for (int v = thread; v < params.out / kVector; v += kThreads) {
            float values[kVector];
            unpack<Element>(values, load_written_vector(row + int64_t{v} * kVector));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                key = max(key, key_of(values[k], v * kVector + k));
            }
        }
    }
    key = largest_of_lanes(key);
    if (thread % kWarpSize == 0) {
        of_warps[thread / kWarpSize] = key;
    }
    __syncthreads();
    if (thread < kWarpSize) {
        key = largest_of_lanes(thread < kThreads / kWarpSize ? of_warps[thread] : 0);
        if (thread == 0) {
            params.chosen[blockIdx.x] = ~static_cast<uint32_t>(key);
        }
    }
}

}  // namespace twell::linear_choose

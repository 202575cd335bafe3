// Rows of x in FP8, each with a scale.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"

namespace twell::quantise {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kLargest = 448.0f;

// A row's largest magnitude becomes E4M3's largest number. A row of zeros, or nearly, has a scale, too.
__device__ __forceinline__ float scale_of(float most) { return fmaxf(most / kLargest, 1e-30f); }

template <class Element>
__device__ __forceinline__ float largest_of(float most, uint4 vector) {
    float values[kVector];
    unpack<Element>(values, vector);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        most = fmaxf(most, fabsf(values[k]));  // of a NaN the other one
    }
    return most;
}

// The largest number of a CTA's threads, none below 0; each warp has a place in `largest`.
template <int kWarpsOfCta>
__device__ __forceinline__ float largest_of_cta(float most, float (&largest)[kWarpsOfCta]) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
    }
    if (threadIdx.x % kWarpSize == 0) {
        largest[threadIdx.x / kWarpSize] = most;
    }
    __syncthreads();
    most = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarpsOfCta; ++w) {
        most = fmaxf(most, largest[w]);
    }
    return most;
}

template <class Element>
__device__ __forceinline__ void round_vector(uint8_t* place, uint4 vector, float inverse) {
    float values[kVector];
    unpack<Element>(values, vector);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        values[k] *= inverse;
    }
    *reinterpret_cast<uint2*>(place) = make_uint2(to_e4m3(values[0], values[1], values[2], values[3]),
                                                  to_e4m3(values[4], values[5], values[6], values[7]));
}

struct Params {
    uint16_t const* x;  // [tokens, d_model]
    uint8_t* rounded;   // the same
    float* scale;       // [tokens]
    int64_t tokens;
    int d_model;
};

// A CTA has a row. NOTE: a NaN in x stays one; an infinity makes the whole row NaN or 0, and itself NaN, since the
// scale is infinite.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantise_kernel(Params const params) {
    __shared__ float largest[kWarps];
    wait_for_previous_launch();
    allow_dependent_launch();
    int64_t const begin = int64_t{blockIdx.x} * params.d_model;
    constexpr int kStep = kThreads * kVector;
    constexpr int kKept = 4;  // vectors that stay in registers
    uint4 kept[kKept];
    float most = 0.0f;
    int const first = static_cast<int>(threadIdx.x) * kVector;
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        int const column = first + i * kStep;
        kept[i] = load_written_vector_if(params.x + begin + column, column < params.d_model);
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        most = largest_of<Element>(most, kept[i]);
    }
    for (int column = first + kKept * kStep; column < params.d_model; column += kStep) {
        most = largest_of<Element>(most, load_written_vector(params.x + begin + column));
    }
    float const scale = scale_of(largest_of_cta(most, largest));
    float const inverse = 1.0f / scale;
    if (threadIdx.x == 0) {
        params.scale[blockIdx.x] = scale;
    }
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        int const column = first + i * kStep;
        if (column < params.d_model) {
            round_vector<Element>(params.rounded + begin + column, kept[i], inverse);
        }
    }
    for (int column = first + kKept * kStep; column < params.d_model; column += kStep) {
        round_vector<Element>(params.rounded + begin + column, load_written_vector(params.x + begin + column), inverse);
    }
}

}  // namespace twell::quantise

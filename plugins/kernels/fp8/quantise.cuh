// Rows of x in FP8, each with a scale.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/norm.cuh"
#include "device/vector.cuh"

namespace twell::quantise {

constexpr int kThreads = 256;
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
    uint16_t const* x;  // [tokens, columns]
    norm::Norm norm;
    int columns;
    bool in_shared;         // a row fits there; else it is read again, and has no norm
    uint8_t* rounded;       // [tokens, columns]
    float* scale;           // [tokens]
    float const* repeated;  // 1: a scale of weights, for products that take one for each output
    float* repeats;         // [num_repeats]: it
    int num_repeats;
};

// Normalises rows and rounds them. A CTA has a row. NOTE: a NaN in x stays one; an infinity makes the whole row NaN or
// 0, and itself NaN, since the scale is infinite.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantise_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float sums[2][kWarps];
    __shared__ float largest[kWarps];
    wait_for_previous_launch();
    allow_dependent_launch();
    int64_t const begin = int64_t{blockIdx.x} * params.columns;
    int const vectors = params.columns / kVector;
    int const first = static_cast<int>(threadIdx.x);
    auto* const row = reinterpret_cast<uint4*>(shared);
    norm::Moments moments = {};
    if (params.in_shared) {
        norm::SumOfRow<kThreads> sum_of_row = {sums};
        moments = norm::copy_row<Element>(reinterpret_cast<uint16_t*>(shared), params.x + begin, params.norm, vectors,
                                          first, kThreads, sum_of_row);
    }
    auto const load = [&](int v) {
        return params.in_shared ? row[v] : load_written_vector(params.x + begin + int64_t{v} * kVector);
    };
    float most = 0.0f;
#pragma unroll 2
    for (int v = first; v < vectors; v += kThreads) {
        uint4 vector = load(v);
        if (params.norm.kind != TWELL_NORM_NONE) {
            vector = norm::normalise<Element>(vector, params.norm, norm::load_norm(params.norm, v, vectors), moments);
            row[v] = vector;
        }
        most = largest_of<Element>(most, vector);
    }
    float const scale = scale_of(largest_of_cta(most, largest));
    float const inverse = 1.0f / scale;
    for (int v = first; v < vectors; v += kThreads) {
        round_vector<Element>(params.rounded + begin + int64_t{v} * kVector, load(v), inverse);
    }
    if (first == 0) {
        params.scale[blockIdx.x] = scale;
    }
    int const step = static_cast<int>(gridDim.x) * kThreads;
    for (int i = static_cast<int>(blockIdx.x) * kThreads + first; i < params.num_repeats; i += step) {
        params.repeats[i] = *params.repeated;
    }
}

}  // namespace twell::quantise

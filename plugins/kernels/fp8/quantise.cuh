// Rows of x in FP8, each with a scale.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/norm.cuh"
#include "device/vector.cuh"
#include "fp8/fp8.h"

namespace twell::quantise {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr float kLargest = 448.0f;
constexpr int kGroup = TWELL_SCALE_BLOCK_SIZE;
constexpr int kLanesOfGroup = kGroup / kVector;

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
    uint8_t* rounded;  // [tokens, columns]
    float* scale;      // [tokens]; by_group [columns / kGroup, tokens]
    bool by_group;     // each kGroup columns of a row have a scale; `columns` is a multiple
    CopiedScales copied;
};

// Normalises rows and rounds them. A CTA has a row. NOTE: a NaN in x stays one; an infinity makes the whole row NaN or
// 0, and itself NaN, since the scale is infinite.
template <class Element>
__global__ void __launch_bounds__(kThreads) quantise_kernel(Params const params) {
    __shared__ float sums[2][kWarps];
    __shared__ float largest[kWarps];
    wait_for_previous_launch();
    allow_dependent_launch();
    int64_t const begin = int64_t{blockIdx.x} * params.columns;
    int const vectors = params.columns / kVector;
    int const first = static_cast<int>(threadIdx.x);
    constexpr int kKept = 4;  // vectors that stay in registers; others are read, and normalised, again
    uint4 kept[kKept];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        int const v = first + i * kThreads;
        kept[i] = load_written_vector_if(params.x + begin + int64_t{v} * kVector, v < vectors);
    }
    CopiedScales const& copied = params.copied;
    int const step = static_cast<int>(gridDim.x) * kThreads;
    for (int i = static_cast<int>(blockIdx.x) * kThreads + first; i < copied.rows * copied.stride; i += step) {
        copied.to[i] = copied.from[i / copied.stride * copied.step + min(i % copied.stride, copied.columns - 1)];
    }
    norm::Moments moments;
    bool is_normalised = false;
    auto const normalise = [&](int v, uint4 vector) {
        return norm::normalise<Element>(vector, params.norm, norm::load_norm(params.norm, v, vectors), moments);
    };
    auto const for_each = [&](auto use) {
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            int const v = first + i * kThreads;
            if (v < vectors) {
                use(v, kept[i]);
            }
        }
        for (int v = first + kKept * kThreads; v < vectors; v += kThreads) {
            uint4 vector = load_written_vector(params.x + begin + int64_t{v} * kVector);
            if (is_normalised) {
                vector = normalise(v, vector);
            }
            use(v, vector);
        }
    };
    if (params.norm.kind != TWELL_NORM_NONE) {
        norm::SumOfRow<kThreads> sum_of_row = {sums};
        moments = norm::find_moments<Element>(params.norm, vectors, for_each, sum_of_row);
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            kept[i] = normalise(first + i * kThreads, kept[i]);
        }
        is_normalised = true;
    }
    if (params.by_group) {
        uint32_t const lanes = ((1u << kLanesOfGroup) - 1) << (first % kWarpSize / kLanesOfGroup * kLanesOfGroup);
        for_each([&](int v, uint4 vector) {
            float most = largest_of<Element>(0.0f, vector);
#pragma unroll
            for (int distance = kLanesOfGroup / 2; distance > 0; distance /= 2) {
                most = fmaxf(most, __shfl_xor_sync(lanes, most, distance));
            }
            float const scale = scale_of(most);
            round_vector<Element>(params.rounded + begin + int64_t{v} * kVector, vector, 1.0f / scale);
            if (v % kLanesOfGroup == 0) {
                params.scale[int64_t{v / kLanesOfGroup} * gridDim.x + blockIdx.x] = scale;
            }
        });
        return;
    }
    float most = 0.0f;
    for_each([&](int, uint4 vector) { most = largest_of<Element>(most, vector); });
    float const scale = scale_of(largest_of_cta(most, largest));
    float const inverse = 1.0f / scale;
    for_each([&](int v, uint4 vector) {
        round_vector<Element>(params.rounded + begin + int64_t{v} * kVector, vector, inverse);
    });
    if (first == 0) {
        params.scale[blockIdx.x] = scale;
    }
}

}  // namespace twell::quantise

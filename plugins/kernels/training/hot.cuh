// The neurons that a training step computes densely, between its dense products: activation, h, L1 term and counts of a
// forward; h, du and dz of a backward.
//
// A CTA has a tile of kHotRows rows and kWarpSize * kWidth columns; kWidth is kVector, or 1 where rows do not begin at
// vectors.
#pragma once

#include "device/dependent_launch.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kHotRows = 64;
constexpr int kHotWarps = 8;
constexpr int kHotThreads = kHotWarps * kWarpSize;

struct HotParams {
    uint16_t const* z;   // [tokens, hot], rows `stride` apart
    uint16_t const* u;   // likewise, of a gated block
    uint16_t const* dh;  // of a backward: [tokens, hot], the product alone
    uint16_t* h;         // [tokens, hot]
    uint16_t* dz;        // of a backward: as z
    uint16_t* du;        // as u
    uint32_t* counts;    // of a forward: neuron j's at neurons[j], or j
    int32_t const* neurons;
    float* l1_parts;  // [CTAs]
    float const* dl1;
    int64_t tokens;
    int64_t column_tiles;
    int hot;
    int64_t stride;
    bool relu_on_up;
    Activation act;
};

template <int kWidth>
__device__ __forceinline__ void load_some(uint16_t (&values)[kWidth], uint16_t const* pointer) {
    if constexpr (kWidth == kVector) {
        *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(pointer);
    } else {
        values[0] = *pointer;
    }
}

template <int kWidth>
__device__ __forceinline__ void store_some(uint16_t* pointer, uint16_t const (&values)[kWidth]) {
    if constexpr (kWidth == kVector) {
        *reinterpret_cast<uint4*>(pointer) = *reinterpret_cast<uint4 const*>(values);
    } else {
        *pointer = values[0];
    }
}

template <class Element, bool kGated, bool kBackward, int kWidth>
__global__ __launch_bounds__(kHotThreads) void hot_kernel(__grid_constant__ HotParams const params) {
    wait_for_previous_launch();
    __shared__ uint32_t counts[kBackward ? 1 : kWarpSize * kWidth];
    __shared__ float sums[kHotWarps];
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const first_column = static_cast<int>(blockIdx.x % params.column_tiles) * kWarpSize * kWidth;
    int const column = first_column + lane * kWidth;
    int64_t const first_row = blockIdx.x / params.column_tiles * kHotRows + warp;
    if constexpr (!kBackward) {
        for (int i = threadIdx.x; i < kWarpSize * kWidth; i += kHotThreads) {
            counts[i] = 0;
        }
        __syncthreads();
    }
    float const l1_factor =
        !kBackward || params.dl1 == nullptr ? 0.0f : *params.dl1 / static_cast<float>(params.tokens);
    uint32_t own_counts[kWidth] = {};
    float l1 = 0.0f;
#pragma unroll 4
    for (int r = 0; r < kHotRows / kHotWarps; ++r) {
        int64_t const row = first_row + r * kHotWarps;
        if (row >= params.tokens || column >= params.hot) {
            break;
        }
        alignas(16) uint16_t z[kWidth];
        alignas(16) uint16_t u[kWidth];
        alignas(16) uint16_t dh[kWidth];
        alignas(16) uint16_t h[kWidth];
        load_some(z, params.z + row * params.stride + column);
        if constexpr (kGated) {
            load_some(u, params.u + row * params.stride + column);
        }
        if constexpr (kBackward) {
            load_some(dh, params.dh + row * params.hot + column);
        }
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            uint16_t const bits =
                static_cast<uint16_t>(activate_pair<Element>(z[i], params.act.square, params.act.cut));
            bool const active = is_nonzero(bits);
            float const g = Element::to_float(bits);
            float const up = kGated ? up_of(Element::to_float(u[i]), params.relu_on_up) : 0.0f;
            if constexpr (kBackward) {
                PairGradients const found = differentiate<kGated>(g, up, Element::to_float(dh[i]), l1_factor,
                                                                  params.act.square, params.relu_on_up);
                h[i] = active ? Element::from_float(found.h) : uint16_t{0};
                z[i] = active ? Element::from_float(found.dz) : uint16_t{0};
                u[i] = kGated && active ? Element::from_float(found.du) : uint16_t{0};
            } else {
                float const value = active ? (kGated ? g * up : g) : 0.0f;
                h[i] = Element::from_float(value);
                l1 += fabsf(value);
                own_counts[i] += active ? 1 : 0;
            }
        }
        store_some(params.h + row * params.hot + column, h);
        if constexpr (kBackward) {
            store_some(params.dz + row * params.stride + column, z);
            if constexpr (kGated) {
                store_some(params.du + row * params.stride + column, u);
            }
        }
    }
    if constexpr (!kBackward) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            if (own_counts[i] != 0) {
                atomicAdd(counts + lane * kWidth + i, own_counts[i]);
            }
        }
        l1 = sum_of_warp(l1);
        if (lane == 0) {
            sums[warp] = l1;
        }
        __syncthreads();
        for (int i = threadIdx.x; i < kWarpSize * kWidth; i += kHotThreads) {
            if (counts[i] != 0) {
                int const neuron = first_column + i;
                atomicAdd(params.counts + (params.neurons == nullptr ? neuron : params.neurons[neuron]), counts[i]);
            }
        }
        if (threadIdx.x == 0) {
            float sum = 0.0f;
            for (float const part : sums) {
                sum += part;
            }
            params.l1_parts[blockIdx.x] = sum;
        }
    }
}

}  // namespace twell::training

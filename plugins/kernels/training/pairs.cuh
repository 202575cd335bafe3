// Data that a training step keeps of a block's sparse neurons: the pairs of a token and a neuron that is active for it.
#pragma once

#include <stdint.h>

#include "device/block.cuh"
#include "device/vector.cuh"

namespace twell::training {

constexpr int kWarps = 4;  // of a CTA of most kernels, each with separate work
constexpr int kThreads = kWarps * kWarpSize;

// Rows' pairs one after the other: docs/format.md. A row is listed if all pairs up to its last one have found place.
struct Pairs {
    int64_t const* row_begin;  // [tokens + 1], and behind it how many rows are listed
    uint32_t const* words;     // [capacity]: a neuron, and the bits of g in the high half
    uint16_t* ups;             // [capacity]: the bits of u; null in a plain block
    int64_t tokens;

    __device__ __forceinline__ int64_t listed_rows() const { return row_begin[tokens + 1]; }
};

// The tensors of a block: neuron j of the pairs has row neurons[j].
struct TrainingBlock : BlockTensors {
    int32_t const* neurons;       // [d_ff], or null: row j
    int32_t const* gate_neurons;  // the same of w_gate and b_gate

    __device__ __forceinline__ int64_t row_of(uint32_t neuron) const {
        return neurons == nullptr ? neuron : neurons[neuron];
    }
    __device__ __forceinline__ int64_t gate_row_of(uint32_t neuron) const {
        return gate_neurons == nullptr ? neuron : gate_neurons[neuron];
    }
};

__device__ __forceinline__ uint32_t neuron_of(uint32_t word) { return word & 0xffffu; }

template <class Element>
__device__ __forceinline__ float g_of(uint32_t word) {
    return Element::to_float(static_cast<uint16_t>(word >> 16));
}

// u of a pair, after the ReLU of dReLU. NaN is kept.
__device__ __forceinline__ float up_of(float sum, bool relu_on_up) { return relu_on_up && sum <= 0.0f ? 0.0f : sum; }

__device__ __forceinline__ float sign_of(float h) {
    return h > 0.0f ? 1.0f : h < 0.0f ? -1.0f : h;  // of 0 it is 0, of NaN NaN
}

// The gradients of a pair.
struct PairGradients {
    float h;
    float du;
    float dz;
};

// dh: with the L1 term's part. A plain block has no u. z is the root of g for relu2, which is not negative.
template <bool kGated>
__device__ __forceinline__ PairGradients differentiate(float g, float u, float product, float l1_factor, bool square,
                                                       bool relu_on_up) {
    float const h = kGated ? g * u : g;
    float const dh = product + l1_factor * sign_of(h);
    float const dg = kGated ? dh * u : dh;
    float const dz = square ? dg * 2.0f * sqrtf(g) : dg;
    float const du = kGated && !(relu_on_up && u <= 0.0f) ? dh * g : 0.0f;
    return {h, du, dz};
}

constexpr int kScanThreads = 1024;

// By a CTA of kScanThreads: the sum of the values of the threads before this one. `sums` is shared memory.
__device__ __forceinline__ uint32_t sum_before(uint32_t (&sums)[kScanThreads], uint32_t own) {
    int const thread = threadIdx.x;
    sums[thread] = own;
    for (int distance = 1; distance < kScanThreads; distance *= 2) {
        __syncthreads();
        uint32_t const below = thread >= distance ? sums[thread - distance] : 0;
        __syncthreads();
        sums[thread] += below;
    }
    return sums[thread] - own;
}

// By one warp: the last row that begins at `place` or before. The first row does, and rows_end does not.
__device__ __forceinline__ int64_t find_row(int64_t const* row_begin, int64_t rows_end, int64_t place) {
    int const lane = threadIdx.x % kWarpSize;
    int64_t low = 0;
    int64_t high = rows_end;
    while (high - low > 1) {
        int64_t const step = (high - low + kWarpSize - 1) / kWarpSize;
        int64_t const probe = low + (lane + 1) * step;
        int const passed = __popc(__ballot_sync(0xffffffffu, probe < high && row_begin[probe] <= place));
        low += passed * step;
        high = min(low + step, high);
    }
    return low;
}

}  // namespace twell::training

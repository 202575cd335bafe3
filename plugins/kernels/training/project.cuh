// Products of a token's row and a neuron's row of a matrix, for all pairs: u = x . Wu[n] of a forward, dh = dy . Wd[n]
// of a backward.
//
// A warp has kUnit neighbouring pairs, whatever rows they belong to, so that all warps have equally much to do. Each
// lane has one of them in the end.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kUnit = kWarpSize;
constexpr int kSlabVectors = 8;  // of a token's row, a lane: those that are in registers
constexpr int kSlabColumns = kSlabVectors * kWarpColumns;
constexpr int kPairsAtOnce = 2;
// CTAs of a multiprocessor at least: with three, other GPUs' compilers spill registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9
constexpr int kProjectBlocks = 3;
#else
constexpr int kProjectBlocks = 2;
#endif

struct ProjectParams : TrainingBlock {
    Pairs pairs;
    uint16_t const* dy;                // [tokens, d_out], of a backward
    float const* dl1;                  // its factor of the L1 term, or null
    float* hidden;                     // of a forward: [capacity], h
    float2* factors;                   // of a backward: [capacity], du and dz
    float4* transposed;                // [capacity]: h, du, dz and the row's number, by neuron
    uint32_t const* transposed_place;  // [capacity]: where a pair is among these
};

__device__ __forceinline__ void load_slab(uint4 (&vectors)[kSlabVectors], uint16_t const* row, int begin, int width) {
    int const column = begin + static_cast<int>(threadIdx.x) % kWarpSize * kVector;
#pragma unroll
    for (int i = 0; i < kSlabVectors; ++i) {
        vectors[i] = load_vector_if(row + column + i * kWarpColumns, column + i * kWarpColumns < width);
    }
}

template <class Element, bool kGated, bool kBackward>
__global__ __launch_bounds__(kThreads,
                             kProjectBlocks) void project_kernel(__grid_constant__ ProjectParams const params) {
    wait_for_previous_launch();
    int const lane = threadIdx.x % kWarpSize;
    int64_t const* const row_begin = params.pairs.row_begin;
    int64_t const listed = params.pairs.listed_rows();
    int64_t const total = row_begin[listed];
    int64_t const begin = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize) * kUnit;
    if (begin >= total) {
        return;
    }
    int const count = static_cast<int>(min(total - begin, static_cast<int64_t>(kUnit)));
    uint32_t const word = params.pairs.words[begin + min(lane, count - 1)];
    int64_t const own_neuron = params.row_of(neuron_of(word));
    uint16_t const* const tokens = kBackward ? params.dy : params.x;
    uint16_t const* const matrix = kBackward ? params.w_down : params.w_up;
    int const width = kBackward ? params.d_out : params.d_model;
    int64_t const first_row = find_row(row_begin, listed, begin);
    float own = 0.0f;
    int64_t own_row = first_row;
    for (int slab = 0; slab < width; slab += kSlabColumns) {
        int64_t row = first_row;
        for (int i = 0; i < count; ++row) {
            int const row_end = static_cast<int>(min(row_begin[row + 1] - begin, static_cast<int64_t>(count)));
            if (row_end <= i) {
                continue;
            }
            if (lane >= i && lane < row_end) {
                own_row = row;
            }
            uint4 token[kSlabVectors];
            load_slab(token, tokens + row * width, slab, width);
            for (; i < row_end; i += kPairsAtOnce) {
                uint4 weights[kPairsAtOnce][kSlabVectors];
                float sums[kPairsAtOnce] = {};
#pragma unroll
                for (int p = 0; p < kPairsAtOnce; ++p) {
                    int64_t const neuron = __shfl_sync(0xffffffffu, own_neuron, min(i + p, row_end - 1));
                    load_slab(weights[p], matrix + neuron * width, slab, width);
                }
#pragma unroll
                for (int v = 0; v < kSlabVectors; ++v) {
#pragma unroll
                    for (int p = 0; p < kPairsAtOnce; ++p) {
                        accumulate<Element>(sums[p], token[v], weights[p][v]);
                    }
                }
#pragma unroll
                for (int p = 0; p < kPairsAtOnce; ++p) {
                    float const sum = sum_of_warp(sums[p]);
                    own += lane == i + p && i + p < row_end ? sum : 0.0f;
                }
            }
            i = row_end;
        }
    }
    if (lane >= count) {
        return;
    }
    int64_t const pair = begin + lane;
    float const g = g_of<Element>(word);
    if constexpr (kBackward) {
        float const l1_factor = params.dl1 == nullptr ? 0.0f : *params.dl1 / static_cast<float>(params.pairs.tokens);
        float const u = kGated ? Element::to_float(params.pairs.ups[pair]) : 0.0f;
        PairGradients const found = differentiate<kGated>(g, u, own, l1_factor, params.act.square, params.relu_on_up);
        params.factors[pair] = make_float2(found.du, found.dz);
        if (params.transposed != nullptr) {
            params.transposed[params.transposed_place[pair]] =
                make_float4(found.h, found.du, found.dz, __int_as_float(static_cast<int>(own_row)));
        }
    } else {
        float const bias = params.b_up == nullptr ? 0.0f : Element::to_float(params.b_up[own_neuron]);
        float const u = up_of(own + bias, params.relu_on_up);
        params.pairs.ups[pair] = Element::from_float(u);
        params.hidden[pair] = g * u;
    }
}

}  // namespace twell::training

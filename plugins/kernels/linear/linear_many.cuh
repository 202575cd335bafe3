// A linear layer for any number of tokens, on every GPU from sm_80 on: products of normalised rows.
#pragma once

#include "device/dependent_launch.cuh"
#include "fp8/quantise.cuh"
#include "linear/layer.cuh"
#include "matmul/matmul_generic.cuh"

namespace twell::linear_many {

using namespace matmul_generic;
using linear::Norm;
using linear::Outputs;

constexpr int kRoundThreads = 256;

struct RoundParams {
    uint16_t const* x;  // [tokens, in]
    Norm norm;
    int in;
    uint8_t* rounded;           // [tokens, in]: each row with a scale
    float* scale;               // [tokens]
    float const* weight_scale;  // 1: the weight's, if it has one for all rows
    float* weight_scales;       // [out]: it, for each of them
    int out;                    // 0: it has one for each
};

// Normalises rows and writes them in FP8. A CTA has a row, which stays in shared memory.
template <class Element>
__global__ void __launch_bounds__(kRoundThreads) round_kernel(RoundParams const params) {
    extern __shared__ __align__(128) unsigned char shared[];
    constexpr int kWarps = kRoundThreads / kWarpSize;
    __shared__ float sums[2][kWarps];
    __shared__ float largest[kWarps];
    wait_for_previous_launch();
    allow_dependent_launch();
    int64_t const begin = int64_t{blockIdx.x} * params.in;
    int const vectors = params.in / kVector;
    int const first = static_cast<int>(threadIdx.x);
    auto* const row = reinterpret_cast<uint4*>(shared);
    norm::SumOfRow<kRoundThreads> sum_of_row = {sums};
    linear::Moments const moments = linear::copy_row<Element>(reinterpret_cast<uint16_t*>(shared), params.x + begin,
                                                              params.norm, vectors, first, kRoundThreads, sum_of_row);
    float most = 0.0f;
#pragma unroll 2
    for (int v = first; v < vectors; v += kRoundThreads) {
        if (params.norm.kind != TWELL_NORM_NONE) {
            row[v] =
                linear::normalise<Element>(row[v], params.norm, linear::load_norm(params.norm, v, vectors), moments);
        }
        most = quantise::largest_of<Element>(most, row[v]);
    }
    float const scale = quantise::scale_of(quantise::largest_of_cta(most, largest));
    float const inverse = 1.0f / scale;
    for (int v = first; v < vectors; v += kRoundThreads) {
        quantise::round_vector<Element>(params.rounded + begin + int64_t{v} * kVector, row[v], inverse);
    }
    if (first == 0) {
        params.scale[blockIdx.x] = scale;
    }
    int const step = static_cast<int>(gridDim.x) * kRoundThreads;
    for (int i = static_cast<int>(blockIdx.x) * kRoundThreads + first; i < params.out; i += step) {
        params.weight_scales[i] = *params.weight_scale;
    }
}

struct Params {
    uint16_t const* x;         // [tokens, in], normalised
    uint16_t const* weight;    // [end - begin, in]: rows from `begin` on
    uint16_t const* bias;      // [out] or null
    uint16_t const* residual;  // [tokens, out] or null
    Outputs outputs;
    int64_t tokens;
    int in;
    int out;
    int begin;  // of the outputs that are computed
    int end;
    int num_tiles;  // of them
};

template <class Element, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) product_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char shared[];
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    wait_for_previous_launch();
    allow_dependent_launch();
    int const num_slices = (params.in + BLOCK_K - 1) / BLOCK_K;
    int64_t const stride = params.in;
    int64_t const tiles_end = (params.tokens + Cfg::BLOCK_M - 1) / Cfg::BLOCK_M * params.num_tiles;
    for (int64_t i = blockIdx.x; i < tiles_end; i += gridDim.x) {
        int64_t const row_begin = i / params.num_tiles * Cfg::BLOCK_M;
        int const weight_begin = static_cast<int>(i % params.num_tiles) * BLOCK_N;
        int const column_begin = params.begin + weight_begin;
        int64_t const rows_left = params.tokens - row_begin;
        int const num_rows = static_cast<int>(rows_left < Cfg::BLOCK_M ? rows_left : Cfg::BLOCK_M);
        int const num_columns = min(params.end - column_begin, BLOCK_N);
        int const column = column_begin + lane * kVector;
        bool const exists = lane * kVector < num_columns;
        Accumulators<Cfg> accumulators;
        multiply<Element, Cfg, Weights::kByNeuron>(
            accumulators, shared, {params.x + row_begin * stride, stride, num_rows, params.in},
            {params.weight + weight_begin * stride, stride, num_columns, params.in}, num_slices);
        uint16_t const* const bias = params.bias == nullptr ? nullptr : params.bias + column_begin;
        if (params.residual != nullptr) {
            for (int r = warp; r < num_rows; r += Cfg::kWarps) {
                copy_async(shared_address(result_of<Cfg>(shared, r)),
                           params.residual + (row_begin + r) * params.out + column, exists);
            }
            commit_async();
            wait_async<0>();
            __syncthreads();
            store_result<Element, Cfg, true>(shared, accumulators, bias, num_columns);
        } else {
            store_result<Element, Cfg>(shared, accumulators, bias, num_columns);
        }
        if (exists) {
            for (int r = warp; r < num_rows; r += Cfg::kWarps) {
                *reinterpret_cast<uint4*>(params.outputs.place(row_begin + r, column)) = *result_of<Cfg>(shared, r);
            }
        }
        __syncthreads();
    }
}

}  // namespace twell::linear_many

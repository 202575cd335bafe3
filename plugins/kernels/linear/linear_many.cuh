// A linear layer for any number of tokens, on every GPU from sm_80 on: products of normalised rows.
#pragma once

#include "device/dependent_launch.cuh"
#include "linear/layer.cuh"
#include "matmul/matmul_generic.cuh"

namespace twell::linear_many {

using namespace matmul_generic;
using linear::Outputs;

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

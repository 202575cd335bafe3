// The dense path for every GPU from sm_80 on: up and down projections of rows that are too dense for the sparse ones.
// See matmul_generic.cuh for the products and dense_rows.cuh for the step between the two.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/sum_again.cuh"
#include "many_tokens/dense/gather.cuh"
#include "matmul/dense_rows.cuh"
#include "matmul/matmul_generic.cuh"

namespace twell::dense_generic {

using namespace dense;
using namespace matmul_generic;

struct Params : BlockTensors {
    uint16_t const* weights;  // up: w_up [d_ff, d_model]; down: w_down [d_ff, d_out]
    uint16_t const* bias;     // up: [d_ff] or null; down: [d_out] or null
    Gather gather;
    Schedule schedule;
    int64_t num_rows;
    int depth;        // of the sums; up: d_model; down: d_ff
    int num_neurons;  // up: d_ff; down: d_out
    int num_tiles;    // of neurons
};

// Multiplies u, in shared memory, by g, and stores h. A warp has kRowsAtOnce rows at once, a lane eight neurons.
template <class Element, class Cfg>
__device__ __forceinline__ void multiply_by_g(Params const& params, View const& view, unsigned char const* shared,
                                              int position_begin, int tile_idx) {
    constexpr int kRows = Cfg::kRowsAtOnce;
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const num_rows = min(view.count - position_begin, Cfg::BLOCK_M);
    PackedGate const& gate = params.gather.gate;
    int64_t const column = static_cast<int64_t>(tile_idx) * TWELL_TILE + lane * kVector;
    uint16_t* const h = (view.all ? gate.spilled : params.gather.h_part) + position_begin * gate.stride() + column;
    for (int begin = static_cast<int>(threadIdx.x) / kWarpSize; begin < num_rows; begin += kRows * Cfg::kWarps) {
        // Past the last row these repeat it.
        auto const index = [&](int r) { return min(begin + r * Cfg::kWarps, num_rows - 1); };
        int64_t rows[kRows];
        uint4 g[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            rows[r] = view.row_of(params.schedule, position_begin + index(r));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            g[r] = *gate.head(rows[r], tile_idx);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            g[r] = g[r].x > kMostUnspilled
                       ? *reinterpret_cast<uint4 const*>(gate.spilled + rows[r] * gate.stride() + column)
                       : expand(g[r], lane);
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (begin + r * Cfg::kWarps < num_rows) {
                *reinterpret_cast<uint4*>(h + index(r) * gate.stride()) =
                    multiply_chunk<Element>(g[r], *result_of<Cfg>(shared, index(r)), params.relu_on_up);
            }
        }
    }
}

// Copies the residual of a tile to the place of the result. Columns from num_neurons on get zeros.
template <class Cfg>
__device__ __forceinline__ void load_residual(Params const& params, View const& view, unsigned char const* shared,
                                              int position_begin, int tile_idx) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const num_rows = min(view.count - position_begin, Cfg::BLOCK_M);
    int const column = tile_idx * BLOCK_N + lane * kVector;
    for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < num_rows; i += Cfg::kWarps) {
        int64_t const row = view.row_of(params.schedule, position_begin + i);
        copy_async(shared_address(result_of<Cfg>(shared, i)), params.residual + row * params.num_neurons + column,
                   column < params.num_neurons);
    }
    commit_async();
    wait_async<0>();
    __syncthreads();
}

template <class Element, class Cfg>
__device__ __forceinline__ void store_y(Params const& params, View const& view, unsigned char const* shared,
                                        int position_begin, int tile_idx) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const num_rows = min(view.count - position_begin, Cfg::BLOCK_M);
    int const column = tile_idx * BLOCK_N + lane * kVector;
    uint16_t const* const h = view.all ? params.gather.gate.spilled : params.gather.h_part;
    for (int i = static_cast<int>(threadIdx.x) / kWarpSize; i < num_rows; i += Cfg::kWarps) {
        int64_t const row = view.row_of(params.schedule, position_begin + i);
        bool failed = false;
        if (column < params.num_neurons) {
            uint4 const values = *result_of<Cfg>(shared, i);
            *reinterpret_cast<uint4*>(params.y + row * params.num_neurons + column) = values;
            failed = !is_finite<Element>(values);
        }
        uint32_t rest = __ballot_sync(0xffffffffu, failed);
        __syncwarp();  // after the first store of these values
        for (; rest != 0; rest &= rest - 1) {
            sum_again<Element>(params, h + (position_begin + i) * params.gather.gate.stride(), row,
                               tile_idx * BLOCK_N + (__ffs(rest) - 1) * kVector);
        }
    }
}

template <class Element, class Cfg, Projection kProjection>
__global__ void __launch_bounds__(Cfg::kThreads, 1) dense_kernel(Params const params) {
    constexpr bool kUp = kProjection == Projection::kUp;
    extern __shared__ __align__(128) unsigned char shared[];

    allow_dependent_launch();
    View const view(params.schedule, params.num_rows, false);
    if (ends_early(view.count == 0)) {
        return;
    }
    wait_for_previous_launch();
    PackedGate const& gate = params.gather.gate;
    int const num_slices = (params.depth + BLOCK_K - 1) / BLOCK_K;
    int const tiles_end = (view.count + Cfg::BLOCK_M - 1) / Cfg::BLOCK_M * params.num_tiles;
    for (int i = static_cast<int>(blockIdx.x); i < tiles_end; i += static_cast<int>(gridDim.x)) {
        int const tile_idx = i % params.num_tiles;
        int const position_begin = i / params.num_tiles * Cfg::BLOCK_M;
        int const column_begin = tile_idx * BLOCK_N;
        int const num_rows = min(view.count - position_begin, Cfg::BLOCK_M);
        int const num_columns = min(params.num_neurons - column_begin, BLOCK_N);
        Accumulators<Cfg> accumulators;
        if constexpr (kUp) {
            int64_t const stride = params.depth;
            uint16_t const* const x = view.all ? params.x : params.gather.x_part;
            multiply<Element, Cfg, Weights::kByNeuron>(
                accumulators, shared, {x + position_begin * stride, stride, num_rows, params.depth},
                {params.weights + column_begin * stride, stride, num_columns, params.depth}, num_slices);
        } else {
            uint16_t const* const h = view.all ? gate.spilled : params.gather.h_part;
            // h is 0 in columns from d_ff on.
            multiply<Element, Cfg, Weights::kByK>(
                accumulators, shared,
                {h + position_begin * gate.stride(), gate.stride(), num_rows, static_cast<int>(gate.stride())},
                {params.weights + column_begin, params.num_neurons, params.depth, num_columns}, num_slices);
        }
        uint16_t const* const bias = params.bias == nullptr ? nullptr : params.bias + column_begin;
        if (!kUp && params.residual != nullptr) {
            load_residual<Cfg>(params, view, shared, position_begin, tile_idx);
            store_result<Element, Cfg, true>(shared, accumulators, bias, num_columns);
        } else {
            store_result<Element, Cfg>(shared, accumulators, bias, num_columns);
        }
        if constexpr (kUp) {
            multiply_by_g<Element, Cfg>(params, view, shared, position_begin, tile_idx);
        } else {
            store_y<Element, Cfg>(params, view, shared, position_begin, tile_idx);
        }
        __syncthreads();
    }
}

}  // namespace twell::dense_generic

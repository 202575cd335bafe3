// The pairs by neuron, each neuron's tokens in ascending order: where a pair goes there. A sort by counting, whose
// result does not depend on the order in which anything runs.
//
// Rows are cut into blocks and neurons into ranges, as shared memory holds a range. count_neurons: how often a neuron
// is in a block. add_up_neurons: in the blocks before. begin_neurons: where a neuron's pairs begin. place_pairs: one
// warp takes a block's rows one after the other; the neurons of a row are all different.
#pragma once

#include "device/dependent_launch.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kRange = 8192;  // neurons
constexpr int kMostRowBlocks = 1024;
constexpr int kFewestBlockRows = 32;
constexpr int kCountThreads = 256;
constexpr int kAddUpWarps = 16;

struct TransposeParams {
    Pairs pairs;
    uint32_t* block_counts;  // [blocks, d_ff]
    uint32_t* column_begin;  // [d_ff + 1]
    uint32_t* place;         // [capacity]
    int64_t block_rows;
    int num_blocks;
    int d_ff;

    // The pairs of a block of rows.
    struct Range {
        int64_t rows_begin;
        int64_t rows_end;
    };
    __device__ __forceinline__ Range rows_of(int block) const {
        int64_t const listed = pairs.listed_rows();
        int64_t const begin = min(block * block_rows, listed);
        return {begin, min(begin + block_rows, listed)};
    }
};

static __global__ __launch_bounds__(kCountThreads) void count_neurons_kernel(
    __grid_constant__ TransposeParams const params) {
    wait_for_previous_launch();
    __shared__ uint32_t counts[kRange];
    int const first = static_cast<int>(blockIdx.y) * kRange;
    int const num = min(params.d_ff - first, kRange);
    for (int i = threadIdx.x; i < num; i += kCountThreads) {
        counts[i] = 0;
    }
    __syncthreads();
    TransposeParams::Range const rows = params.rows_of(static_cast<int>(blockIdx.x));
    int64_t const end = params.pairs.row_begin[rows.rows_end];
    for (int64_t pair = params.pairs.row_begin[rows.rows_begin] + threadIdx.x; pair < end; pair += kCountThreads) {
        uint32_t const neuron = neuron_of(params.pairs.words[pair]) - static_cast<uint32_t>(first);
        if (neuron < static_cast<uint32_t>(num)) {
            atomicAdd(counts + neuron, 1u);
        }
    }
    __syncthreads();
    uint32_t* const out = params.block_counts + static_cast<int64_t>(blockIdx.x) * params.d_ff + first;
    for (int i = threadIdx.x; i < num; i += kCountThreads) {
        out[i] = counts[i];
    }
}

// A CTA has a warp's width of neurons, and its warps share the blocks of rows.
static __global__ __launch_bounds__(kAddUpWarps* kWarpSize) void add_up_neurons_kernel(
    __grid_constant__ TransposeParams const params) {
    wait_for_previous_launch();
    __shared__ uint32_t sums[kAddUpWarps][kWarpSize];
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const neuron = static_cast<int>(blockIdx.x) * kWarpSize + lane;
    bool const exists = neuron < params.d_ff;
    int const each = (params.num_blocks + kAddUpWarps - 1) / kAddUpWarps;
    int const begin = min(warp * each, params.num_blocks);
    int const end = min(begin + each, params.num_blocks);
    uint32_t* const counts = params.block_counts + min(neuron, params.d_ff - 1);
    uint32_t own = 0;
#pragma unroll 8
    for (int block = begin; block < end; ++block) {
        own += counts[static_cast<int64_t>(block) * params.d_ff];
    }
    sums[warp][lane] = own;
    __syncthreads();
    uint32_t sum = 0;
    for (int before = 0; before < warp; ++before) {
        sum += sums[before][lane];
    }
    if (exists && warp == kAddUpWarps - 1) {
        params.column_begin[neuron + 1] = sum + own;
    }
#pragma unroll 8
    for (int block = begin; block < end; ++block) {
        uint32_t& place = counts[static_cast<int64_t>(block) * params.d_ff];
        uint32_t const count = place;
        if (exists) {
            place = sum;
        }
        sum += count;
    }
}

static __global__ __launch_bounds__(kScanThreads) void begin_neurons_kernel(
    __grid_constant__ TransposeParams const params) {
    wait_for_previous_launch();
    __shared__ uint32_t sums[kScanThreads];
    int const thread = threadIdx.x;
    uint32_t* const ends = params.column_begin + 1;
    int const each = (params.d_ff + kScanThreads - 1) / kScanThreads;
    int const begin = min(thread * each, params.d_ff);
    int const end = min(begin + each, params.d_ff);
    uint32_t own = 0;
    for (int i = begin; i < end; ++i) {
        own += ends[i];
    }
    uint32_t place = sum_before(sums, own);
    for (int i = begin; i < end; ++i) {
        place += ends[i];
        ends[i] = place;
    }
    if (thread == 0) {
        params.column_begin[0] = 0;
    }
}

static __global__ __launch_bounds__(kWarpSize) void place_pairs_kernel(__grid_constant__ TransposeParams const params) {
    wait_for_previous_launch();
    __shared__ uint32_t next[kRange];
    int const lane = threadIdx.x;
    int const first = static_cast<int>(blockIdx.y) * kRange;
    int const num = min(params.d_ff - first, kRange);
    uint32_t const* const before = params.block_counts + static_cast<int64_t>(blockIdx.x) * params.d_ff + first;
#pragma unroll 8
    for (int i = lane; i < num; i += kWarpSize) {
        next[i] = before[i] + params.column_begin[first + i];
    }
    __syncwarp();
    TransposeParams::Range const rows = params.rows_of(static_cast<int>(blockIdx.x));
    for (int64_t row = rows.rows_begin; row < rows.rows_end; ++row) {
        int64_t const end = params.pairs.row_begin[row + 1];
        for (int64_t pair = params.pairs.row_begin[row] + lane; pair < end; pair += kWarpSize) {
            uint32_t const neuron = neuron_of(params.pairs.words[pair]) - static_cast<uint32_t>(first);
            if (neuron < static_cast<uint32_t>(num)) {
                params.place[pair] = next[neuron]++;
            }
        }
        __syncwarp();
    }
}

}  // namespace twell::training

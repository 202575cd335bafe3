// Sparse up and down projections, fused, of the rows that have no list (schedule.h), for every GPU from sm_80 on. One
// CTA computes one row of y.
//
// The row's active neurons are taken in batches, in ascending order. For a batch, warps first share out the neurons
// (h[n] = g[n] (x . Wu[n] + bu[n]) into shared memory), then threads share out the columns of y (y += h[n] Wd[n, :]).
// Each sum has one owner and one order, whatever the number of threads: results are bitwise repeatable and do not
// depend on the configuration.
#ifndef TWELL_KERNELS_UP_DOWN_GENERIC_CUH_
#define TWELL_KERNELS_UP_DOWN_GENERIC_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "epilogue.cuh"
#include "pack.cuh"
#include "schedule.h"
#include "twell/twell.h"
#include "vector.cuh"

namespace twell::up_down_generic {

constexpr int kMaxTiles = TWELL_MAX_D_FF / TWELL_TILE;
// Neurons in one batch. A whole tile always fits, and so does nearly every row of a sparse layer.
constexpr int kBatch = 512;
static_assert(kBatch >= TWELL_TILE, "a batch holds at least one whole tile");

// Threads a multiprocessor holds at least: the step is bound by loads in flight, so occupancy matters more than
// registers, as long as nothing spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMinThreads = 512;
#else
constexpr int kMinThreads = 1024;
#endif

struct Params {
    uint16_t const* x;         // [tokens, d_model]
    uint16_t const* w_gate;    // [d_ff, d_model], for tiles that overflowed
    uint16_t const* b_gate;    // [d_ff] or null
    uint16_t const* w_up;      // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;      // [d_ff] or null
    uint16_t const* w_down;    // [d_ff, d_out]
    uint16_t const* b_down;    // [d_out] or null
    uint16_t const* residual;  // [tokens, d_out] or null
    uint16_t* y;               // [tokens, d_out]
    uint32_t const* packed;    // [tokens, num_tiles * words_per_tile], or null: all tiles are computed again
    uint16_t const* spilled;   // [tokens, num_tiles * TWELL_TILE] or null, see pack.cuh
    Schedule schedule;
    int d_model;
    int d_ff;
    int d_out;
    int num_tiles;
    int words_per_tile;
    bool relu_on_up;  // dReLU
    Activation act;
};

// A row gets kThreads threads, and a thread kVectors 8-column pieces of y at a time.
template <int kRowThreads, int kThreadVectors>
struct Config {
    static constexpr int kThreads = kRowThreads;
    static constexpr int kVectors = kThreadVectors;
    static constexpr int kWarps = kThreads / kWarpSize;
    static constexpr int kMinBlocks = kVectors == 1 ? kMinThreads / kThreads : 1;
    static constexpr int kColumns = kThreads * kVectors * kVector;
};

struct SharedStorage {
    int offset[kMaxTiles + 1];  // where each tile's neurons start, see load_offsets
    int column[kBatch];         // the batch: which neurons ...
    float value[kBatch];        // ... and their g, later h
    uint16_t tile[TWELL_TILE];  // g of a recomputed tile
    int num_recomputed;         // non-zeros in `tile`
};

// The largest i in [low, high] with offset[i] <= value; offset[low] <= value.
__device__ __forceinline__ int last_at_most(int const* offset, int low, int high, int value) {
    while (low < high) {
        int const middle = (low + high + 1) / 2;
        if (offset[middle] <= value) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Calls emit(i, x . matrix[row_of(i), :] + bias[row_of(i)]) once for each i < count; warps share out the indices.
template <class Element, class Cfg, int kRows, class RowOf, class Emit>
__device__ __forceinline__ void project_groups(uint16_t const* x, uint16_t const* matrix, uint16_t const* bias,
                                               int d_model, int count, RowOf row_of, Emit emit) {
    int const lane = threadIdx.x % kWarpSize;
    for (int begin = threadIdx.x / kWarpSize * kRows; begin < count; begin += Cfg::kWarps * kRows) {
        int rows[kRows];
        float sums[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            rows[r] = row_of(min(begin + r, count - 1));
        }
        dot_rows<Element, kRows>(sums, x, matrix, rows, d_model);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (lane == r && begin + r < count) {
                emit(begin + r, bias == nullptr ? sums[r] : sums[r] + Element::to_float(bias[rows[r]]));
            }
        }
    }
}

template <class Element, class Cfg, class RowOf, class Emit>
__device__ __forceinline__ void project(uint16_t const* x, uint16_t const* matrix, uint16_t const* bias, int d_model,
                                        int count, RowOf row_of, Emit emit) {
    // Two neurons at once share each load of x; when there are few, every warp gets its own.
    constexpr int kGroup = 2;
    if (count >= kGroup * Cfg::kWarps) {
        project_groups<Element, Cfg, kGroup>(x, matrix, bias, d_model, count, row_of, emit);
    } else {
        project_groups<Element, Cfg, 1>(x, matrix, bias, d_model, count, row_of, emit);
    }
}

// offset[t]: entries before tile t. A tile that overflowed counts as more than a batch, so it becomes one of its own.
template <class Cfg>
__device__ __forceinline__ void load_offsets(SharedStorage& shared, uint32_t const* packed_row, int num_tiles,
                                             int words_per_tile) {
    for (int t = threadIdx.x; t < num_tiles; t += Cfg::kThreads) {
        uint32_t const count = packed_row == nullptr ? UINT32_MAX : packed_row[t * words_per_tile];
        shared.offset[t + 1] = count < static_cast<uint32_t>(words_per_tile) ? static_cast<int>(count) : kBatch + 1;
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
        int const lane = threadIdx.x;
        uint32_t total = 0;
        for (int begin = 0; begin < num_tiles; begin += kWarpSize) {
            int const t = begin + lane;
            uint32_t const sum = total + sum_up_to(t < num_tiles ? static_cast<uint32_t>(shared.offset[t + 1]) : 0);
            if (t < num_tiles) {
                shared.offset[t + 1] = static_cast<int>(sum);
            }
            total = __shfl_sync(0xffffffffu, sum, kWarpSize - 1);
        }
        if (lane == 0) {
            shared.offset[0] = 0;
        }
    }
    __syncthreads();
}

// The batch of tiles [tile_begin, tile_end), none of which overflowed. Only words that twell_gate wrote are read.
template <class Element, class Cfg>
__device__ __forceinline__ int load_batch(SharedStorage& shared, uint32_t const* packed_row, int tile_begin,
                                          int tile_end, int words_per_tile) {
    int const begin = shared.offset[tile_begin];
    int const count = shared.offset[tile_end] - begin;
    for (int i = threadIdx.x; i < count; i += Cfg::kThreads) {
        int const t = last_at_most(shared.offset, tile_begin, tile_end - 1, begin + i);
        uint32_t const word = packed_row[t * words_per_tile + 1 + begin + i - shared.offset[t]];
        shared.column[i] = static_cast<int>(word & 0xffffu);
        shared.value[i] = Element::to_float(static_cast<uint16_t>(word >> 16));
    }
    __syncthreads();
    return count;
}

// The batch of one tile that overflowed. Where it has not been spilled, g is computed again from x, w_gate and b_gate.
// NOTE: sums are then taken in another order than in the gate kernel, so a z within fp32 rounding of the cut may fall
// on its other side. The count found here is used, not the stored one.
template <class Element, class Cfg>
__device__ __forceinline__ int load_overflowed_batch(SharedStorage& shared, Params const& params,
                                                     uint16_t const* spilled_row, uint16_t const* x, int tile_idx) {
    int const column_begin = tile_idx * TWELL_TILE;
    int const num_columns = min(params.d_ff - column_begin, TWELL_TILE);
    if (spilled_row != nullptr) {
        for (int i = threadIdx.x; i < num_columns; i += Cfg::kThreads) {
            shared.tile[i] = spilled_row[column_begin + i];
        }
    } else {
        project<Element, Cfg>(
            x, params.w_gate, params.b_gate, params.d_model, num_columns, [&](int i) { return column_begin + i; },
            [&](int i, float z) { shared.tile[i] = activate<Element>(z, params.act); });
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
        int const lane = threadIdx.x;
        int count = 0;
        for (int i = lane; i < TWELL_TILE; i += kWarpSize) {
            uint16_t const bits = i < num_columns ? shared.tile[i] : static_cast<uint16_t>(0);
            uint32_t const mask = __ballot_sync(0xffffffffu, is_nonzero(bits));
            if (is_nonzero(bits)) {
                int const position = count + __popc(mask & ((1u << lane) - 1u));
                shared.column[position] = column_begin + i;
                shared.value[position] = Element::to_float(bits);
            }
            count += __popc(mask);
        }
        if (lane == 0) {
            shared.num_recomputed = count;
        }
    }
    __syncthreads();
    return shared.num_recomputed;
}

// accumulators += h[n] Wd[n, columns] for `count` <= kRows neurons of the batch, from `begin` on. All loads are issued
// together: past the last neuron and the last column they repeat the last one, and the values are not used.
// NOTE: no condition may stand between a load and its use; the compiler would move the load behind it.
template <class Element, class Cfg, int kRows>
__device__ __forceinline__ void add_rows(float (&accumulators)[Cfg::kVectors][kVector], SharedStorage const& shared,
                                         Params const& params, int const (&columns)[Cfg::kVectors], int begin,
                                         int count) {
    uint4 w_vectors[kRows][Cfg::kVectors];
    float h[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        int const i = begin + min(r, count - 1);
        uint16_t const* const w_row = params.w_down + static_cast<int64_t>(shared.column[i]) * params.d_out;
        h[r] = shared.value[i];
#pragma unroll
        for (int v = 0; v < Cfg::kVectors; ++v) {
            w_vectors[r][v] = load_vector(w_row + min(columns[v], params.d_out - kVector));
        }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int v = 0; v < Cfg::kVectors; ++v) {
            float w_values[kVector];
            unpack<Element>(w_values, w_vectors[r][v]);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                float const sum = fmaf(h[r], w_values[k], accumulators[v][k]);
                accumulators[v][k] = r < count ? sum : accumulators[v][k];
            }
        }
    }
}

template <class Element, class Cfg>
__device__ __forceinline__ void compute_row(SharedStorage& shared, Params const& params, int64_t row_idx) {
    uint16_t const* const spilled_row =
        params.spilled == nullptr ? nullptr : params.spilled + row_idx * params.num_tiles * TWELL_TILE;
    uint16_t const* const x = params.x + row_idx * params.d_model;
    uint16_t* const y = params.y + row_idx * params.d_out;
    uint32_t const* const packed_row =
        params.packed == nullptr
            ? nullptr
            : params.packed + row_idx * (static_cast<int64_t>(params.num_tiles) * params.words_per_tile);
    load_offsets<Cfg>(shared, packed_row, params.num_tiles, params.words_per_tile);

    // Rows of y wider than the registers hold take several passes, each of which computes h again.
    for (int pass_begin = 0; pass_begin < params.d_out; pass_begin += Cfg::kColumns) {
        int columns[Cfg::kVectors];
        float accumulators[Cfg::kVectors][kVector] = {};
#pragma unroll
        for (int v = 0; v < Cfg::kVectors; ++v) {
            columns[v] = pass_begin + (v * Cfg::kThreads + static_cast<int>(threadIdx.x)) * kVector;
        }

        for (int tile_begin = 0; tile_begin < params.num_tiles;) {
            int tile_end =
                last_at_most(shared.offset, tile_begin, params.num_tiles, shared.offset[tile_begin] + kBatch);
            int count;
            if (tile_end > tile_begin) {
                count = load_batch<Element, Cfg>(shared, packed_row, tile_begin, tile_end, params.words_per_tile);
            } else {
                count = load_overflowed_batch<Element, Cfg>(shared, params, spilled_row, x, tile_begin);
                tile_end = tile_begin + 1;
            }
            tile_begin = tile_end;

            // Up projection. NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
            if (params.w_up != nullptr) {
                project<Element, Cfg>(
                    x, params.w_up, params.b_up, params.d_model, count, [&](int i) { return shared.column[i]; },
                    [&](int i, float u) {
                        shared.value[i] *= params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
                    });
                __syncthreads();
            }

            // Down projection
            if (columns[0] < params.d_out) {
                constexpr int kUnroll = 8 / Cfg::kVectors;
                int begin = 0;
                for (; begin + kUnroll <= count; begin += kUnroll) {
                    add_rows<Element, Cfg, kUnroll>(accumulators, shared, params, columns, begin, kUnroll);
                }
                if (begin < count) {
                    add_rows<Element, Cfg, kUnroll>(accumulators, shared, params, columns, begin, count - begin);
                }
            }
            __syncthreads();  // the next batch overwrites this one
        }

        // Epilogue: bias and residual, then the only rounding of y.
#pragma unroll
        for (int v = 0; v < Cfg::kVectors; ++v) {
            if (columns[v] >= params.d_out) {
                continue;
            }
            add_bias_and_residual<Element>(accumulators[v], params, row_idx, columns[v]);
            store_vector<Element>(y + columns[v], accumulators[v]);
        }
    }
}

template <class Element, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kMinBlocks) up_down_kernel(Params const params) {
    __shared__ SharedStorage shared;

    allow_dependent_launch();
    // NOTE: the kernels before have let this one start when the schedule was there.
    uint32_t const num_rows = __ldcg(&params.schedule.header->rest_count);
    if (ends_early(num_rows == 0)) {
        return;
    }
    wait_for_previous_launch();
    for (uint32_t i = blockIdx.x; i < num_rows; i += gridDim.x) {
        compute_row<Element, Cfg>(shared, params, params.schedule.rest_rows[i]);
    }
}

}  // namespace twell::up_down_generic

#endif  // TWELL_KERNELS_UP_DOWN_GENERIC_CUH_

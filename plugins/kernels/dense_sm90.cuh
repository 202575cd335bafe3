// The dense path on Hopper (sm_90a): up and down projections of rows that are too dense for the sparse ones. See
// matmul_sm90.cuh for the products.
//
// Between the steps there is one matrix `hidden` [dense rows, d_ff], in the element type: the gather kernel completes
// it with g, the up projection multiplies it by u in place, the down projection reads it. Which rows are dense is known
// on the device alone: grids are fixed, and CTAs that find nothing to do leave.
//   all rows   hidden is the spilled matrix itself, x is read where it is
//   a part     the gather kernel copies g and x of the dense rows to where they are neighbours
#ifndef TWELL_KERNELS_DENSE_SM90_CUH_
#define TWELL_KERNELS_DENSE_SM90_CUH_

#include "dependent_launch.cuh"
#include "matmul_sm90.cuh"

namespace twell::dense_sm90 {

using namespace matmul_sm90;

// The dense rows, on the device: read them after wait_for_previous_launch(), without __ldg.
struct Rows {
    int32_t const* order;  // [tokens], the dense ones first
    int32_t const* count;  // [1]: how many are dense
    uint8_t* failed;       // [tokens]: of the dense rows, those that the sparse path has to compute again
    int64_t tokens;
};

struct View {
    int count;
    bool all;

    __device__ __forceinline__ explicit View(Rows const& rows)
        : count(*static_cast<int32_t const volatile*>(rows.count)), all(count == rows.tokens) {}

    __device__ __forceinline__ int row_of(Rows const& rows, int position) const {
        return all ? position : *static_cast<int32_t const volatile*>(rows.order + position);
    }
};

// Gather

struct GatherParams {
    Rows rows;
    uint32_t const* packed;  // [tokens, num_tiles * words_per_tile]
    uint16_t* spilled;       // [tokens, num_tiles * TWELL_TILE]
    uint16_t* hidden_part;   // [dense rows, num_tiles * TWELL_TILE]
    uint16_t const* x;       // [tokens, d_model]
    uint16_t* x_part;        // [dense rows, d_model], or null where there is no up projection
    int d_model;
    int num_tiles;
    int words_per_tile;
};

constexpr int kGatherThreads = 256;
// A piece is as long as a tile, and a warp moves several at once.
constexpr int kPiecesAtOnce = 8;

// The columns of a lane, from the count and the entries of a tile with few non-zeros.
__device__ __forceinline__ uint4 expand(uint4 head) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const entries[kMostUnspilled] = {head.y, head.z, head.w};
    uint32_t pairs[kVector / 2] = {};
#pragma unroll
    for (uint32_t e = 0; e < kMostUnspilled; ++e) {
        int const column = static_cast<int>(entries[e] % TWELL_TILE);
        uint32_t const value = (column & 1) != 0 ? entries[e] & 0xffff0000u : entries[e] >> 16;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            pairs[i] |= e < head.x && column / 2 == lane * (kVector / 2) + i ? value : 0u;
        }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Completes or fills kPiecesAtOnce tiles of a row of the hidden matrix, with one warp.
__device__ __forceinline__ void gather_tiles(GatherParams const& params, bool all, int64_t row, int64_t position,
                                             int tile_begin) {
    int const lane = threadIdx.x % kWarpSize;
    int64_t const row_stride = static_cast<int64_t>(params.num_tiles) * TWELL_TILE;
    uint32_t const* const packed_row =
        params.packed + row * (static_cast<int64_t>(params.num_tiles) * params.words_per_tile);
    uint4 const* const source = reinterpret_cast<uint4 const*>(params.spilled + row * row_stride) + lane;
    uint4* const destination =
        reinterpret_cast<uint4*>(all ? params.spilled + row * row_stride : params.hidden_part + position * row_stride) +
        lane;
    uint4 heads[kPiecesAtOnce];
    uint4 pieces[kPiecesAtOnce];
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
        // NOTE: entries past the last one were not written; expand() does not use them.
        heads[i] = tile_begin + i < params.num_tiles
                       ? *reinterpret_cast<uint4 const*>(packed_row + (tile_begin + i) * params.words_per_tile)
                       : make_uint4(UINT32_MAX, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (!all && tile_begin + i < params.num_tiles && heads[i].x > kMostUnspilled) {
            pieces[i] = source[(tile_begin + i) * kWarpSize];
        }
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (heads[i].x <= kMostUnspilled) {
            destination[(tile_begin + i) * kWarpSize] = expand(heads[i]);
        } else if (!all && tile_begin + i < params.num_tiles) {
            destination[(tile_begin + i) * kWarpSize] = pieces[i];
        }
    }
}

__device__ __forceinline__ void gather_x(GatherParams const& params, int64_t row, int64_t position, int piece_begin) {
    int const num_vectors = params.d_model / kVector;
    uint4 const* const source = reinterpret_cast<uint4 const*>(params.x + row * params.d_model);
    uint4* const destination = reinterpret_cast<uint4*>(params.x_part + position * params.d_model);
    int const begin = piece_begin * kWarpSize + static_cast<int>(threadIdx.x % kWarpSize);
    uint4 pieces[kPiecesAtOnce];
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (begin + i * kWarpSize < num_vectors) {
            pieces[i] = source[begin + i * kWarpSize];
        }
    }
#pragma unroll
    for (int i = 0; i < kPiecesAtOnce; ++i) {
        if (begin + i * kWarpSize < num_vectors) {
            destination[begin + i * kWarpSize] = pieces[i];
        }
    }
}

__global__ void __launch_bounds__(kGatherThreads) gather_kernel(GatherParams const params) {
    wait_for_previous_launch();
    allow_dependent_launch();
    View const view(params.rows);
    int const lane = threadIdx.x % kWarpSize;
    int const groups_g = (params.num_tiles + kPiecesAtOnce - 1) / kPiecesAtOnce;
    int const groups_x = view.all || params.x_part == nullptr
                             ? 0
                             : (params.d_model + kPiecesAtOnce * TWELL_TILE - 1) / (kPiecesAtOnce * TWELL_TILE);
    int const groups = groups_g + groups_x;
    int64_t const first = static_cast<int64_t>(blockIdx.x) * (kGatherThreads / kWarpSize) + threadIdx.x / kWarpSize;
    int64_t const step = static_cast<int64_t>(gridDim.x) * (kGatherThreads / kWarpSize);
    for (int64_t item = first; item < static_cast<int64_t>(view.count) * groups; item += step) {
        int const position = static_cast<int>(item / groups);
        int const group = static_cast<int>(item % groups);
        int const row = view.row_of(params.rows, position);
        if (group == 0 && lane == 0) {
            params.rows.failed[row] = 0;
        }
        if (group < groups_g) {
            gather_tiles(params, view.all, row, position, group * kPiecesAtOnce);
        } else {
            gather_x(params, row, position, (group - groups_g) * kPiecesAtOnce);
        }
    }
}

// Projections

struct Params {
    CUtensorMap weights;  // up: w_up [d_ff, d_model]; down: w_down [d_ff, d_out]
    // Of all rows, and of the dense ones: up: x [rows, d_model]; down: hidden [rows, num_tiles of d_ff * TWELL_TILE].
    CUtensorMap tokens[2];
    CUtensorMap hidden[2];  // up only, boxes of [BLOCK_N, kRowElements]
    Rows rows;
    uint16_t const* bias;  // [num_neurons] or null
    uint16_t* y;           // [tokens, num_neurons], down only
    int num_neurons;       // up: d_ff; down: d_out
    int num_tiles;         // of neurons
    int num_slices;
    bool relu_on_up;  // dReLU
};

enum class Projection { kUp, kDown };

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ bool is_finite(float value) { return fabsf(value) < INFINITY; }

// h for a pair of tokens from g and u; where g is 0, so is h, whatever u is.
template <class Element>
__device__ __forceinline__ uint32_t multiply_by_g(uint32_t g_pair, float u0, float u1, bool relu_on_up) {
    float2 const g = Element::to_float2(g_pair);
    if (relu_on_up) {
        u0 = u0 <= 0.0f ? 0.0f : u0;  // NaN is kept
        u1 = u1 <= 0.0f ? 0.0f : u1;
    }
    return Element::from_float2(g.x == 0.0f ? 0.0f : g.x * u0, g.y == 0.0f ? 0.0f : g.y * u1);
}

// Marks the rows that this thread has a sum of that is not finite. One reason is h out of the element type's range,
// another an inactive neuron's weight that is not finite: the contract has no such limit and ignores such a weight, so
// the sparse path must compute these rows.
template <class Cfg>
__device__ __forceinline__ void mark_failed(Params const& params, View const& view, int first_position,
                                            float const (&accumulators)[Cfg::kAccumulators]) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < Cfg::kAccumulators; ++i) {
        finite = finite && is_finite(accumulators[i]);
    }
    if (finite) {
        return;
    }
#pragma unroll
    for (int i = 0; i < Cfg::kAccumulators; ++i) {
        int const position = first_position + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2;
        if (!is_finite(accumulators[i]) && position < view.count) {
            params.rows.failed[view.row_of(params.rows, position)] = 1;
        }
    }
}

// Takes y from shared memory to where it belongs: with one warp every kStep-th pair of rows from `first` on.
template <class Cfg, int kStep>
__device__ __forceinline__ void scatter(Params const& params, View const& view, Tile const& tile, uint32_t rank,
                                        uint32_t result, int first) {
    constexpr int kAtOnce = 4;
    static_assert(kWarpSize == 2 * kChunksPerToken, "a warp moves two tokens' rows at a time");
    int const lane = threadIdx.x % kWarpSize;
    int const chunk = lane % kChunksPerToken;
    int const column = tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M + chunk * kVector;
    int const position_begin = tile.block_idx * Cfg::BLOCK_N;
    int const num_rows = min(view.count - position_begin, Cfg::BLOCK_N);
    bool const inside = column < params.num_neurons;
#pragma unroll 1
    for (int begin = first * 2 + lane / kChunksPerToken; begin < num_rows; begin += kAtOnce * kStep * 2) {
        int rows[kAtOnce];
        uint4 chunks[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            int const i = min(begin + r * kStep * 2, num_rows - 1);
            rows[r] = view.row_of(params.rows, position_begin + i);
            chunks[r] = load_chunk(result + chunk_offset<Cfg>(i, chunk));
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            if (inside && begin + r * kStep * 2 < num_rows) {
                *reinterpret_cast<uint4*>(params.y + static_cast<int64_t>(rows[r]) * params.num_neurons + column) =
                    chunks[r];
            }
        }
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg, Projection kProjection>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    dense_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool kUp = kProjection == Projection::kUp;
    constexpr int kBarrierThreads = 1;  // named, of the consumers
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};
    uint32_t const result = shared.result();
    // Up: `ready` when g is there, `done` when the consumers have made it h.
    // Down: `done` when the consumers have left y, `ready` when the helpers have taken it away.
    uint32_t const ready = shared.more_barrier(0);
    uint32_t const done = shared.more_barrier(1);

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    uint32_t const rank = cluster_rank();

    wait_for_previous_launch();
    allow_dependent_launch();
    View const view(params.rows);
    int const num_blocks = (view.count + Cfg::BLOCK_N - 1) / Cfg::BLOCK_N;
    int const tiles_end = num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;
    if (tiles_begin >= tiles_end) {
        return;  // as does the other CTA of the cluster
    }
    CUtensorMap const& tokens = params.tokens[view.all ? 0 : 1];
    CUtensorMap const& hidden = params.hidden[view.all ? 0 : 1];

    if (threadIdx.x == 0) {
        shared.init_stages();
        init_barrier(ready, kUp ? 1 : kHelpers);
        init_barrier(done, kConsumers * kWarpgroupSize);
        publish_barriers();
        prefetch_map(params.weights);
        prefetch_map(tokens);
    }
    sync_cluster();

    Ring<Cfg::kNumStages> ring;
    uint32_t parity = 0;
    if (warp >= kWarpgroupWarps) {
        // Consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersConsumer));
        int const consumer_warp = warp - kWarpgroupWarps;
        int const consumer = consumer_warp / kWarpgroupWarps;
        for (int i = tiles_begin; i < tiles_end; i += tiles_step, parity ^= 1) {
            Tile const tile(num_blocks, params.num_tiles, i);
            float2 const biases = load_biases<Element>(
                params.bias,
                tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M + consumer_warp * 16 + lane / 4,
                params.num_neurons);
            float accumulators[Cfg::kAccumulators];
            multiply<Element, Cfg, !kUp>(accumulators, shared, ring, consumer, params.num_slices);

            // Epilogue
            if constexpr (kUp) {
                wait_barrier(ready, parity);
                store_result<Cfg, true>(result, accumulators, biases, consumer_warp * 2,
                                        [&](uint32_t g, float u0, float u1) {
                                            return multiply_by_g<Element>(g, u0, u1, params.relu_on_up);
                                        });
                release_to_tma();
                arrive(done);
            } else {
                mark_failed<Cfg>(params, view, tile.block_idx * Cfg::BLOCK_N, accumulators);
                wait_barrier(ready, parity ^ 1);
                store_result<Cfg, false>(
                    result, accumulators, biases, consumer_warp * 2,
                    [](uint32_t, float low, float high) { return Element::from_float2(low, high); });
                if (i + tiles_step < tiles_end) {
                    arrive(done);
                } else {
                    // There is nothing more to multiply, so the consumers take the last tile away.
                    asm volatile("bar.sync %0, %1;" ::"n"(kBarrierThreads), "n"(kConsumers * kWarpgroupSize)
                                 : "memory");
                    scatter<Cfg, kConsumerWarps>(params, view, tile, rank, result, consumer_warp);
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersFirst));
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    load_slices<Cfg, !kUp>(shared, ring, params.weights, tokens, Tile(num_blocks, params.num_tiles, i),
                                           rank, params.num_slices);
                }
            }
        } else if constexpr (kUp) {
            // Helper: brings g, takes h away
            if (warp == 1 && lane == 0) {
                for (int i = tiles_begin; i < tiles_end; i += tiles_step, parity ^= 1) {
                    Tile const tile(num_blocks, params.num_tiles, i);
                    int const column = tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M;
                    int const row = tile.block_idx * Cfg::BLOCK_N;
                    arrive_and_expect(ready, Cfg::kBytesResult);
                    for (int part = 0; part < kConsumers; ++part) {
                        load_box(result + part * Cfg::kBytesResultPart, hidden, ready, column + part * kRowElements,
                                 row);
                    }
                    wait_barrier(done, parity);
                    for (int part = 0; part < kConsumers; ++part) {
                        store_box(hidden, result + part * Cfg::kBytesResultPart, column + part * kRowElements, row);
                    }
                    commit_stores();
                    wait_until_stores_read();
                }
                wait_for_stores();
            }
        } else {
            // Helpers: take y away, of all tiles but the last
            for (int i = tiles_begin; i + tiles_step < tiles_end; i += tiles_step, parity ^= 1) {
                wait_barrier(done, parity);
                scatter<Cfg, kHelpers>(params, view, Tile(num_blocks, params.num_tiles, i), rank, result, warp - 1);
                __syncwarp();
                if (lane == 0) {
                    arrive(ready);
                }
            }
        }
    }
    // The other CTA may still signal this one's barriers.
    __syncwarp();
    sync_cluster();
#endif
}

}  // namespace twell::dense_sm90

#endif  // TWELL_KERNELS_DENSE_SM90_CUH_

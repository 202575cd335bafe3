// The dense path on Hopper (sm_90a): up and down projections of rows that are too dense for the sparse ones. See
// matmul_sm90.cuh for the products.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/sum_again.cuh"
#include "format/active.cuh"
#include "format/pack.cuh"
#include "format/schedule.cuh"
#include "matmul/dense_rows.cuh"
#include "matmul/matmul_sm90.cuh"
#include "matmul/parts_sm90.cuh"

namespace twell::dense_sm90 {

using namespace dense;
using namespace matmul_sm90;

struct Params {
    CUtensorMap weights;  // up: w_up [d_ff, d_model]; down: w_down [d_ff, d_out]
    // Of all rows, and of the dense ones: up: x [rows, d_model]; down: h [rows, num_tiles of d_ff * TWELL_TILE].
    CUtensorMap tokens[2];
    Schedule schedule;
    int64_t num_rows;      // of x and y
    uint16_t const* bias;  // [num_neurons] or null
    PackedGate gate;       // down: h of all rows, in the place of the spilled matrix, and nothing else
    uint16_t* h_part;      // [dense rows, gate.num_tiles * TWELL_TILE]
    BlockTensors block;    // down only
    int num_neurons;       // up: d_ff; down: d_out
    int num_tiles;         // of neurons
    int num_slices;
    int num_parts;    // of each sum: clusters that share the slices, down only
    Parts parts;      // of all tiles
    bool relu_on_up;  // dReLU
    bool all_rows;    // are dense, as the host knows
    // The next launch does not wait for this one if there are dense rows, but for those before: it must not start
    // earlier.
    bool next_overlaps;
    // Of a dense block: the next launch computes y if the decision is so.
    bool may_skip;
    SkippingLimits skipping;
};

// The i-th piece of work of all clusters.
struct Piece {
    Tile tile;
    Slices slices;

    __device__ __forceinline__ Piece(Params const& params, int num_blocks, int i)
        : tile(num_blocks, params.num_tiles, i / params.num_parts),
          slices{params.num_slices * (i % params.num_parts) / params.num_parts,
                 params.num_slices * (i % params.num_parts + 1) / params.num_parts} {}
};

// Adds a warp's part of the residual, 16 columns from first_column on, to its sums.
template <class Element, class Cfg>
__device__ __forceinline__ void add_residual(float (&sums)[Cfg::kAccumulators], Params const& params, View const& view,
                                             Tokens own, uint32_t warp_bytes, int first_column) {
    add_rows<Element, Cfg>(sums, warp_bytes, [&](int token, int chunk) {
        int const column = first_column + chunk * kVector;
        if (!own.has(token) || column >= params.num_neurons) {
            return make_uint4(0, 0, 0, 0);
        }
        int64_t const row = view.row_of(params.schedule, own.begin + token);
        return load_written_vector(params.block.residual + row * params.num_neurons + column);
    });
}

// Stores a warp's part of y, 16 columns from first_column on. Says whether values had to be summed again.
template <class Element, class Cfg, class Round>
__device__ __forceinline__ bool store_y(Params const& params, View const& view, Tokens own, uint32_t warp_bytes,
                                        int first_column, Round round) {
    constexpr int kTurnTokens = kWarpSize / 2;  // that pass_result has at once
    static_assert(Cfg::BLOCK_N <= kTurnTokens * 32, "one mask");
    uint32_t failed = 0;  // turns in which this lane had a value that is not finite
    pass_result<Cfg>(warp_bytes, round, [&](int token, int chunk, uint4 values) {
        int const column = first_column + chunk * kVector;
        if (own.has(token) && column < params.num_neurons) {
            int64_t const row = view.row_of(params.schedule, own.begin + token);
            *reinterpret_cast<uint4*>(params.block.y + row * params.num_neurons + column) = values;
            failed |= is_finite<Element>(values) ? 0 : 1u << token / kTurnTokens;
        }
    });
    uint32_t turns = __reduce_or_sync(0xffffffffu, failed);
    if (turns == 0) {
        return false;
    }
    for (; turns != 0; turns &= turns - 1) {
        int const turn = __ffs(turns) - 1;
        uint32_t const lanes = __ballot_sync(0xffffffffu, (failed >> turn & 1) != 0);
        __syncwarp();  // what is stored again has been stored
        for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
            int const lane = __ffs(rest) - 1;
            int const position = own.begin + turn * kTurnTokens + lane / 2;
            uint16_t const* const h = view.all ? params.gate.spilled : params.h_part;
            sum_again<Element>(params.block, h + position * params.gate.stride(),
                               view.row_of(params.schedule, position), first_column + lane % 2 * kVector);
        }
    }
    return true;
}

// Tells which rows of its share of a block a warp will find spilled: bit i for its i-th two tokens, one mask for each
// of the two.
struct SpilledMasks {
    uint64_t even;
    uint64_t odd;
};

// A warp's share of a block: every kStep-th two tokens from the first-th on. A half of the warp has one of them.
template <class Cfg, int kStep>
__device__ __forceinline__ SpilledMasks find_spilled(Params const& params, View const& view, Tile const& tile,
                                                     int first) {
    constexpr int kMostTurns = (Cfg::BLOCK_N / 2 + kStep - 1) / kStep;
    static_assert(kMostTurns <= 64, "bits of a mask");
    int const lane = threadIdx.x % kWarpSize;
    Tokens const tokens = Tokens::of<Cfg>(tile, 0, view.count);
    int const position_begin = tokens.begin;
    SpilledMasks masks = {};
#pragma unroll
    for (int turn_begin = 0; turn_begin < kMostTurns; turn_begin += kWarpSize) {
        int const i = tokens.skipped + (first + (turn_begin + lane) * kStep) * 2;
        auto const is_spilled = [&](int i) {
            return i < tokens.end &&
                   params.gate.head(view.row_of(params.schedule, position_begin + i), tile.tile_idx)->x >
                       kMostUnspilled;
        };
        masks.even |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, is_spilled(i))) << turn_begin;
        masks.odd |= static_cast<uint64_t>(__ballot_sync(0xffffffffu, is_spilled(i + 1))) << turn_begin;
    }
    return masks;
}

// Brings what multiply_by_g needs of a block from memory to L2, by the helpers.
template <class Cfg>
__device__ __forceinline__ void prefetch_g(Params const& params, View const& view, Tile const& tile, uint32_t rank) {
    Tokens const tokens = Tokens::of<Cfg>(tile, 0, view.count);
    int const position_begin = tokens.begin;
    int const column = tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M;
    for (int i = tokens.skipped + static_cast<int>(threadIdx.x) - kWarpSize; i < tokens.end;
         i += kHelpers * kWarpSize) {
        int64_t const row = view.row_of(params.schedule, position_begin + i);
        uint16_t const* const g = params.gate.spilled + row * params.gate.stride() + column;
        prefetch_line(params.gate.head(row, tile.tile_idx));
        prefetch_line(g);
        prefetch_line(g + kRowElements);
    }
}

// Multiplies a warp's share of the result, u in shared memory, by g: to h. A half of the warp has kAtOnce tokens at
// once.
template <class Element, class Cfg, int kStep, int kAtOnce>
__device__ __forceinline__ void multiply_by_g(Params const& params, View const& view, Tile const& tile, uint32_t rank,
                                              uint32_t result, int first, SpilledMasks masks) {
    static_assert(kWarpSize == 2 * kChunksPerToken, "a warp has two tokens at a time");
    int const lane = threadIdx.x % kWarpSize;
    int const chunk = lane % kChunksPerToken;
    int const column = tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M + chunk * kVector;
    Tokens const tokens = Tokens::of<Cfg>(tile, 0, view.count);
    int const position_begin = tokens.begin;
    uint64_t spilled = lane < kChunksPerToken ? masks.even : masks.odd;
#pragma unroll 1
    for (int begin = tokens.skipped + first * 2 + lane / kChunksPerToken; begin < tokens.end;
         begin += kAtOnce * kStep * 2) {
        int rows[kAtOnce];
        uint4 chunks[kAtOnce];
        auto const index = [&](int r) { return min(begin + r * kStep * 2, tokens.end - 1); };
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            rows[r] = view.row_of(params.schedule, position_begin + index(r));
        }
        PackedGate const& gate = params.gate;
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            chunks[r] = (spilled >> r & 1) != 0
                            ? *reinterpret_cast<uint4 const*>(gate.spilled + rows[r] * gate.stride() + column)
                            : *gate.head(rows[r], tile.tile_idx);
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            if ((spilled >> r & 1) == 0) {
                chunks[r] = expand(chunks[r], static_cast<int>(rank) * kChunksPerToken + chunk);
            }
        }
        spilled >>= kAtOnce;
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            uint4 const u = load_chunk(result + chunk_offset<Cfg>(index(r), chunk));
            chunks[r] = multiply_chunk<Element>(chunks[r], u, params.relu_on_up);
        }
        uint16_t* const h = view.all ? gate.spilled : params.h_part;
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            if (begin + r * kStep * 2 < tokens.end) {
                int64_t const position = position_begin + begin + r * kStep * 2;
                *reinterpret_cast<uint4*>(h + position * gate.stride() + column) = chunks[r];
            }
        }
    }
}

template <class Element, class Cfg, Projection kProjection>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    dense_kernel(__grid_constant__ Params const params) {
    constexpr bool kUp = kProjection == Projection::kUp;
    constexpr int kConsumersBarrier = 1;  // named
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};
    uint32_t const result = shared.result();
    uint32_t const result_stored = shared.more_barrier(0);  // up only: the consumers have left it
    uint32_t const result_empty = shared.more_barrier(1);   // up only: the helpers have read it
    // Where it may skip, whether it does; the answer is in the place of a barrier.
    uint32_t const decided = shared.more_barrier(2);
    uint64_t* const decision = reinterpret_cast<uint64_t*>(shared_bytes + Cfg::kOffsetMoreBarriers) + 3;
    auto const skips = [&] {
        if (kUp || !params.may_skip) {
            return false;
        }
        wait_barrier(decided, 0);
        return *decision != 0;
    };

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    uint32_t const rank = cluster_rank();

    if (threadIdx.x == 0) {
        shared.init_stages();
        init_barrier(result_stored, kConsumers * kWarpgroupSize);
        init_barrier(result_empty, kHelpers);
        init_barrier(decided, 1);
        publish_barriers();
        prefetch_map(params.weights);
        prefetch_map(params.tokens[0]);
        prefetch_map(params.tokens[1]);
    }
    sync_cluster();

    if (!params.next_overlaps) {
        allow_dependent_launch();
    }
    View const view(params.schedule, params.num_rows, params.all_rows);
    if (params.next_overlaps && view.count == 0) {
        allow_dependent_launch();
    }
    if (ends_early(view.count == 0)) {
        return;
    }
    if (!params.all_rows || warp != 0) {  // else the loader waits later
        wait_for_previous_launch();
        if (params.next_overlaps) {
            allow_dependent_launch();
        }
    }
    int const num_blocks = (view.count + Cfg::kTileTokens - 1) / Cfg::kTileTokens;
    int const pieces_end = num_blocks * params.num_tiles * params.num_parts;
    int const pieces_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const pieces_step = static_cast<int>(gridDim.x) / kClusterSize;
    if (pieces_begin >= pieces_end) {
        return;  // as does the other CTA of the cluster
    }
    CUtensorMap const& tokens = params.tokens[view.all ? 0 : 1];

    uint32_t parity = 0;
    if (warp >= kWarpgroupWarps) {
        // Consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersConsumer));
        int const consumer_warp = warp - kWarpgroupWarps;
        int const consumer = consumer_warp / kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        float accumulators[1][Cfg::kAccumulators];
        int const first_piece = skips() ? pieces_end : pieces_begin;
        for (int i = first_piece; i < pieces_end; i += pieces_step, parity ^= 1) {
            auto const [tile, slices] = Piece(params, num_blocks, i);
            int const first_neuron = tile.neuron_of<Cfg>(rank) + consumer_warp * kWarpNeurons;
            Tokens const own = Tokens::of<Cfg>(tile, rank, view.count);
            float2 const biases = load_biases<Element>(params.bias, first_neuron + lane / 4, params.num_neurons);
            multiply<Element, Cfg, !kUp>(accumulators, shared, ring, consumer, slices.count());

            // Epilogue, of the up projection the first part
            if constexpr (kUp) {
                wait_barrier(result_empty, parity ^ 1);
                store_result<Cfg>(result, consumer_warp * 2,
                                  [&](int i) { return round_pair<Element>(accumulators[0], biases, i); });
                if (i + pieces_step < pieces_end) {
                    arrive(result_stored);
                } else {
                    // There is nothing more to multiply, so the consumers do the second part of the last tile.
                    SpilledMasks const masks = find_spilled<Cfg, kConsumerWarps>(params, view, tile, consumer_warp);
                    asm volatile("bar.sync %0, %1;" ::"n"(kConsumersBarrier), "n"(kConsumers * kWarpgroupSize)
                                 : "memory");
                    multiply_by_g<Element, Cfg, kConsumerWarps, 6>(params, view, tile, rank, result, consumer_warp,
                                                                   masks);
                }
            } else {
                int const share = (i / params.num_parts * kClusterSize + static_cast<int>(rank)) * kConsumerWarps;
                if (params.num_parts != 1 && !add_parts(params.parts, params.num_parts, i % params.num_parts,
                                                        share + consumer_warp, accumulators[0])) {
                    continue;
                }
                uint32_t const warp_bytes = result + consumer_warp * Cfg::kBytesWarp;
                if (params.block.residual != nullptr) {
                    add_residual<Element, Cfg>(accumulators[0], params, view, own, warp_bytes, first_neuron);
                }
                bool const summed_again =
                    store_y<Element, Cfg>(params, view, own, warp_bytes, first_neuron,
                                          [&](int i) { return round_pair<Element>(accumulators[0], biases, i); });
                if (summed_again) {
                    // NOTE: else the compiler takes them for needed until the next product, also while values are
                    // summed again, and spills.
#pragma unroll
                    for (int k = 0; k < Cfg::kAccumulators; ++k) {
                        accumulators[0][k] = 0.0f;
                    }
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersFirst));
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, !kUp> loader = {shared,     &params.weights,   tokens, static_cast<int>(rank),
                                            view.count, params.num_neurons};
                int i = pieces_begin;
                bool goes_on = true;
                if (params.all_rows) {
                    Piece const piece(params, num_blocks, i);
                    goes_on =
                        loader.load_first(piece.tile, piece.slices, wait_for_previous_launch, [&] { return !skips(); });
                    i = goes_on ? i + pieces_step : pieces_end;
                }
                for (; i < pieces_end; i += pieces_step) {
                    Piece const piece(params, num_blocks, i);
                    loader.load(piece.tile, piece.slices);
                }
                if (goes_on) {  // else no CTA signals a barrier
                    loader.wait_for_consumers();
                }
            }
        } else if constexpr (!kUp) {
            if (warp == 1 && params.may_skip) {
                bool const taken = is_sparse_enough(params.skipping);
                if (lane == 0) {
                    *decision = taken ? 1 : 0;
                    arrive(decided);
                }
            }
        } else {
            // Helpers: epilogue, second part, of all tiles but the last
            for (int i = pieces_begin; i < pieces_end; i += pieces_step, parity ^= 1) {
                Tile const tile(num_blocks, params.num_tiles, i);
                if (i + pieces_step >= pieces_end) {
                    prefetch_g<Cfg>(params, view, tile, rank);
                    break;
                }
                SpilledMasks const masks = find_spilled<Cfg, kHelpers>(params, view, tile, warp - 1);
                wait_barrier(result_stored, parity);
                multiply_by_g<Element, Cfg, kHelpers, 4>(params, view, tile, rank, result, warp - 1, masks);
                __syncwarp();
                if (lane == 0) {
                    arrive(result_empty);
                }
            }
        }
    }
    if (skips()) {
        __syncwarp();
        meet_cluster();  // the other CTA may still wait for what this one has sent for
    }
}

}  // namespace twell::dense_sm90

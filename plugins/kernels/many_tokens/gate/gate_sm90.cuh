// Gate projection with packing for Hopper (sm_90a). See matmul_sm90.cuh for the product; here the helpers are packers:
// consumers add the bias, round and leave z in shared memory, packers activate, count and pack z of both CTAs while the
// consumers are at the next tile. Each (row, tile) is packed by one warp, so entries come out in column order without
// atomics.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/warps.cuh"
#include "format/pack.cuh"
#include "matmul/matmul_sm90.cuh"

namespace twell::gate_sm90 {

using namespace matmul_sm90;

constexpr int kRowsAtOnce = 4;  // that a warp packs

// Packers need more registers than other helpers, consumers fewer than elsewhere.
constexpr int kRegistersPacker = 120;
constexpr int kRegistersGateConsumer = 192;
static_assert(registers_suffice(kRegistersPacker, kRegistersGateConsumer), "setmaxnreg.inc would wait for ever");

// The scales of x and of weights in FP8; of 16 bits there are none.
template <class Operand>
struct GateScalesOf {
    static constexpr bool kHasScales = false;
    static constexpr float const* gate_scale = nullptr;
};
template <>
struct GateScalesOf<E4m3> {
    static constexpr bool kHasScales = true;
    static constexpr int gate_up_blocks = 0;  // such scales take other routes
    float const* x_scale;                     // [tokens], and one block more that is read, but not used
    float const* gate_scale;                  // see ScalesOf
    int gate_up_step;
};

// Operand: the type of the factors, the element type or E4m3; two E4m3 count as one column below.
template <class Operand>
struct ParamsOf : GateScalesOf<Operand> {
    CUtensorMap x;           // [tokens, d_model], boxes of [kRowsLoaded, BLOCK_K]
    CUtensorMap w_gate;      // [d_ff, d_model], boxes of [BLOCK_M, BLOCK_K]
    uint16_t const* b_gate;  // [d_ff] or null
    uint32_t* packed;        // [tokens, num_tiles * words_per_tile]
    uint16_t* spilled;       // [tokens, num_tiles * TWELL_TILE] or null: see pack.cuh
    // Where a tile's number of non-zeros goes, 16 bits: counts_bias plus the address of the tile's words >>
    // counts_shift, which takes fewer registers than two pointers. 0: nowhere.
    uint64_t counts_bias;
    uint32_t* counted;  // [CTAs]: the sum of what pack_rows gives; or null
    uint32_t* cleared;  // [num_cleared]: becomes 0
    int num_cleared;
    int64_t tokens;
    int d_model;
    int d_ff;
    int num_tiles;
    int num_blocks;  // of tokens
    int words_per_tile;
    int counts_shift;
    Activation act;
};

// Which of a lane's columns of a tile exist, and their cuts. NOTE: a NaN or infinity in x makes even zero-filled
// weights give NaN, so columns outside are masked by index.
struct Columns {
    uint32_t pairs[kVector / 2];
    uint32_t cuts[kVector / 2];
    uint32_t mask;  // bit i: the i-th

    // Those that a lane has of the num_columns that a tile has, or more.
    template <class Element>
    __device__ __forceinline__ static Columns of(uint32_t cut, float const* cuts, int num_columns, int d_ff) {
        Columns columns(num_columns);
        int const first = d_ff - num_columns + static_cast<int>(threadIdx.x % kWarpSize) * kVector;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            columns.cuts[i] = cuts_of_pair<Element>(cut, cuts, first + 2 * i, d_ff);
        }
        return columns;
    }

  private:
    __device__ __forceinline__ explicit Columns(int num_columns) {
        int const left = max(num_columns - static_cast<int>(threadIdx.x % kWarpSize) * kVector, 0);
        mask = (1u << min(left, kVector)) - 1;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            pairs[i] = 2 * i + 1 < left ? 0xffffffffu : 2 * i < left ? 0xffffu : 0u;
        }
    }
};

// Activates what a lane has of a row. kSquare: z^2, which may be 0; z itself is not, where z > cut.
template <class Element, bool kSquare>
__device__ __forceinline__ Octet activate_octet(uint4 chunk, Columns const& columns) {
    uint32_t const z[kVector / 2] = {chunk.x, chunk.y, chunk.z, chunk.w};
    Octet octet;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
        uint32_t const active = Element::not_at_most2(z[i], columns.cuts[i]);
        octet.pairs[i] = (kSquare ? Element::multiply2(z[i], z[i]) : z[i]) & active & columns.pairs[i];
        bits |= active & 0x10001u << 2 * i;
    }
    octet.mask = kSquare ? find_nonzeros(make_uint4(octet.pairs[0], octet.pairs[1], octet.pairs[2], octet.pairs[3]))
                         : (bits | bits >> 15) & columns.mask;
    return octet;
}

// Packs, with one warp, every kStep-th row of a block from `first` on. Half of the lanes read z of either CTA. Gives
// the sum of what pack_rows does.
template <class Element, class Cfg, int kStep, class Params>
__device__ __forceinline__ uint32_t pack_block(Params const& params, int i, uint32_t z, int first) {
    constexpr int N = Cfg::BLOCK_N;
    Tile const tile(params.num_blocks, params.num_tiles, i);
    int const lane = threadIdx.x % kWarpSize;
    int const column_begin = tile.tile_idx * TWELL_TILE;
    Columns const columns =
        Columns::of<Element>(params.act.cut, params.act.cuts, params.d_ff - column_begin, params.d_ff);
    int const words_per_row = params.num_tiles * params.words_per_tile;
    int const spilled_per_row = params.num_tiles * TWELL_TILE;
    Tokens const tokens = Tokens::of<Cfg>(tile, 0, static_cast<int>(params.tokens));
    int64_t const token_begin = tokens.begin;
    uint32_t* const block_words = params.packed + token_begin * words_per_row + tile.tile_idx * params.words_per_tile;
    uint16_t* const block_spilled =
        params.spilled == nullptr ? nullptr : params.spilled + token_begin * spilled_per_row + column_begin;
    uint32_t const source = address_in_cta(z, lane / kChunksPerToken);
    // The first rows' places; the next ones' have the same offsets from these, up to the last row.
    static_assert(kStep * kRowsAtOnce % kRowsPerSwizzle == 0, "rows of the same swizzle");
    uint32_t sources[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) {
        sources[r] = source + chunk_offset<Cfg>(tokens.skipped + first + r * kStep, lane % kChunksPerToken);
    }
    uint32_t const last = source + chunk_offset<Cfg>(N - 1, lane % kChunksPerToken);
    uint32_t counted = 0;
#pragma unroll 1
    for (int begin = tokens.skipped + first; begin < tokens.end; begin += kStep * kRowsAtOnce) {
        Octet octets[kRowsAtOnce];
        uint4 chunks[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            chunks[r] = load_chunk_of_cluster(min(sources[r], last));
            sources[r] += kStep * kRowsAtOnce * kBytesRow;
        }
        if (params.act.square) {
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                octets[r] = activate_octet<Element, true>(chunks[r], columns);
            }
        } else {
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                octets[r] = activate_octet<Element, false>(chunks[r], columns);
            }
        }
        counted += pack_rows(
            octets, (tokens.end - begin + kStep - 1) / kStep, block_words + begin * words_per_row,
            kStep * words_per_row, block_spilled == nullptr ? nullptr : block_spilled + begin * spilled_per_row,
            kStep * spilled_per_row, column_begin & (TWELL_MAX_PACKED_D_FF - 1), params.words_per_tile - 1,
            [&](uint32_t const* words, int count) {
                if (params.counts_bias != 0) {
                    *reinterpret_cast<uint16_t*>(params.counts_bias +
                                                 (reinterpret_cast<uint64_t>(words) >> params.counts_shift)) =
                        static_cast<uint16_t>(count);
                }
            });
    }
    return counted;
}

// round_pair of sums that have scales: `scales`, of a thread's two neurons, and those of the tokens, whose first one's
// is `x_scale`.
template <class Element, int kAccumulators>
__device__ __forceinline__ uint32_t round_scaled_pair(float const (&accumulators)[kAccumulators], float2 scales,
                                                      float2 biases, float const* x_scale, int i) {
    float const* const of_pair = x_scale + i / 4 * 8 + threadIdx.x % 4 * 2;
    float const scale = i % 4 == 0 ? scales.x : scales.y;
    float const bias = i % 4 == 0 ? biases.x : biases.y;
    return Element::from_float2(fmaf(accumulators[i], scale * of_pair[0], bias),
                                fmaf(accumulators[i + 1], scale * of_pair[1], bias));
}

template <class Element, class Operand, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    gate_kernel(__grid_constant__ ParamsOf<Operand> const params) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};
    uint32_t const z = shared.result();
    // z is stored when this CTA's consumers have left it, full when both CTAs' is stored, and empty when the packers of
    // both CTAs have read it.
    uint32_t const z_stored = shared.more_barrier(0);
    uint32_t const z_full = shared.more_barrier(1);
    uint32_t const z_empty = shared.more_barrier(2);
    uint32_t const counted = shared.more_barrier(3);  // a word in the place of a barrier

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    uint32_t const rank = cluster_rank();

    if (threadIdx.x == 0) {
        shared.init_stages();
        init_barrier(z_stored, kConsumers * kWarpgroupSize);
        init_barrier(z_full, kClusterSize);
        init_barrier(z_empty, kClusterSize * kHelpers);
        store_shared_word(counted, 0);
        publish_barriers();
        prefetch_map(params.x);
        prefetch_map(params.w_gate);
    }
    sync_cluster();
    wait_for_previous_launch();
    allow_dependent_launch();

    int const num_slices = params.d_model / BLOCK_K;
    int const tiles_end = params.num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;

    int last = 0;  // tile
    uint32_t own_counted = 0;
    if (warp >= kWarpgroupWarps) {
        // Consumers
        take_registers<kRegistersGateConsumer>();
        int const consumer_warp = warp - kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        uint32_t z_parity = 0;
        int i = tiles_begin;
        while (true) {
            Tile const tile(params.num_blocks, params.num_tiles, i);
            int const neuron =
                tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M + consumer_warp * 16 + lane / 4;
            float2 const biases = load_biases<Element>(params.b_gate, neuron, params.d_ff);
            float accumulators[1][Cfg::kAccumulators];
            multiply<Operand, Cfg, false>(accumulators, shared, ring, consumer_warp / kWarpgroupWarps, num_slices);

            // Epilogue, first part
            wait_barrier(z_empty, z_parity ^ 1);
            if constexpr (ParamsOf<Operand>::kHasScales) {
                // Those of neurons that are not there are any other one's.
                float2 const scales =
                    make_float2(scale_sum(params, params.gate_scale, 1.0f, min(neuron, params.d_ff - 1)),
                                scale_sum(params, params.gate_scale, 1.0f, min(neuron + 8, params.d_ff - 1)));
                float const* const x_scale =
                    params.x_scale + Tokens::of<Cfg>(tile, 0, static_cast<int>(params.tokens)).begin;
                store_result<Cfg>(z, consumer_warp * 2, [&](int i) {
                    return round_scaled_pair<Element>(accumulators[0], scales, biases, x_scale, i);
                });
            } else {
                store_result<Cfg>(z, consumer_warp * 2,
                                  [&](int i) { return round_pair<Element>(accumulators[0], biases, i); });
            }
            if (i + tiles_step >= tiles_end) {
                break;
            }
            arrive(z_stored);
            i += tiles_step;
            z_parity ^= 1;
        }
        last = i;
        sync_cluster();
    } else {
        give_registers<kRegistersPacker>();
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, false> loader = {
                    shared,     &params.w_gate, params.x, static_cast<int>(rank), static_cast<int>(params.tokens),
                    params.d_ff};
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    loader.load(Tile(params.num_blocks, params.num_tiles, i), {0, num_slices});
                }
                loader.wait_for_consumers();
            }
            __syncwarp();
        } else {
            constexpr int kPackerThreads = kHelpers * kWarpSize;
            for (int i = static_cast<int>(blockIdx.x) * kPackerThreads + static_cast<int>(threadIdx.x) - kWarpSize;
                 i < params.num_cleared; i += static_cast<int>(gridDim.x) * kPackerThreads) {
                params.cleared[i] = 0;
            }
            // Packers: epilogue, second part, of all tiles but the last
            uint32_t z_parity = 0;
            int i = tiles_begin;
            for (; i + tiles_step < tiles_end; i += tiles_step, z_parity ^= 1) {
                if (warp == 1) {
                    wait_barrier(z_stored, z_parity);
                    if (lane < kClusterSize) {
                        release_to_cta(z_full, lane);
                    }
                    __syncwarp();
                }
                wait_for_cluster(z_full, z_parity);
                own_counted += pack_block<Element, Cfg, kClusterSize * kHelpers>(
                    params, i, z, static_cast<int>(rank) * kHelpers + warp - 1);
                __syncwarp();
                if (lane < kClusterSize) {
                    arrive_at_cta(z_empty, lane);
                }
            }
            last = i;
        }
        meet_cluster();
    }
    // There is nothing more to multiply, so all but the loader pack the last tile.
    constexpr int kLastPackers = kHelpers + kConsumerWarps;
    if (warp != 0) {
        own_counted += pack_block<Element, Cfg, kClusterSize * kLastPackers>(
            params, last, z, static_cast<int>(rank) * kLastPackers + warp - 1);
        if (lane == 0) {
            add_to_shared_word(counted, own_counted);
        }
    }
    __syncthreads();
    if (params.counted != nullptr && threadIdx.x == 0) {
        params.counted[blockIdx.x] = load_shared_word(counted);
    }
    meet_cluster();  // the other CTA may still read this one's z
}

}  // namespace twell::gate_sm90

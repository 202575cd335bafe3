// The dense path on Hopper (sm_90a): up and down projections of rows that are too dense for the sparse ones. See
// matmul_sm90.cuh for the products.
#pragma once

#include <type_traits>

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/sum_again.cuh"
#include "device/warps.cuh"
#include "format/active.cuh"
#include "format/pack.cuh"
#include "format/schedule.cuh"
#include "matmul/dense_rows.cuh"
#include "matmul/matmul_sm90.cuh"
#include "matmul/parts_sm90.cuh"

namespace twell::dense_sm90 {

using namespace dense;
using namespace matmul_sm90;

constexpr int kRegistersBytesHelper = 104;
constexpr int kRegistersBytesUp = 200;
constexpr int kRegistersBytesLoader = 40;
constexpr int kRegistersBytesDown = 232;
static_assert(registers_suffice(kRegistersBytesHelper, kRegistersBytesUp) &&
                  registers_suffice(kRegistersBytesLoader, kRegistersBytesDown),
              "setmaxnreg.inc would wait for ever");

// Of FP8 weights: h in FP8, too, each row with a scale for BLOCK_M neurons: see hidden_sm90.cuh.
template <class Stored>
struct BytesOf {};
template <>
struct BytesOf<E4m3> {
    CUtensorMap h_scales;  // [parts of tiles of d_ff, rows], boxes of [1, tokens of a CTA]
    uint8_t* h;            // [rows, num_tiles of d_ff * TWELL_TILE]
    int64_t h_stride;
    float* h_scale;  // as above, rows h_scale_stride apart
    int64_t h_scale_stride;
    float const* x_scale;  // up: of all rows
    bool is_bf16;          // the element type of all else
};

// Stored: of weights, uint16_t for those of the element type, or E4m3; two E4m3 count as one column of `weights` and
// `tokens`.
template <class Stored>
struct ParamsOf : BytesOf<Stored> {
    CUtensorMap weights;  // up: w_up [d_ff, d_model]; down: w_down [d_ff, d_out]
    // Of all rows, and of the dense ones: up: x [rows, d_model]; down: h [rows, num_tiles of d_ff * TWELL_TILE].
    CUtensorMap tokens[2];
    Schedule schedule;
    int64_t num_rows;              // of x and y
    uint16_t const* bias;          // [num_neurons] or null
    PackedGate gate;               // down: h of all rows, in the place of the spilled matrix, and nothing else
    uint16_t* h_part;              // [dense rows, gate.num_tiles * TWELL_TILE]
    BlockTensorsOf<Stored> block;  // down only
    int num_neurons;               // up: d_ff; down: d_out
    int num_tiles;                 // of neurons
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
using Params = ParamsOf<uint16_t>;

// The i-th piece of work of all clusters.
struct Piece {
    Tile tile;
    Slices slices;

    template <class Params>
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

// The same for sums of multiply_scaled.
template <class Cfg>
__device__ __forceinline__ void add_residual(float (&sums)[Cfg::kAccumulators], ParamsOf<E4m3> const& params,
                                             View const& view, Tokens own, int first_column) {
    constexpr int kAtOnce = 8;  // pairs of columns, of a token each
    int const lane = threadIdx.x % kWarpSize;
    int const column = first_column + lane / 4 * 2;
#pragma unroll
    for (int begin = 0; begin < Cfg::kAccumulators / 2; begin += kAtOnce) {
        uint32_t pairs[kAtOnce] = {};
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            int const token = (begin + r) / 2 * 8 + lane % 4 * 2 + r % 2;
            if (begin + r < Cfg::kAccumulators / 2 && own.has(token) && column < params.num_neurons) {
                int64_t const row = view.row_of(params.schedule, own.begin + token);
                pairs[r] = __ldcg(
                    reinterpret_cast<uint32_t const*>(params.block.residual + row * params.num_neurons + column));
            }
        }
        with_element(params.is_bf16, [&](auto element) {
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                int const i = (begin + r) / 2 * 4 + r % 2;
                if (i < Cfg::kAccumulators) {
                    float2 const pair = decltype(element)::to_float2(pairs[r]);
                    sums[i] += pair.x;
                    sums[i + 2] += pair.y;
                }
            }
        });
    }
}

// Multiplies sums of multiply_scaled by the scales of their columns, if these have any, and adds the biases.
template <class Cfg>
__device__ __forceinline__ void scale_and_add_biases(float (&sums)[Cfg::kAccumulators], ParamsOf<E4m3> const& params,
                                                     int first_column) {
    int const column = first_column + static_cast<int>(threadIdx.x) % kWarpSize / 4 * 2;
    if (column >= params.num_neurons) {
        return;
    }
    float2 scales = make_float2(1.0f, 1.0f);
    if (params.block.by_output) {
        scales = make_float2(params.block.down_scale[column], params.block.down_scale[column + 1]);
    }
    float2 biases = make_float2(0.0f, 0.0f);
    if (params.bias != nullptr) {
        uint32_t const pair = *reinterpret_cast<uint32_t const*>(params.bias + column);
        biases = with_element(params.is_bf16, [&](auto element) { return decltype(element)::to_float2(pair); });
    }
#pragma unroll
    for (int i = 0; i < Cfg::kAccumulators; ++i) {
        sums[i] = i % 4 < 2 ? fmaf(sums[i], scales.x, biases.x) : fmaf(sums[i], scales.y, biases.y);
    }
}

// Computes the y of a row and kVector columns again, of the row at a position of the dense ones.
template <class Element>
__device__ __forceinline__ void sum_at_again(Params const& params, View const& view, int position, int column) {
    uint16_t const* const h = view.all ? params.gate.spilled : params.h_part;
    sum_again<Element>(params.block, h + position * params.gate.stride(), view.row_of(params.schedule, position),
                       column);
}
template <class>
__device__ __forceinline__ void sum_at_again(ParamsOf<E4m3> const& params, View const& view, int position, int column) {
    sum_again(params.block, params.is_bf16, params.h + position * params.h_stride, params.h_scale + position,
              params.h_scale_stride, view.row_of(params.schedule, position), column);
}

// Stores a warp's part of y, 16 columns from first_column on: pass(store) calls store(token, chunk, values) as
// pass_result does. Says whether values had to be summed again.
template <class Element, class Cfg, class Params, class Pass>
__device__ __forceinline__ bool store_y(Params const& params, View const& view, Tokens own, int first_column,
                                        Pass pass) {
    constexpr int kTurnTokens = kWarpSize / 2;  // that pass_result has at once
    static_assert(Cfg::BLOCK_N <= kTurnTokens * 32, "one mask");
    uint32_t failed = 0;  // turns in which this lane had a value that is not finite
    pass([&](int token, int chunk, uint4 values) {
        int const column = first_column + chunk * kVector;
        if (own.has(token) && column < params.num_neurons) {
            int64_t const row = view.row_of(params.schedule, own.begin + token);
            *reinterpret_cast<uint4*>(params.block.y + row * params.num_neurons + column) = values;
            auto const is_good = [&](auto element) { return is_finite<decltype(element)>(values); };
            bool good = false;
            if constexpr (std::is_same_v<Element, E4m3>) {
                good = with_element(params.is_bf16, is_good);
            } else {
                good = is_good(Element());
            }
            failed |= good ? 0 : 1u << token / kTurnTokens;
        }
    });
    uint32_t turns = __reduce_or_sync(0xffffffffu, failed);
    if (turns == 0) {
        return false;
    }
    for (; turns != 0; turns &= turns - 1) {
        int const turn = __ffs(turns) - 1;
        uint32_t const lanes = __ballot_sync(0xffffffffu, (failed >> turn & 1) != 0);
        __syncwarp();  // after the first store of these values
        for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
            int const lane = __ffs(rest) - 1;
            sum_at_again<Element>(params, view, own.begin + turn * kTurnTokens + lane / 2,
                                  first_column + lane % 2 * kVector);
        }
    }
    return true;
}

// Tells a warp which rows in its share of a block are spilled: bit i for its i-th two tokens, one mask for each of the
// two.
struct SpilledMasks {
    uint64_t even;
    uint64_t odd;
};

// A warp's share of a block: every kStep-th two tokens from the first-th on. A half of the warp has one of them.
template <class Cfg, int kStep, class Params>
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
template <class Cfg, class Params>
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

// The same with FP8 weights: the result, in bf16 whatever the element type is, lacks the scale of x and the
// bias, and h becomes bytes as in hidden_sm90.cuh.
template <class, class Cfg, int kStep, int kAtOnce>
__device__ __forceinline__ void multiply_by_g(ParamsOf<E4m3> const& params, View const& view, Tile const& tile,
                                              uint32_t rank, uint32_t result, int first, SpilledMasks masks) {
    constexpr float kLargest = 448.0f;
    int const lane = threadIdx.x % kWarpSize;
    int const chunk = lane % kChunksPerToken;
    uint32_t const half = 0xffffu << (lane / kChunksPerToken * kChunksPerToken);  // lanes of a token
    int const part = tile.tile_idx * kClusterSize + static_cast<int>(rank);
    int const column = part * BLOCK_M + chunk * kVector;
    Tokens const tokens = Tokens::of<Cfg>(tile, 0, view.count);
    uint64_t spilled = lane < kChunksPerToken ? masks.even : masks.odd;
    float biases[kVector] = {};
    float h_scales[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        int const neuron = min(column + k, params.num_neurons - 1);
        if (params.bias != nullptr) {
            biases[k] = with_element(params.is_bf16,
                                     [&](auto element) { return decltype(element)::to_float(params.bias[neuron]); });
        }
        h_scales[k] = scale_h(params.block, 1.0f, neuron);
    }
    PackedGate const& gate = params.gate;
#pragma unroll 1
    for (int begin = tokens.skipped + first * 2 + lane / kChunksPerToken; begin < tokens.end;
         begin += kAtOnce * kStep * 2) {
        int64_t rows[kAtOnce];
        uint4 loaded[kAtOnce];
        float x_scales[kAtOnce];
        auto const index = [&](int r) { return min(begin + r * kStep * 2, tokens.end - 1); };
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            rows[r] = view.row_of(params.schedule, tokens.begin + index(r));
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            loaded[r] = (spilled >> r & 1) != 0
                            ? *reinterpret_cast<uint4 const*>(gate.spilled + rows[r] * gate.stride() + column)
                            : *gate.head(rows[r], tile.tile_idx);
            x_scales[r] = __ldcg(params.x_scale + rows[r]);
        }
        float h[kAtOnce][kVector];  // at first g
        float most[kAtOnce] = {};
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            if ((spilled >> r & 1) == 0) {
                loaded[r] = expand(loaded[r], static_cast<int>(rank) * kChunksPerToken + chunk);
            }
        }
        with_element(params.is_bf16, [&](auto element) {
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                unpack<decltype(element)>(h[r], loaded[r]);
            }
        });
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            float u[kVector];
            unpack<Bf16>(u, load_chunk(result + chunk_offset<Cfg>(index(r), chunk)));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                float const whole = fmaf(u[k], x_scales[r], biases[k]);
                float const g = h[r][k];
                float const value =
                    g * (params.relu_on_up && whole <= 0.0f ? 0.0f : whole) * h_scales[k];  // NaN is kept
                h[r][k] = g == 0.0f ? 0.0f : value == 0.0f ? -0.0f : value;
                most[r] = fmaxf(most[r], fabsf(h[r][k]));  // of a NaN the other one
            }
        }
        spilled >>= kAtOnce;
#pragma unroll
        for (int distance = 1; distance < kChunksPerToken; distance *= 2) {
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                most[r] = fmaxf(most[r], __shfl_xor_sync(half, most[r], distance));
            }
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            float const scale = fmaxf(most[r] / kLargest, 1e-30f);
            float const inverse = 1.0f / scale;
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                h[r][k] = to_be_rounded(h[r][k], inverse);
            }
            uint32_t const own[2] = {to_e4m3(h[r][0], h[r][1], h[r][2], h[r][3]),
                                     to_e4m3(h[r][4], h[r][5], h[r][6], h[r][7])};
            // Two lanes have 16 neurons, 0 to 7 and 8 to 15, and each stores those of half of the pairs.
            bool const is_even = lane % 2 == 0;
            uint32_t const other = __shfl_xor_sync(half, is_even ? own[1] : own[0], 1);
            uint32_t const low = is_even ? own[0] : other;
            uint32_t const high = is_even ? other : own[1];
            int64_t const position = tokens.begin + index(r);
            if (begin + r * kStep * 2 < tokens.end) {
                *reinterpret_cast<uint2*>(params.h + position * params.h_stride + column) =
                    make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
                if (chunk == 0) {
                    params.h_scale[part * params.h_scale_stride + position] = scale;
                }
            }
        }
    }
}

template <class Element, class Stored, class Cfg, Projection kProjection>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    dense_kernel(__grid_constant__ ParamsOf<Stored> const params) {
    constexpr bool kUp = kProjection == Projection::kUp;
    constexpr bool kBytes = sizeof(Stored) == 1;
    // Of bytes consumers hold sums and products, and helpers work out scales.
    constexpr int kRegistersFewer = !kBytes ? kRegistersFirst : kUp ? kRegistersBytesHelper : kRegistersBytesLoader;
    constexpr int kRegistersMore = !kBytes ? kRegistersConsumer : kUp ? kRegistersBytesUp : kRegistersBytesDown;
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
        take_registers<kRegistersMore>();
        int const consumer_warp = warp - kWarpgroupWarps;
        int const consumer = consumer_warp / kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        float accumulators[1][Cfg::kAccumulators];
        int const first_piece = skips() ? pieces_end : pieces_begin;
        for (int i = first_piece; i < pieces_end; i += pieces_step, parity ^= 1) {
            auto const [tile, slices] = Piece(params, num_blocks, i);
            int const first_neuron = tile.neuron_of<Cfg>(rank) + consumer_warp * kWarpNeurons;
            Tokens const own = Tokens::of<Cfg>(tile, rank, view.count);
            float2 biases;  // but of bytes
            if constexpr (!kBytes) {
                biases = load_biases<Element>(params.bias, first_neuron + lane / 4, params.num_neurons);
            }
            if constexpr (kBytes && !kUp) {
                static_assert(BLOCK_M == TWELL_SCALE_BLOCK_SIZE,
                              "a CTA's columns lie in one block, and so does a slice");
                int const blocks = params.block.down_blocks;
                float const* const scales = blocks == 0
                                                ? nullptr
                                                : params.block.down_scale + int64_t{slices.begin} * blocks +
                                                      min(tile.neuron_of<Cfg>(rank), params.num_neurons - 1) / BLOCK_M;
                multiply_scaled<Cfg>(accumulators[0], shared, ring, consumer_warp, slices.count(), scales, blocks);
            } else {
                multiply<Element, Cfg, !kUp>(accumulators, shared, ring, consumer, slices.count());
            }

            // Epilogue, of the up projection the first part
            if constexpr (kUp) {
                wait_barrier(result_empty, parity ^ 1);
                if constexpr (kBytes) {
                    int const neuron = first_neuron + lane / 4;
                    float const* const up_scale = params.block.up_scale;
                    int const last = params.num_neurons - 1;
                    float const scales[2] = {scale_sum(params.block, up_scale, 1.0f, min(neuron, last)),
                                             scale_sum(params.block, up_scale, 1.0f, min(neuron + 8, last))};
                    store_result<Cfg>(result, consumer_warp * 2, [&](int i) {
                        float const scale = scales[i % 4 / 2];
                        return Bf16::from_float2(accumulators[0][i] * scale, accumulators[0][i + 1] * scale);
                    });
                } else {
                    store_result<Cfg>(result, consumer_warp * 2,
                                      [&](int i) { return round_pair<Element>(accumulators[0], biases, i); });
                }
                if (i + pieces_step < pieces_end) {
                    arrive(result_stored);
                } else {
                    // There is nothing more to multiply, so the consumers do the second part of the last tile.
                    SpilledMasks const masks = find_spilled<Cfg, kConsumerWarps>(params, view, tile, consumer_warp);
                    sync_some_threads<kConsumersBarrier, kConsumers * kWarpgroupSize>();
                    multiply_by_g<Element, Cfg, kConsumerWarps, kBytes ? 2 : 6>(params, view, tile, rank, result,
                                                                                consumer_warp, masks);
                }
            } else {
                int const share = (i / params.num_parts * kClusterSize + static_cast<int>(rank)) * kConsumerWarps;
                if (params.num_parts != 1 && !add_parts(params.parts, params.num_parts, i % params.num_parts,
                                                        share + consumer_warp, accumulators[0])) {
                    continue;
                }
                uint32_t const warp_bytes = result + consumer_warp * Cfg::kBytesWarp;
                bool summed_again;
                if constexpr (kBytes) {
                    scale_and_add_biases<Cfg>(accumulators[0], params, first_neuron);
                    if (params.block.residual != nullptr) {
                        add_residual<Cfg>(accumulators[0], params, view, own, first_neuron);
                    }
                    uint32_t pairs[Cfg::kAccumulators / 2];  // of neighbouring columns
                    with_element(params.is_bf16, [&](auto element) {
#pragma unroll
                        for (int i = 0; i < Cfg::kAccumulators; i += 4) {
                            for (int t = 0; t < 2; ++t) {
                                pairs[i / 2 + t] =
                                    decltype(element)::from_float2(accumulators[0][i + t], accumulators[0][i + t + 2]);
                            }
                        }
                    });
                    summed_again = store_y<Element, Cfg>(params, view, own, first_neuron, [&](auto store) {
                        pass_pairs<Cfg>(warp_bytes, [&](int low, int) { return pairs[low / 4 * 2 + low % 4]; }, store);
                    });
                } else {
                    if (params.block.residual != nullptr) {
                        add_residual<Element, Cfg>(accumulators[0], params, view, own, warp_bytes, first_neuron);
                    }
                    summed_again = store_y<Element, Cfg>(params, view, own, first_neuron, [&](auto store) {
                        pass_result<Cfg>(
                            warp_bytes, [&](int i) { return round_pair<Element>(accumulators[0], biases, i); }, store);
                    });
                }
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
        give_registers<kRegistersFewer>();
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, !kUp> loader = {shared,     &params.weights,   tokens, static_cast<int>(rank),
                                            view.count, params.num_neurons};
                if constexpr (kBytes && !kUp) {
                    loader.token_scales = &params.h_scales;
                }
                bool goes_on = true;
                for (int i = pieces_begin; i < pieces_end; i += pieces_step) {
                    Piece piece(params, num_blocks, i);
                    if (i == pieces_begin && params.all_rows) {
                        goes_on = loader.load_first(piece.tile, piece.slices, wait_for_previous_launch,
                                                    [&] { return !skips(); });
                        if (!goes_on) {
                            break;
                        }
                    }
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

// The hidden activations of a dense block on Hopper (sm_90a): h = act(x Wg^T + bg) * (x Wu^T + bu) for all rows, in one
// kernel. See matmul_sm90.cuh for the product; here a consumer multiplies the same tokens by the same neurons of both
// matrices, so that it has both factors of h in its registers.
//
// Of FP8 weights x has been rounded to FP8, too (quantise.cuh), and so is h: each row with a scale for
// each CTA's part of a tile, BLOCK_M neurons, which is a slice of the down projection. 16 neurons lie in the order that
// multiply_scaled() wants.
#pragma once

#include "device/block.cuh"
#include "device/block_scales.cuh"
#include "device/dependent_launch.cuh"
#include "device/warps.cuh"
#include "format/active.cuh"
#include "matmul/matmul_sm90.cuh"

namespace twell::hidden_sm90 {

using namespace matmul_sm90;

// Registers a thread: two products of up to 176 tokens take 176 of a consumer's.
constexpr int kRegistersLoader = 40;
constexpr int kRegistersMultiplier = 232;
static_assert(registers_suffice(kRegistersLoader, kRegistersMultiplier), "setmaxnreg.inc would wait for ever");

// Of FP8 alone.
template <class Stored>
struct BytesOf {};
template <>
struct BytesOf<E4m3> : ScalesOf<E4m3> {
    float const* x_scale;  // [tokens], and one block more that is read, but not used
    uint8_t* h_bytes;      // [tokens, d_ff], rows `stride` apart: takes the place of h
    float* h_scale;        // [parts of tiles, tokens], rows h_scale_stride apart
    int64_t h_scale_stride;
};

// Stored: of weights, uint16_t for those of the element type, or E4m3; two E4m3 count as one column below.
template <class Stored>
struct ParamsOf : BytesOf<Stored> {
    CUtensorMap x;           // [tokens, d_model], boxes of [kRowsLoaded, BLOCK_K]
    CUtensorMap weights[2];  // w_gate and, in a gated block, w_up: [d_ff, d_model], boxes of
                             // [kWeightRowsLoaded, BLOCK_K]
    uint16_t* h;             // [tokens, d_ff], rows `stride` apart
    int64_t stride;
    Active active;           // masks may be null: then nothing of it is left
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* b_up;    // [d_ff] or null
    uint32_t* part_states;   // [num_part_states], which become 0: see parts_sm90.cuh
    int num_part_states;
    int64_t tokens;
    int d_ff;
    int num_slices;
    int num_tiles;
    int num_blocks;  // of tokens
    Activation act;
    uint32_t up_cut;     // a pair of elements: u is 0 where u <= up_cut, a NaN if never
    void const* w_down;  // the next kernel's; its first bytes are brought to L2
    uint32_t prefetched_bytes;
};
using Params = ParamsOf<uint16_t>;

// Whether a configuration can leave which neurons are active: blocks of more tokens are for calls that do not ask.
constexpr bool leaves_active(Layout layout, int block) { return layout != Layout::kTall && block <= 96; }
template <class Cfg>
constexpr bool kLeavesActive = leaves_active(Cfg::kLayout, Cfg::BLOCK_N);

// h of two tokens. Where g is 0, so is h, whatever u is; NaN is kept. If kMarks, an active neuron's 0 is -0.
template <class Element, bool kGated, bool kMarks>
__device__ __forceinline__ uint32_t activate_and_multiply(Params const& params, uint32_t z, uint32_t cuts, uint32_t u) {
    uint32_t const g = Element::multiply2(z, params.act.square ? z : Element::kOnes);
    uint32_t const active = Element::not_at_most2(z, cuts) & Element::is_not_zero2(g);
    if constexpr (!kGated) {
        return g & active;
    }
    uint32_t const h = Element::multiply2(g, u & Element::not_at_most2(u, params.up_cut)) & active;
    return kMarks ? h | (active & ~Element::is_not_zero2(h) & kSigns) : h;
}

// Leaves which neurons of a CTA's part of a tile are active, by all consumers. store(): puts a warp's into `result`,
// kBytesToken a token, of which two are the warp's. `result`: as large as pass_result needs for all warps; `counts`:
// [kConsumerWarps].
constexpr int kBytesToken = BLOCK_M / 8;
template <class Cfg, class Params, class Store>
__device__ __forceinline__ void leave_active(Params const& params, unsigned char* result, uint32_t* counts,
                                             int consumer_warp, Store store, Tile const& tile, int rank,
                                             Tokens const& tokens) {
    static_assert(Cfg::BLOCK_N * kBytesToken <= Cfg::kBytesResult && kBytesToken == sizeof(uint4) &&
                      Cfg::BLOCK_N <= kConsumers * kWarpgroupSize && BLOCK_M < kMostCountedOfRow,
                  "a thread has a token");
    auto const sync_consumers = [] { sync_some_threads<1, kConsumers * kWarpgroupSize>(); };
    int const lane = threadIdx.x % kWarpSize;
    sync_consumers();  // the memory is no longer in use
    store();
    sync_consumers();
    int const token = consumer_warp * kWarpSize + lane;
    uint32_t active = 0;
    if (tokens.has(token)) {
        uint4 const mask = reinterpret_cast<uint4 const*>(result)[token];
        active = __popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w);
        int const part = tile.neuron_of<Cfg>(rank) / BLOCK_M;
        uint4* const masks = reinterpret_cast<uint4*>(params.active.masks + static_cast<int64_t>(tokens.begin + token) *
                                                                                params.active.num_words);
        masks[part] = mask;
        if (Cfg::kSharesWeights && tile.tile_idx == params.num_tiles - 1 && part % kClusterSize == 0) {
            masks[part + 1] = make_uint4(0, 0, 0, 0);  // the rest of a tile of the packed matrix
        }
    }
    uint32_t const pairs = __reduce_add_sync(0xffffffffu, active);
    uint32_t const most = __reduce_max_sync(0xffffffffu, active);
    if (lane == 0) {
        counts[consumer_warp] = pairs * kMostCountedOfRow + most;
    }
    sync_consumers();
    if (consumer_warp == 0 && lane == 0) {
        uint32_t all_pairs = 0;
        uint32_t most_of_all = 0;
#pragma unroll
        for (int w = 0; w < kConsumerWarps; ++w) {
            all_pairs += counts[w] / kMostCountedOfRow;
            most_of_all = max(most_of_all, counts[w] % kMostCountedOfRow);
        }
        int64_t const group = Cfg::kSharesWeights ? tile.block_idx * kClusterSize + rank : tile.block_idx;
        int const place = Cfg::kSharesWeights ? tile.tile_idx : tile.tile_idx * kClusterSize + rank;
        params.active.counted[group * params.active.counts_of_group + place] =
            all_pairs * kMostCountedOfRow + most_of_all;
    }
}

// h of two tokens and one neuron in fp32, of sums of products. Where g is 0, so is h; where it is not, an h of 0 is -0.
template <class Element, bool kGated>
__device__ __forceinline__ float2 compute_h(ParamsOf<E4m3> const& params, float2 gate_sums, float2 up_sums,
                                            float2 x_scales, float gate_scale, float up_scale, float h_scale,
                                            float gate_bias, float up_bias, uint32_t cut, bool exists) {
    uint32_t const z = Element::from_float2(fmaf(gate_sums.x, gate_scale * x_scales.x, gate_bias),
                                            fmaf(gate_sums.y, gate_scale * x_scales.y, gate_bias));
    uint32_t const g = Element::multiply2(z, params.act.square ? z : Element::kOnes);
    uint32_t const active = exists ? Element::not_at_most2(z, cut) & Element::is_not_zero2(g) : 0;
    float2 h = Element::to_float2(g);
    if constexpr (kGated) {
        float2 u = make_float2(fmaf(up_sums.x, up_scale * x_scales.x, up_bias),
                               fmaf(up_sums.y, up_scale * x_scales.y, up_bias));
        if (params.up_cut == 0) {
            u.x = u.x <= 0.0f ? 0.0f : u.x;  // NaN is kept
            u.y = u.y <= 0.0f ? 0.0f : u.y;
        }
        h.x *= u.x;
        h.y *= u.y;
    }
    h.x *= h_scale;
    h.y *= h_scale;
    auto const marked = [](float value) { return value == 0.0f ? -0.0f : value; };
    return make_float2((active & 0xffffu) != 0 ? marked(h.x) : 0.0f, (active >> 16) != 0 ? marked(h.y) : 0.0f);
}

// Which of 16 neurons are not +0, a bit each, of bytes in the order 0, 8, 1, 9, ...
__device__ __forceinline__ uint32_t find_nonzero_bytes(uint4 bytes) {
    constexpr uint32_t kLow = 0x7f7f7f7fu;
    uint32_t const words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t const signs = ((words[i] & kLow) + kLow) | words[i];
        found |= ((signs >> 7 & 1) | (signs >> 15 & 1) << 8 | (signs >> 23 & 1) << 1 | (signs >> 31) << 9) << 2 * i;
    }
    return found;
}

// Rounds and stores a consumer's part of h, by all consumers. result: memory of all warps, Cfg::kBytesResult; counts:
// as for leave_active.
template <class Element, class Cfg>
__device__ __forceinline__ void store_bytes(ParamsOf<E4m3> const& params,
                                            float (&sums)[Cfg::kProducts][Cfg::kAccumulators], unsigned char* result,
                                            uint32_t* counts, int consumer_warp, Tile const& tile, int rank,
                                            Tokens const& tokens) {
    constexpr int N = Cfg::BLOCK_N;
    constexpr bool kGated = Cfg::kProducts == 2;
    constexpr float kLargest = 448.0f;
    static_assert(!Cfg::kIsTall && N % 16 == 0, "a thread has two neurons");
    auto const sync_consumers = [] { sync_some_threads<1, kConsumers * kWarpgroupSize>(); };
    int const lane = threadIdx.x % kWarpSize;
    int const thread = consumer_warp * kWarpSize + lane;
    int const neuron = tile.neuron_of<Cfg>(rank) + consumer_warp * kWarpNeurons + lane / 4;
    int const neurons[2] = {min(neuron, params.d_ff - 1), min(neuron + 8, params.d_ff - 1)};
    float2 const gate_biases = load_biases<Element>(params.b_gate, neuron, params.d_ff);
    float2 const up_biases = load_biases<Element>(kGated ? params.b_up : nullptr, neuron, params.d_ff);
    float gate_scales[2];
    float up_scales[2] = {};
    float h_scales[2];
    uint32_t cuts[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        cuts[n] = cut_of<Element>(params.act.cut, params.act.cuts, neurons[n], params.d_ff);
        gate_scales[n] = scale_sum(params, params.gate_scale, 1.0f, neurons[n]);
        if (kGated) {
            up_scales[n] = scale_sum(params, params.up_scale, 1.0f, neurons[n]);
        }
        h_scales[n] = scale_h(params, 1.0f, neurons[n]);
    }
    float const* const x_scale = params.x_scale + tokens.begin + lane % 4 * 2;
    uint32_t most[N / 8];  // of two tokens
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float2 const x_scales = make_float2(x_scale[j * 8], x_scale[j * 8 + 1]);
        float magnitudes[2] = {};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            int const i = j * 4 + n * 2;
            float const(&up)[Cfg::kAccumulators] = sums[Cfg::kProducts - 1];
            float2 const h = compute_h<Element, kGated>(
                params, make_float2(sums[0][i], sums[0][i + 1]), make_float2(up[i], up[i + 1]), x_scales,
                gate_scales[n], up_scales[n], h_scales[n], n == 0 ? gate_biases.x : gate_biases.y,
                n == 0 ? up_biases.x : up_biases.y, cuts[n], neuron + n * 8 < params.d_ff);
            sums[0][i] = h.x;
            sums[0][i + 1] = h.y;
            magnitudes[0] = fmaxf(magnitudes[0], fabsf(h.x));  // of a NaN the other one
            magnitudes[1] = fmaxf(magnitudes[1], fabsf(h.y));
        }
        most[j] = Bf16::from_float2(magnitudes[0], magnitudes[1]);
#pragma unroll
        for (int distance = 4; distance < kWarpSize; distance *= 2) {
            most[j] = Bf16::larger2(most[j], __shfl_xor_sync(0xffffffffu, most[j], distance));
        }
    }
    uint32_t* const all_most = reinterpret_cast<uint32_t*>(result);                     // [kConsumerWarps][N / 2]
    float* const inverses = reinterpret_cast<float*>(result + kConsumerWarps * N * 2);  // [N]
    static_assert(kConsumerWarps * N * 2 + N * 4 <= Cfg::kBytesResult && N / 2 <= kConsumers * kWarpgroupSize,
                  "a thread has two tokens");
    sync_consumers();  // the memory is no longer in use
    if (lane < 4) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            all_most[consumer_warp * (N / 2) + j * 4 + lane] = most[j];
        }
    }
    sync_consumers();
    if (thread < N / 2) {
        uint32_t largest = all_most[thread];
#pragma unroll
        for (int w = 1; w < kConsumerWarps; ++w) {
            largest = Bf16::larger2(largest, all_most[w * (N / 2) + thread]);
        }
        float2 const pair = Bf16::to_float2(largest);
        float* const scales =
            params.h_scale + tile.neuron_of<Cfg>(rank) / BLOCK_M * params.h_scale_stride + tokens.begin;
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            float const scale = fmaxf((t == 0 ? pair.x : pair.y) / kLargest, 1e-30f);
            inverses[thread * 2 + t] = 1.0f / scale;
            if (tokens.has(thread * 2 + t)) {
                scales[thread * 2 + t] = scale;
            }
        }
    }
    sync_consumers();
    uint32_t words[N / 8];  // of a token the bytes of both neurons, then those of the next token
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float2 const inverse = reinterpret_cast<float2 const*>(inverses)[j * 4 + lane % 4];
        words[j] = to_e4m3(to_be_rounded(sums[0][j * 4], inverse.x), to_be_rounded(sums[0][j * 4 + 2], inverse.x),
                           to_be_rounded(sums[0][j * 4 + 1], inverse.y), to_be_rounded(sums[0][j * 4 + 3], inverse.y));
    }
    sync_consumers();  // the warps' memory may be written
    constexpr int kAtOnce = 4;
    bool const leaves_active = kLeavesActive<Cfg> && params.active.masks != nullptr;
    uint32_t const warp_bytes = shared_address(result) + consumer_warp * Cfg::kBytesWarp;
    int const column = tile.neuron_of<Cfg>(rank) + consumer_warp * kWarpNeurons;
    uint32_t active[(N + kWarpSize - 1) / kWarpSize] = {};  // of the token that a lane stores at a time
#pragma unroll
    for (int j = 0; j < N / 8; j += kAtOnce) {
        uint32_t const place = warp_bytes + j / kAtOnce % 2 * (Cfg::kBytesWarp / 2) + lane * kWarpNeurons;
        bool const is_whole = j + kAtOnce <= N / 8;
        if (is_whole) {
            uint32_t const fragment[kAtOnce] = {words[j], words[j + 1], words[min(j + 2, N / 8 - 1)],
                                                words[min(j + 3, N / 8 - 1)]};
            store_transposed_x4(place, fragment);
        } else {
            store_transposed_x2(place, words[j], words[j + 1]);  // lanes from 16 on give no address
        }
        __syncwarp();
        int const token = j * 8 + lane;
        if ((is_whole || lane < 16) && tokens.has(token)) {
            uint4 const bytes = load_chunk(place);
            *reinterpret_cast<uint4*>(params.h_bytes + (tokens.begin + token) * params.stride + column) = bytes;
            if (leaves_active) {
                active[j / kAtOnce] = find_nonzero_bytes(bytes);
            }
        }
    }
    if (leaves_active) {
        auto const store = [&] {
#pragma unroll
            for (int i = 0; i < (N + kWarpSize - 1) / kWarpSize; ++i) {
                int const token = i * kWarpSize + lane;
                if (token < N) {
                    *reinterpret_cast<uint16_t*>(result + token * kBytesToken + consumer_warp * 2) =
                        static_cast<uint16_t>(active[i]);
                }
            }
        };
        leave_active<Cfg>(params, result, counts, consumer_warp, store, tile, rank, tokens);
    }
}

template <class Element, class Stored, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    hidden_kernel(__grid_constant__ ParamsOf<Stored> const params) {
    constexpr bool kBytes = sizeof(Stored) == 1;
    constexpr bool kGated = Cfg::kProducts == 2;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const rank = static_cast<int>(cluster_rank());

    if (threadIdx.x == 0) {
        shared.init_stages();
        publish_barriers();
        prefetch_map(params.x);
        prefetch_map(params.weights[0]);
        prefetch_map(params.weights[Cfg::kProducts - 1]);
    }
    sync_cluster();
    if (!kBytes || warp != 0) {  // else the loader waits later
        wait_for_previous_launch();
        allow_dependent_launch();
    }

    int const tiles_end = params.num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;

    if (warp >= kWarpgroupWarps) {
        // Consumers
        take_registers<kRegistersMultiplier>();
        int const consumer_warp = warp - kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        // NOTE: of bytes it is multiplied again: no register is left for it.
        for (int i = tiles_begin; i < (kBytes ? params.num_blocks * params.num_tiles : tiles_end); i += tiles_step) {
            Tile const tile(params.num_blocks, params.num_tiles, i);
            if constexpr (kBytes) {
                float accumulators[Cfg::kProducts][Cfg::kAccumulators];
                auto const scale_of = [&](int product, int slice) {
                    // Behind the last neuron those of the last one: nobody reads the sums.
                    int const row = min(tile.neuron_of<Cfg>(rank), params.d_ff - 1) / BLOCK_M;
                    float const* const scales = product == 0 ? params.gate_scale : params.up_scale;
                    return nonzero_scale(scales[row * params.gate_up_blocks + slice]);
                };
                multiply_bytes<Cfg>(accumulators, shared, ring, consumer_warp / kWarpgroupWarps, params.num_slices,
                                    params.gate_up_blocks != 0, scale_of);
                store_bytes<Element, Cfg>(params, accumulators, shared_bytes + Cfg::kOffsetResult,
                                          reinterpret_cast<uint32_t*>(shared_bytes + Cfg::kOffsetMoreBarriers),
                                          consumer_warp, tile, rank,
                                          Tokens::of<Cfg>(tile, rank, static_cast<int>(params.tokens)));
            } else {
                // Of a tile a warp has 16 neurons, if tall 16 tokens.
                int const first_neuron = tile.neuron_of<Cfg>(rank) + (Cfg::kIsTall ? 0 : consumer_warp * kWarpNeurons);
                int const first_of_warp = Cfg::kIsTall ? consumer_warp * kWarpNeurons : 0;
                Tokens const tokens = Tokens::of<Cfg>(tile, rank, static_cast<int>(params.tokens));
                int64_t const first_token = tokens.begin;
                int const neuron = first_neuron + lane / 4;
                // Of a tall tile a thread has too many neurons: it loads their biases when it needs them.
                float2 const gate_biases = load_biases<Element>(params.b_gate, neuron, params.d_ff);
                float2 const up_biases = load_biases<Element>(kGated ? params.b_up : nullptr, neuron, params.d_ff);
                float accumulators[Cfg::kProducts][Cfg::kAccumulators];
                multiply<Element, Cfg, false>(accumulators, shared, ring, consumer_warp / kWarpgroupWarps,
                                              params.num_slices);

                // Epilogue
                auto const round = [&](int product, float2 biases, uint16_t const* bias, int i) {
                    if constexpr (Cfg::kIsTall) {
                        int const of_pair = first_neuron + i / 4 * kVector + lane % 4 * 2;
                        return round_neurons<Element>(accumulators[product], bias, of_pair, params.d_ff, i);
                    } else {
                        return round_pair<Element>(accumulators[product], biases, i);
                    }
                };
                // Likewise cuts: of two neurons of one token, or of one of two tokens.
                uint32_t const own_cuts[2] = {
                    cut_of<Element>(params.act.cut, params.act.cuts, neuron, params.d_ff),
                    cut_of<Element>(params.act.cut, params.act.cuts, neuron + 8, params.d_ff)};
                auto const cuts_of = [&](int i) {
                    return Cfg::kIsTall
                               ? cuts_of_pair<Element>(params.act.cut, params.act.cuts,
                                                       first_neuron + i / 4 * kVector + lane % 4 * 2, params.d_ff)
                               : own_cuts[i % 4 / 2];
                };
                bool const leaves_active = kLeavesActive<Cfg> && params.active.masks != nullptr;
                uint32_t bits[(Cfg::BLOCK_N + 63) / 64] = {};
                pass_result<Cfg>(
                    shared.result() + consumer_warp * Cfg::kBytesWarp,
                    [&](int i) {
                        uint32_t const z = round(0, gate_biases, params.b_gate, i);
                        uint32_t const u = round(Cfg::kProducts - 1, up_biases, params.b_up, i);
                        return activate_and_multiply<Element, kGated, kLeavesActive<Cfg>>(params, z, cuts_of(i), u);
                    },
                    [&](int token_of_warp, int chunk, uint4 values) {
                        int const token = first_of_warp + token_of_warp;
                        int const column = first_neuron + chunk * kVector;
                        if (tokens.has(token) && column < params.d_ff) {
                            *reinterpret_cast<uint4*>(params.h + (first_token + token) * params.stride + column) =
                                values;
                            if (leaves_active) {
                                uint32_t const there = (1u << min(params.d_ff - column, kVector)) - 1;
                                bits[token / 64] |= (find_nonzeros(values) & there) << token / 16 % 4 * 8;
                            }
                        }
                    });
                if (leaves_active) {
                    unsigned char* const result = shared_bytes + Cfg::kOffsetResult;
                    // A lane has the (lane / 2 + 16 i)-th token in byte i % 4 of word i / 4, of half of the neurons.
                    auto const store = [&] {
#pragma unroll
                        for (int i = 0; i < (Cfg::BLOCK_N + 15) / 16; ++i) {
                            if (i < Cfg::BLOCK_N / 16 || lane < 16) {
                                result[(lane / 2 + 16 * i) * kBytesToken + consumer_warp * 2 + lane % 2] =
                                    static_cast<unsigned char>(bits[i / 4] >> i % 4 * 8);
                            }
                        }
                    };
                    leave_active<Cfg>(params, result,
                                      reinterpret_cast<uint32_t*>(shared_bytes + Cfg::kOffsetMoreBarriers),
                                      consumer_warp, store, tile, rank, tokens);
                }
            }
        }
    } else {
        give_registers<kRegistersLoader>();
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, false> loader = {
                    shared, params.weights, params.x, rank, static_cast<int>(params.tokens), params.d_ff};
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    Tile const tile(params.num_blocks, params.num_tiles, i);
                    Slices slices = {0, params.num_slices};
                    if (kBytes && i == tiles_begin) {
                        loader.load_first(tile, slices, wait_for_previous_launch, [] { return true; });
                    }
                    loader.load(tile, slices);
                }
                uint32_t const share = (params.prefetched_bytes / gridDim.x + 15) / 16 * 16;
                uint32_t const begin = blockIdx.x * share;
                if (begin < params.prefetched_bytes) {
                    prefetch_bytes(static_cast<unsigned char const*>(params.w_down) + begin,
                                   min(share, params.prefetched_bytes - begin));
                }
                loader.wait_for_consumers();
            }
        } else {
            int const threads = kHelpers * kWarpSize;
            int const first = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x) - kWarpSize;
            for (int i = first; i < params.num_part_states; i += static_cast<int>(gridDim.x) * threads) {
                params.part_states[i] = 0;
            }
        }
    }
}

}  // namespace twell::hidden_sm90

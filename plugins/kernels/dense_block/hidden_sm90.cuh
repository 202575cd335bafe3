// The hidden activations of a dense block on Hopper (sm_90a): h = act(x Wg^T + bg) * (x Wu^T + bu) for all rows, in one
// kernel. See matmul_sm90.cuh for the product; here a consumer multiplies the same tokens by the same neurons of both
// matrices, so that it has both factors of h in its registers.
#pragma once

#include "device/dependent_launch.cuh"
#include "format/active.cuh"
#include "matmul/matmul_sm90.cuh"

namespace twell::hidden_sm90 {

using namespace matmul_sm90;

// Registers a thread: two products of up to 176 tokens take 176 of a consumer's.
constexpr int kRegistersLoader = 40;
constexpr int kRegistersMultiplier = 232;
static_assert(registers_suffice(kRegistersLoader, kRegistersMultiplier), "setmaxnreg.inc would wait for ever");

struct Params {
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

// Whether a configuration can leave which neurons are active: blocks of more tokens are for calls that do not ask.
constexpr bool leaves_active(Layout layout, int block) { return layout != Layout::kTall && block <= 96; }
template <class Cfg>
constexpr bool kLeavesActive = leaves_active(Cfg::kLayout, Cfg::BLOCK_N);

// h of two tokens. Where g is 0, so is h, whatever u is; NaN is kept. If kMarks, an active neuron's 0 is -0.
template <class Element, bool kGated, bool kMarks>
__device__ __forceinline__ uint32_t activate_and_multiply(Params const& params, uint32_t z, uint32_t u) {
    uint32_t const g = Element::multiply2(z, params.act.square ? z : Element::kOnes);
    uint32_t const active = Element::not_at_most2(z, params.act.cut) & Element::is_not_zero2(g);
    if constexpr (!kGated) {
        return g & active;
    }
    uint32_t const h = Element::multiply2(g, u & Element::not_at_most2(u, params.up_cut)) & active;
    return kMarks ? h | (active & ~Element::is_not_zero2(h) & kSigns) : h;
}

// Leaves which neurons of a CTA's part of a tile are active, by all consumers. `bits`: a lane's, of the (lane / 2 + 16
// i)-th token in byte i % 4 of word i / 4, of half of its warp's neurons. `result`: as large as pass_result needs for
// all warps; `counts`: [kConsumerWarps].
template <class Cfg, int kWords>
__device__ __forceinline__ void leave_active(Params const& params, unsigned char* result, uint32_t* counts,
                                             int consumer_warp, uint32_t const (&bits)[kWords], Tile const& tile,
                                             int rank, Tokens const& tokens) {
    constexpr int kBytesToken = BLOCK_M / 8;
    static_assert(Cfg::BLOCK_N * kBytesToken <= Cfg::kBytesResult && kBytesToken == sizeof(uint4) &&
                      Cfg::BLOCK_N <= kConsumers * kWarpgroupSize && BLOCK_M < kMostCountedOfRow,
                  "a thread has a token");
    auto const sync_consumers = [] { asm volatile("bar.sync 1, %0;" ::"n"(kConsumers * kWarpgroupSize) : "memory"); };
    int const lane = threadIdx.x % kWarpSize;
    sync_consumers();  // the memory is no longer in use
#pragma unroll
    for (int i = 0; i < (Cfg::BLOCK_N + 15) / 16; ++i) {
        if (i < Cfg::BLOCK_N / 16 || lane < 16) {
            result[(lane / 2 + 16 * i) * kBytesToken + consumer_warp * 2 + lane % 2] =
                static_cast<unsigned char>(bits[i / 4] >> i % 4 * 8);
        }
    }
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

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    hidden_kernel(__grid_constant__ Params const params) {
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
    wait_for_previous_launch();
    allow_dependent_launch();

    int const tiles_end = params.num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;

    if (warp >= kWarpgroupWarps) {
        // Consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersMultiplier));
        int const consumer_warp = warp - kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
            Tile const tile(params.num_blocks, params.num_tiles, i);
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
            bool const leaves_active = kLeavesActive<Cfg> && params.active.masks != nullptr;
            uint32_t bits[(Cfg::BLOCK_N + 63) / 64] = {};
            pass_result<Cfg>(
                shared.result() + consumer_warp * Cfg::kBytesWarp,
                [&](int i) {
                    uint32_t const z = round(0, gate_biases, params.b_gate, i);
                    uint32_t const u = round(Cfg::kProducts - 1, up_biases, params.b_up, i);
                    return activate_and_multiply<Element, kGated, kLeavesActive<Cfg>>(params, z, u);
                },
                [&](int token_of_warp, int chunk, uint4 values) {
                    int const token = first_of_warp + token_of_warp;
                    int const column = first_neuron + chunk * kVector;
                    if (tokens.has(token) && column < params.d_ff) {
                        *reinterpret_cast<uint4*>(params.h + (first_token + token) * params.stride + column) = values;
                        if (leaves_active) {
                            uint32_t const there = (1u << min(params.d_ff - column, kVector)) - 1;
                            bits[token / 64] |= (find_nonzeros(values) & there) << token / 16 % 4 * 8;
                        }
                    }
                });
            if (leaves_active) {
                leave_active<Cfg>(params, shared_bytes + Cfg::kOffsetResult,
                                  reinterpret_cast<uint32_t*>(shared_bytes + Cfg::kOffsetMoreBarriers), consumer_warp,
                                  bits, tile, rank, tokens);
            }
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersLoader));
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, false> loader = {
                    shared, params.weights, params.x, rank, static_cast<int>(params.tokens), params.d_ff};
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    loader.load(Tile(params.num_blocks, params.num_tiles, i), {0, params.num_slices});
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

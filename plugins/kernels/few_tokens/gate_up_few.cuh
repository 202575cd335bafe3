// Gate and up projections for few tokens, for every GPU from sm_80 on: h[t, n] of the active neurons n of each token t.
//
// With few tokens the time is that of reading w_gate, so a CTA owns few neurons and all of d_model, and every
// multiprocessor streams. The CTA that finds a neuron active computes its up projection at once: no other CTA has to
// know, so nothing is packed, no tile can overflow, and the up projection is spread over the device however unequal the
// tokens are.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "format/active.cuh"
#include "matmul/matmul_few.cuh"
#include "twell/twell.h"

namespace twell::gate_up_few {

using namespace matmul_few;

static_assert(kMaskBits % MMA_M == 0, "a CTA stores halves of a mask word");

// NOTE: not BlockTensors, with which fewer loops are unrolled.
template <class Stored>
struct ParamsOf : ScalesOf<Stored> {
    uint16_t const* x;       // [tokens, d_model]
    Stored const* w_gate;    // [d_ff, d_model]
    uint16_t const* b_gate;  // [d_ff] or null
    Stored const* w_up;      // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;    // [d_ff] or null
    Stored const* w_down;    // [d_ff, d_out]; only brought closer
    uint32_t* masks;         // [tokens, num_mask_words]
    float* h;                // [tokens, d_ff], written where a neuron is active
    int* counters;           // [num_counters], which become 0: see down_few.cuh and down_sm90.cuh
    // For a down projection that may be dense, or null:
    uint16_t* h_rounded;  // [tokens, num_mask_words * kMaskBits], of the element type, 0 where no neuron is active
    int2* counted;        // [CTAs]: see few.h
    // The members of Activation, without a gap.
    float const* cuts;
    uint32_t cut;
    int num_counters;
    int tokens;
    int d_model;
    int d_ff;
    int d_out;
    int num_mask_words;
    bool relu_on_up;  // dReLU
    bool square;
};
// NOTE: from 129 bytes on nvcc 13.0 takes a list of tokens (Listed) for the parameters, which begin with x, too.
static_assert(sizeof(ParamsOf<uint16_t>) <= 128, "wrong results, found by tests on a GPU");

constexpr int kMaxTokens = 64;  // of a CTA

// A CTA computes 16 kTilesM neurons for 8 kTilesN tokens; kNumStages steps of weights are in flight. Registers are kept
// free for kMinBlocks CTAs a multiprocessor.
template <int kNeuronTiles, int kTokenTiles, int kStages, int kBlocks>
struct Config {
    static constexpr int kTilesM = kNeuronTiles;
    static constexpr int kTilesN = kTokenTiles;
    static constexpr int kNumStages = kStages;
    static constexpr int kMinBlocks = kBlocks;
    static constexpr int kNeurons = kTilesM * MMA_M;
    static constexpr int kTokens = kTilesN * MMA_N;
    static_assert(kTilesM * kTokens <= kThreads, "one thread for each mask");
    static_assert(kTokens <= kMaxTokens, "token_any and pairs have room for the tokens");

    // Token tiles whose sums the warps exchange at once.
    static constexpr int kTilesExchanged = kTilesN < 4 ? kTilesN : 4;

    // Shared memory: the warps' queues; then the sums that they exchange, in the same place.
    static constexpr int kBytesStage = kWarps * kBytesWarpStage<kTilesM, kTilesN>;
    static constexpr int kBytesExchange = kWarps * kTilesM * kTilesExchanged * 4 * kWarpSize * 4;
    static_assert(kBytesExchange <= kBytesStage, "the sums take the place of one stage of the queues");
    static constexpr int kBytesStages = kBytesStage * kNumStages;
    // Then dot products, as many at once as there is place for.
    static constexpr int kDotSlots = kBytesStages >= 3 * kWarps * kBytesDot   ? 3
                                     : kBytesStages >= 2 * kWarps * kBytesDot ? 2
                                                                              : 1;
    static constexpr int kBytesDots = kWarps * kDotSlots * kBytesDot;
    static constexpr int kBytesQueue = kBytesStages > kBytesDots ? kBytesStages : kBytesDots;
    // The activated gate values, behind the queues.
    static constexpr int kStrideG = kTokens + 2;  // padded: neighbouring lanes read a column
    static constexpr int kSharedBytes = kBytesQueue + kNeurons * kStrideG * 2;
};

// Active pairs of a neuron and a token, up to which a warp computes u for each.
constexpr int kMaxPairs = 2 * kWarps;
// Active neurons of one token, up to which their rows of w_down are brought closer.
constexpr int kMostPrefetched = 8;

template <class Cfg>
struct Shared {
    uint16_t b_gate[Cfg::kNeurons];
    uint16_t b_up[Cfg::kNeurons];
    uint32_t neuron_any[Cfg::kTilesM];    // which of a tile's 16 neurons are active for any token
    uint32_t token_any[kMaxTokens / 32];  // which tokens have any active neuron here
    int num_pairs;
    int most_of_token[Cfg::kTilesM];  // of each 16 neurons
    uint16_t pairs[kMaxPairs];        // neuron * kMaxTokens + token of active pairs
    int neurons[Cfg::kNeurons];       // the active ones
    int tokens[Cfg::kTokens];
};

template <class Element, class Cfg, class Neurons, class Tokens, class Begin, class End, class Emit>
__device__ __forceinline__ void project(Neurons const& neurons, Tokens const& tokens, int d_model,
                                        unsigned char* dynamic, Begin begin, End end, Emit emit) {
    float accumulators[Cfg::kTilesM][Cfg::kTilesN][4] = {};
    multiply<Element, Cfg::kTilesM, Cfg::kTilesN, Cfg::kNumStages>(accumulators, neurons, tokens, d_model,
                                                                   shared_address(dynamic), begin);
    end();
    exchange<Cfg::kTilesM, Cfg::kTilesN, Cfg::kTilesExchanged>(accumulators, reinterpret_cast<float*>(dynamic), emit);
}

// Those of bytes keep registers free for two CTAs at least, as there is shared memory for them.
template <class Stored, class Cfg>
constexpr int kMinBlocks = sizeof(Stored) == 1 && Cfg::kMinBlocks < 2 ? 2 : Cfg::kMinBlocks;

template <class Element, class Stored, class Cfg>
__global__ void __launch_bounds__(kThreads, kMinBlocks<Stored, Cfg>) gate_up_kernel(ParamsOf<Stored> const params) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Shared<Cfg> shared;
    constexpr bool kHasScales = ParamsOf<Stored>::kHasScales;
    __shared__ float gate_scales[kHasScales ? Cfg::kNeurons : 1];
    uint16_t* const g = reinterpret_cast<uint16_t*>(dynamic + Cfg::kBytesQueue);  // [kNeurons, kStrideG]

    int const thread = threadIdx.x;
    int const neuron_begin = blockIdx.x * Cfg::kNeurons;
    if (thread < Cfg::kTilesM) {
        shared.neuron_any[thread] = 0;
        shared.most_of_token[thread] = 0;
    }
    if (thread < kMaxTokens / 32) {
        shared.token_any[thread] = 0;
    }
    if (thread == 0) {
        shared.num_pairs = 0;
    }
    int64_t const stride_rounded = static_cast<int64_t>(params.num_mask_words) * kMaskBits;
    // Biases are fetched first and put down last, so that nothing waits for them.
    bool const has_bias = thread < Cfg::kNeurons && neuron_begin + thread < params.d_ff;
    uint16_t b_gate = 0;
    uint16_t b_up = 0;
    float own_scale = 0.0f;
    auto const begin = [&] {
        wait_for_previous_launch();
        allow_dependent_launch();
        if (has_bias && params.b_gate != nullptr) {
            b_gate = params.b_gate[neuron_begin + thread];
        }
        if (has_bias && params.b_up != nullptr) {
            b_up = params.b_up[neuron_begin + thread];
        }
        if constexpr (kHasScales) {
            own_scale = has_bias ? scale_sum(params, params.gate_scale, 1.0f, neuron_begin + thread) : 0.0f;
        }
        if (params.h_rounded != nullptr) {
            constexpr int kVectors = Cfg::kNeurons / kVector;
            for (int i = thread; i < params.tokens * kVectors; i += kThreads) {
                int const n = neuron_begin + i % kVectors * kVector;
                if (n < stride_rounded) {
                    *reinterpret_cast<uint4*>(params.h_rounded + i / kVectors * stride_rounded + n) = {};
                }
            }
        }
        for (int i = blockIdx.x * kThreads + thread; i < params.num_counters; i += gridDim.x * kThreads) {
            params.counters[i] = 0;
        }
    };
    auto const end = [&] {
        if constexpr (kHasScales) {
            if (thread < Cfg::kNeurons) {
                gate_scales[thread] = own_scale;
            }
        }
        if (has_bias) {
            shared.b_gate[thread] = b_gate;
            shared.b_up[thread] = b_up;
        }
    };

    // Gate projection
    static_assert(TWELL_SCALE_BLOCK_SIZE % Cfg::kNeurons == 0, "a CTA's neurons lie in one block");
    project<Element, Cfg>(Consecutive<Stored>{params.w_gate, neuron_begin, params.d_ff - neuron_begin,
                                              block_scales_of(params.gate_scale, params.gate_up_blocks, neuron_begin)},
                          Consecutive<uint16_t>{params.x, 0, params.tokens}, params.d_model, dynamic, begin, end,
                          [&](int m, int n, float sum) {
                              bool const valid = neuron_begin + m < params.d_ff && n < params.tokens;
                              if constexpr (kHasScales) {
                                  sum *= gate_scales[m];
                              }
                              float const z =
                                  params.b_gate == nullptr ? sum : sum + Element::to_float(shared.b_gate[m]);
                              g[m * Cfg::kStrideG + n] =
                                  valid ? activate<Element>(z, params.square, params.cut) : static_cast<uint16_t>(0);
                          });

    // Which neurons are active: one thread for 16 neurons of a token.
    if (thread < Cfg::kTilesM * Cfg::kTokens) {
        int const tile = thread / Cfg::kTokens;
        int const token = thread % Cfg::kTokens;
        uint32_t mask = 0;
        if (params.cuts != nullptr) {
#pragma unroll 1
            for (int m = tile * MMA_M; m < (tile + 1) * MMA_M; ++m) {
                uint32_t const cut = cut_of<Element>(params.cut, params.cuts, neuron_begin + m, params.d_ff);
                uint16_t& own = g[m * Cfg::kStrideG + token];
                own = static_cast<uint16_t>(own & Element::not_at_most2(own, cut));
            }
        }
#pragma unroll
        for (int m = 0; m < MMA_M; ++m) {
            mask |= (is_nonzero(g[(tile * MMA_M + m) * Cfg::kStrideG + token]) ? 1u : 0u) << m;
        }
        int const half = neuron_begin / MMA_M + tile;
        constexpr int kHalves = kMaskBits / MMA_M;
        if (token < params.tokens && half < params.num_mask_words * kHalves) {
            reinterpret_cast<uint16_t*>(params.masks)[token * params.num_mask_words * kHalves + half] =
                static_cast<uint16_t>(mask);
        }
        if (mask != 0) {
            atomicOr(&shared.neuron_any[tile], mask);
            atomicOr(&shared.token_any[token / 32], 1u << (token % 32));
            atomicMax(&shared.most_of_token[tile], __popc(mask));
            for (int pair = atomicAdd(&shared.num_pairs, __popc(mask)); mask != 0 && pair < kMaxPairs; ++pair) {
                shared.pairs[pair] = static_cast<uint16_t>((tile * MMA_M + __ffs(mask) - 1) * kMaxTokens + token);
                mask &= mask - 1;
            }
        }
    }
    __syncthreads();

    auto const finish = [&](int m, int token, float sum) {
        uint16_t const bits = g[m * Cfg::kStrideG + token];
        if (is_nonzero(bits)) {
            if constexpr (kHasScales) {
                sum = params.w_up == nullptr ? sum : scale_sum(params, params.up_scale, sum, neuron_begin + m);
            }
            float u = params.b_up == nullptr ? sum : sum + Element::to_float(shared.b_up[m]);
            u = params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
            float const h = scale_h(params, Element::to_float(bits) * u, neuron_begin + m);
            params.h[static_cast<int64_t>(token) * params.d_ff + neuron_begin + m] = h;
            if (params.h_rounded != nullptr) {
                params.h_rounded[token * stride_rounded + neuron_begin + m] = Element::from_float(h);
            }
        }
    };
    // The next kernel reads this row.
    auto const prefetch_w_down = [&](int m) {
        prefetch_row(params.w_down + static_cast<int64_t>(neuron_begin + m) * params.d_out, params.d_out);
    };

    // Up projection of few pairs: a warp each. (In whatever order they were found: each has its own place in h.)
    // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
    int const num_pairs = shared.num_pairs;
    if (params.counted != nullptr && thread == 0) {
        int most = 0;
#pragma unroll
        for (int i = 0; i < Cfg::kTilesM; ++i) {
            most += shared.most_of_token[i];
        }
        params.counted[blockIdx.x] = make_int2(num_pairs, most);
    }
    if (num_pairs <= kMaxPairs) {
        int const warp = thread / kWarpSize;
        int const count = (num_pairs - warp + kWarps - 1) / kWarps;  // this warp's
        auto const neuron_of = [&](int i) { return shared.pairs[warp + i * kWarps] / kMaxTokens; };
        auto const token_of = [&](int i) { return shared.pairs[warp + i * kWarps] % kMaxTokens; };
        // If most are active, all warps stream, and prefetches are in the way.
        bool const prefetches = params.tokens > 1 || num_pairs <= kMostPrefetched;
        for (int i = 0; i < count; ++i) {
            if (prefetches) {
                prefetch_w_down(neuron_of(i));
            }
            if (params.w_up == nullptr && thread % kWarpSize == 0) {
                finish(neuron_of(i), token_of(i), 1.0f);
            }
        }
        if (params.w_up != nullptr) {
            dot_products<Element, Cfg::kDotSlots>(
                count, params.d_model, shared_address(dynamic) + warp * (Cfg::kDotSlots * kBytesDot),
                [&](int i) { return params.x + static_cast<int64_t>(token_of(i)) * params.d_model; },
                [&](int i) { return params.w_up + static_cast<int64_t>(neuron_begin + neuron_of(i)) * params.d_model; },
                [&](int i, float sum) { finish(neuron_of(i), token_of(i), sum); },
                block_scales_of(params.up_scale, params.gate_up_blocks, neuron_begin));
        }
        return;
    }

    // Of many, like the gate projection, with the active neurons and tokens only. First the lists of them, in ascending
    // order.
    int num_neurons = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kTilesM; ++i) {
        uint32_t const mask = shared.neuron_any[i];
        if (thread / MMA_M == i && (mask >> (thread % MMA_M) & 1u) != 0) {
            shared.neurons[num_neurons + __popc(mask & ((1u << (thread % MMA_M)) - 1u))] = thread;
        }
        num_neurons += __popc(mask);
    }
    uint32_t const tokens_low = shared.token_any[0];
    uint32_t const tokens_high = shared.token_any[1];
    int const num_tokens = __popc(tokens_low) + __popc(tokens_high);
    if (thread < Cfg::kTokens) {
        uint32_t const mask = thread < 32 ? tokens_low : tokens_high;
        if ((mask >> (thread % 32) & 1u) != 0) {
            int const before = thread < 32 ? 0 : __popc(tokens_low);
            shared.tokens[before + __popc(mask & ((1u << (thread % 32)) - 1u))] = thread;
        }
    }
    __syncthreads();
    if (params.h_rounded == nullptr) {  // else the next kernel probably reads all, in another order
        for (int p = thread / kWarpSize; p < num_neurons; p += kWarps) {
            prefetch_w_down(shared.neurons[p]);
        }
    }
    if (params.w_up == nullptr) {
#pragma unroll 1
        for (int i = thread; i < Cfg::kNeurons * Cfg::kTokens; i += kThreads) {
            finish(i / Cfg::kTokens, i % Cfg::kTokens, 1.0f);
        }
        return;
    }
    project<Element, Cfg>(
        Listed<Stored>{params.w_up, neuron_begin, num_neurons, shared.neurons,
                       block_scales_of(params.up_scale, params.gate_up_blocks, neuron_begin)},
        Listed<uint16_t>{params.x, 0, num_tokens, shared.tokens}, params.d_model, dynamic, [] {}, [] {},
        [&](int m, int n, float sum) {
            if (m < num_neurons && n < num_tokens) {
                finish(shared.neurons[m], shared.tokens[n], sum);
            }
        });
}

}  // namespace twell::gate_up_few

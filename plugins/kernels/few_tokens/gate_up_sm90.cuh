// Gate and up projections for 17 to 128 tokens on Hopper (sm_90a): h[t, n] of the active neurons n of each token t.
//
// A cluster of two CTAs owns some neurons and all of d_model, so that the weights come from memory once, and no
// cluster waits for another's sums. Each CTA has half of the tokens: with all tokens in each, reading x over and over
// would take longer than reading the weights. Warpgroups multiply tokens x neurons by wgmma, from a queue of slices
// that one warp fills by TMA. Clusters begin at different places of d_model, or all would read the same lines of x at
// the same time.
//
// Up to 64 tokens the CTA that finds a neuron active computes its up projection at once: if a CTA has few active pairs
// of a neuron and a token, a warp takes one after the other; if one of a cluster has many, both multiply w_up as they
// did w_gate. For more tokens most neurons are active for some token, so w_up is multiplied together with w_gate. CTAs
// leave the number of their active pairs for the down projection, which is dense if there are many (down_sm90.cuh).
#pragma once

#include <cuda.h>

#include "device/block.cuh"
#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "device/element.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "format/active.cuh"
#include "matmul/matmul_sm90.cuh"
#include "twell/twell.h"

namespace twell::gate_up_sm90 {

using matmul_sm90::BLOCK_K;
using matmul_sm90::kBytesRow;
using matmul_sm90::kMaxSharedBytes;
using matmul_sm90::kWarpgroupSize;
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_M;

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kLoader = kWarps - 1;  // this warp loads; the first warpgroups multiply

struct Params : BlockTensors {
    CUtensorMap x_map;       // [tokens, d_model], boxes of [Config::kTokens, BLOCK_K]
    CUtensorMap w_gate_map;  // [d_ff, d_model], boxes of [Config::kBoxNeurons, BLOCK_K]
    CUtensorMap w_up_map;    // likewise; not used in a plain block
    uint32_t* masks;         // [tokens, num_mask_words]: see gate_up_few.cuh
    uint16_t* h;             // [tokens, num_mask_words * kMaskBits], rounded, 0 where no neuron is active
    int2* counted;           // [CTAs]: see few.h; or kManyPairs
    int* counters;           // [num_counters], which become 0: see down_sm90.cuh
    int tokens;
    int tokens_per_cta;  // at most Config::kTokens
    int num_mask_words;
    int num_counters;
};

// Said of a CTA that has lost an h to rounding: more than any sparse down projection is for. The dense one sums values
// again where that matters.
constexpr int kManyPairs = 1 << 20;

// An active neuron of a token; both are counted within the CTA's.
struct Pair {
    uint8_t neuron;
    uint8_t token;
    uint16_t g;
};

// In the epilogues a thread has four neighbouring neurons of every kTokensAtOnce-th token.
constexpr int kQuad = 4;
constexpr int kQuadsOfWord = kMaskBits / kQuad;
static_assert(kMaskBits == kWarpSize, "a lane for each bit");

// Clusters of kNeuronsOfCluster neurons; CTAs of kMaxTokens tokens; kUpAlways: u of all neurons is computed, active or
// not.
template <int kNeuronsOfCluster, int kMaxTokens, bool kUpAlways, int kStages>
struct Config {
    static constexpr int kNeurons = kNeuronsOfCluster;
    static constexpr int kMaskWords = kNeurons / kMaskBits;
    static_assert(kNeurons % kMaskBits == 0, "whole mask words");
    static constexpr int kQuads = kNeurons / kQuad;
    static constexpr int kTokensAtOnce = kThreads / kQuads;
    static_assert(kQuads % kQuadsOfWord == 0 && kWarpSize % kQuadsOfWord == 0, "neighbouring lanes have a mask word");
    // Of a CTA, up to which a row of w_up for each takes less than reading all of the cluster's w_up. Measured with
    // d_model 2048, and for more neurons with 2048 to 5120.
    static constexpr int kMostPairs = kNeurons <= 96 ? kNeurons / 2 + 2 : kNeurons * 3 / 10;

    static constexpr int kTokens = kMaxTokens;
    // Rows from which sums are read, also behind the last token.
    static constexpr int kTokensRead = kTokens + kTokensAtOnce;
    static constexpr bool kComputesAll = kUpAlways;
    static constexpr int kNumStages = kStages;
    static constexpr int BLOCK_N = kNeurons * (kComputesAll ? 2 : 1);
    static constexpr int kAccumulators = WGMMA_M * BLOCK_N / kWarpgroupSize;

    static constexpr int kConsumerWarps = (kTokens + WGMMA_M - 1) / WGMMA_M * kWarpgroupWarps;
    static_assert(kConsumerWarps <= kLoader, "one warp loads");

    // Shared memory: stages of x and weights, and in their place sums, then dot products.
    static constexpr int kBoxNeurons = BLOCK_N / kClusterSize;  // that each CTA loads for both
    static constexpr int kBytesBox = kBoxNeurons * kBytesRow;
    static constexpr int kBytesX = kTokens * kBytesRow;
    static constexpr int kBytesStage = kBytesX + BLOCK_N * kBytesRow;
    static constexpr int kBytesStages = kNumStages * kBytesStage;
    static constexpr int kDotSlots = kBytesStages >= 2 * kWarps * kBytesDot ? 2 : 1;  // of each warp
    // Sums of a token. Padded, so that the 8 x 4 pairs of a fragment fall into different banks.
    static constexpr int kStrideSums = BLOCK_N + 8;
    struct Storage {
        alignas(8) uint16_t b_gate[kNeurons];
        uint16_t b_up[kNeurons];
        uint2 g[kComputesAll ? 1 : kTokens * kQuads];
        uint32_t active[kMaskWords];  // neurons, of any token
        int pairs_of_token[kTokens];
        int num_listed;
        int other_pairs;                            // that the other CTA has
        Pair pairs[kComputesAll ? 1 : kMostPairs];  // in any order
    };
    static constexpr int kOffsetBarriers = kBytesStages;
    static constexpr int kOffsetStorage = kOffsetBarriers + (2 * kNumStages + 1) * 8;
    static constexpr int kSharedBytes = kOffsetStorage + static_cast<int>(sizeof(Storage));
    static_assert(kSharedBytes <= kMaxSharedBytes, "what a block of sm_90 can have");
    static_assert(kComputesAll || kWarps * kDotSlots * kBytesDot <= kBytesStages,
                  "dot products take the stages' place");
    static_assert(kBytesX % 1024 == 0 && kBytesBox % 1024 == 0,
                  "swizzle patterns of 128 bytes start at multiples of 1024");
    // NOTE: for tokens that are not there it multiplies whatever lies behind x; their rows of the result are not used.
    static_assert(kBytesStage >= kConsumerWarps / kWarpgroupWarps * WGMMA_M * kBytesRow, "reads beyond the stages");
    static_assert(kTokensRead * kStrideSums * 4 <= kBytesStages, "sums take the stages' place");
    static_assert(kNeurons <= 256 && kTokens <= 256, "what a pair's word can hold");
};

// The layout of shared memory.
template <class Cfg>
struct Stages {
    uint32_t base;

    __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * Cfg::kBytesStage; }
    __device__ __forceinline__ uint32_t w(int stage) const { return x(stage) + Cfg::kBytesX; }
    __device__ __forceinline__ uint32_t full(int stage) const { return base + Cfg::kOffsetBarriers + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(Cfg::kNumStages + stage); }

    // When the other CTA has sent its number of pairs.
    __device__ __forceinline__ uint32_t told() const { return full(2 * Cfg::kNumStages); }

    __device__ __forceinline__ uint32_t sums(int token, int neuron) const {
        return base + (token * Cfg::kStrideSums + neuron) * 4;
    }

    // By one thread.
    __device__ __forceinline__ void init() const {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), kClusterSize * Cfg::kConsumerWarps);
        }
        init_barrier(told(), 1);
        publish_barriers();
        arrive_and_expect(told(), sizeof(int));
    }
};

// The weights that a pass over d_model multiplies; each CTA loads its part for the whole cluster.
enum class Pass {
    kGate,  // w_gate, and w_up if the kernel computes all
    kUp
};

// Brings all slices of the weights and x into the stages, by one warp.
template <Pass kPass, class Cfg>
__device__ __forceinline__ void load_slices(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                            Params const& params, int neuron_begin, int token_begin) {
    int const num_slices = (params.d_model + BLOCK_K - 1) / BLOCK_K;
    int const num_clusters = static_cast<int>(gridDim.x) / kClusterSize;
    int const rank = static_cast<int>(blockIdx.x) % kClusterSize;
    int const cluster = static_cast<int>(blockIdx.x) / kClusterSize;
    int slice = static_cast<int>(static_cast<int64_t>(num_slices) * cluster / num_clusters);
    bool const has_up = Cfg::kComputesAll && params.w_up != nullptr;
    constexpr int kBoxesOfGate = Cfg::kNeurons / Cfg::kBoxNeurons;
    uint64_t const policy = evict_first();
    int const num_boxes = kPass == Pass::kGate && has_up ? 2 * kBoxesOfGate : kBoxesOfGate;
    for (int i = 0; i < num_slices; ++i) {
        wait_barrier(stages.empty(ring.stage), ring.parity ^ 1);
        if (threadIdx.x % kWarpSize == 0) {
            uint32_t const full = stages.full(ring.stage);
            int const column = slice * BLOCK_K;
            arrive_and_expect(full, num_boxes * Cfg::kBytesBox + Cfg::kBytesX);
            if (rank < num_boxes) {
                bool const is_gate = kPass == Pass::kGate && rank < kBoxesOfGate;
                load_box_for_all(stages.w(ring.stage) + rank * Cfg::kBytesBox,
                                 is_gate ? params.w_gate_map : params.w_up_map, full, column,
                                 neuron_begin + rank % kBoxesOfGate * Cfg::kBoxNeurons, policy);
            }
            load_box(stages.x(ring.stage), params.x_map, full, column, token_begin);
        }
        __syncwarp();
        ring.advance();
        slice = slice + 1 == num_slices ? 0 : slice + 1;
    }
}

// Multiplies them, by the first warpgroups.
template <class Element, class Cfg>
__device__ __forceinline__ void multiply(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                         int d_model, float (&accumulators)[1][Cfg::kAccumulators]) {
    uint32_t const rows = threadIdx.x / kWarpgroupSize * (WGMMA_M * kBytesRow);
    matmul_sm90::multiply_slices<Element, Cfg::BLOCK_N, false>(
        accumulators, ring, (d_model + BLOCK_K - 1) / BLOCK_K, [&](int stage) { return stages.full(stage); },
        [&](int stage) { return stages.x(stage) + rows; }, [&](int stage) { return stages.w(stage); },
        [&](int, int stage) { matmul_sm90::release_stage(stages.empty(stage)); });
}

// Leaves the sums, [num_tokens, kStrideSums], in the stages' place, when all have been read. Those of the first tokens
// that were loaded are skipped.
template <class Cfg>
__device__ __forceinline__ void store_sums(Stages<Cfg> const& stages, int skipped, int num_tokens,
                                           float const (&accumulators)[Cfg::kAccumulators]) {
    int const lane = threadIdx.x % kWarpSize;
    // Fragments: tokens lane / 4 and lane / 4 + 8 of a warp's 16, neurons lane % 4 * 2 and the next of each 8.
    int const token = static_cast<int>(threadIdx.x) / kWarpSize * 16 + lane / 4 - skipped;
    uint32_t const sums = stages.sums(token, lane % 4 * 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (token + r * 8 >= 0 && token + r * 8 < num_tokens) {
#pragma unroll
            for (int octet = 0; octet < Cfg::BLOCK_N / 8; ++octet) {
                store_floats(sums + (r * 8 * Cfg::kStrideSums + octet * 8) * 4, accumulators[octet * 4 + r * 2],
                             accumulators[octet * 4 + r * 2 + 1]);
            }
        }
    }
}

template <class Element>
__device__ __forceinline__ float finish_up(Params const& params, float sum, float bias) {
    float const u = params.b_up == nullptr ? sum : sum + bias;
    return params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
}

__device__ __forceinline__ int64_t h_stride(Params const& params) {
    return static_cast<int64_t>(params.num_mask_words) * kMaskBits;
}

// Clears counters, and h where not all of it will be stored. By the warps that neither load nor multiply.
template <class Cfg>
__device__ __forceinline__ void clear(Params const& params, int neuron_begin, int token_begin, int num_tokens) {
    constexpr int kFirst = Cfg::kConsumerWarps * kWarpSize;
    constexpr int kIdle = kLoader * kWarpSize - kFirst;
    constexpr int kVectors = Cfg::kNeurons / kVector;
    int const thread = static_cast<int>(threadIdx.x) - kFirst;
    if constexpr (!Cfg::kComputesAll) {
        for (int i = thread; i < num_tokens * kVectors; i += kIdle) {
            int const n = neuron_begin + i % kVectors * kVector;
            int64_t const token = token_begin + i / kVectors;
            if (n < h_stride(params)) {
                *reinterpret_cast<uint4*>(params.h + token * h_stride(params) + n) = {};
            }
        }
    }
    for (int i = blockIdx.x * kIdle + thread; i < params.num_counters; i += gridDim.x * kIdle) {
        params.counters[i] = 0;
    }
}

// A thread's neurons, from `first` of the cluster's on.
template <class Cfg>
struct Quad {
    int first;
    int neuron;   // of all
    int token;    // the thread's first one
    uint2 valid;  // all bits of those that there are
    uint2 cuts;   // see Activation

    template <class Element>
    __device__ __forceinline__ void load_cuts(Params const& params) {
        cuts = make_uint2(cuts_of_pair<Element>(params.act.cut, params.act.cuts, neuron, params.d_ff),
                          cuts_of_pair<Element>(params.act.cut, params.act.cuts, neuron + 2, params.d_ff));
    }

    __device__ __forceinline__ Quad(Params const& params, int neuron_begin) {
        first = static_cast<int>(threadIdx.x) % Cfg::kQuads * kQuad;
        token = static_cast<int>(threadIdx.x) / Cfg::kQuads;
        neuron = neuron_begin + first;
        auto const bits = [&](int i) {
            return (neuron + i < params.d_ff ? 0xffffu : 0u) | (neuron + i + 1 < params.d_ff ? 0xffff0000u : 0u);
        };
        valid = make_uint2(bits(0), bits(2));
    }

    // Whether there is such a token for this thread, of those that the CTA looks at from `first_token` on. Threads that
    // are left when all quads have their share have none.
    __device__ __forceinline__ bool has(int first_token, int num_tokens) const {
        return first_token + token < num_tokens && token < Cfg::kTokensAtOnce;
    }
};

template <class Element>
__device__ __forceinline__ float4 add_biases(float4 sums, uint16_t const* biases) {
    uint2 const pairs = *reinterpret_cast<uint2 const*>(biases);
    float2 const low = Element::to_float2(pairs.x);
    float2 const high = Element::to_float2(pairs.y);
    return make_float4(sums.x + low.x, sums.y + low.y, sums.z + high.x, sums.w + high.y);
}

// The activated gate values of a token, by its sums; 0 behind the last neuron and token.
template <class Element, class Cfg>
__device__ __forceinline__ uint2 activate_quad(Params const& params, Stages<Cfg> const& stages,
                                               typename Cfg::Storage const& storage, Quad<Cfg> const& quad, int token,
                                               bool exists) {
    float4 z = load_floats(stages.sums(token, quad.first));
    if (params.b_gate != nullptr) {
        z = add_biases<Element>(z, storage.b_gate + quad.first);
    }
    return exists ? make_uint2(activate2<Element>(z.x, z.y, params.act.square, quad.cuts.x) & quad.valid.x,
                               activate2<Element>(z.z, z.w, params.act.square, quad.cuts.y) & quad.valid.y)
                  : make_uint2(0, 0);
}

// Brings the row of w_down that the next kernel needs for a neuron into L2. NOTE: by TMA, since the units that load and
// store are busy until a prefetch of theirs has found its place.
__device__ __forceinline__ void prefetch_down(Params const& params, int neuron) {
    prefetch_bytes(params.w_down + int64_t{neuron} * params.d_out, static_cast<uint32_t>(params.d_out) * 2);
}

// Where more lanes of a warp have an active neuron, the down projection is probably dense and reads w_down in another
// order.
constexpr int kMostPrefetching = 4;

// Stores the mask word of neighbouring lanes' quads of a token, and counts its neurons.
template <bool kPrefetches, class Cfg>
__device__ __forceinline__ void store_mask(Params const& params, typename Cfg::Storage& storage, Quad<Cfg> const& quad,
                                           int token_begin, int token, bool exists, uint32_t active) {
    bool const prefetches = kPrefetches && __popc(__ballot_sync(0xffffffffu, active != 0)) <= kMostPrefetching;
    uint32_t word = active << quad.first % kMaskBits;
#pragma unroll
    for (int distance = 1; distance < kQuadsOfWord; distance *= 2) {
        word |= __shfl_xor_sync(0xffffffffu, word, distance);
    }
    int const index = quad.neuron / kMaskBits;
    if (threadIdx.x % kQuadsOfWord == 0 && exists && index < params.num_mask_words) {
        params.masks[static_cast<int64_t>(token_begin + token) * params.num_mask_words + index] = word;
        if (word != 0) {
            atomicAdd(&storage.pairs_of_token[token], __popc(word));
            uint32_t const before = atomicOr(&storage.active[quad.first / kMaskBits], word);
            for (uint32_t rest = prefetches ? word & ~before : 0; rest != 0; rest &= rest - 1) {
                prefetch_down(params, quad.neuron + __ffs(rest) - 1);
            }
        }
    }
}

// The number of pairs of a CTA, and the most that a token has, by a warp.
template <class Storage>
__device__ __forceinline__ int2 count_pairs(Storage const& storage) {
    constexpr int kTokens = sizeof(storage.pairs_of_token) / sizeof(storage.pairs_of_token[0]);
    int pairs = 0;
    int most = 0;
#pragma unroll
    for (int t = 0; t < kTokens; t += kWarpSize) {
        int const of_token = storage.pairs_of_token[t + threadIdx.x % kWarpSize];
        pairs += of_token;
        most = max(most, of_token);
    }
    return make_int2(__reduce_add_sync(0xffffffffu, pairs), __reduce_max_sync(0xffffffffu, most));
}

// Stores the masks, keeps g, and lists the active pairs as far as there is place.
template <class Element, class Cfg>
__device__ __forceinline__ void list_active(Params const& params, Stages<Cfg> const& stages,
                                            typename Cfg::Storage& storage, int neuron_begin, int token_begin,
                                            int num_tokens) {
    Quad<Cfg> quad(params, neuron_begin);
    quad.template load_cuts<Element>(params);
    int const lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int first = 0; first < num_tokens; first += Cfg::kTokensAtOnce) {
        int const t = first + quad.token;
        bool const exists = quad.has(first, num_tokens);
        uint2 const g = activate_quad<Element>(params, stages, storage, quad, t, exists);
        if (exists) {
            storage.g[t * Cfg::kQuads + quad.first / kQuad] = g;
        }
        uint32_t const active = find_nonzeros(g);
        store_mask<false, Cfg>(params, storage, quad, token_begin, t, exists, active);
        if (!__any_sync(0xffffffffu, active != 0)) {
            continue;
        }
        int const count = __popc(active);
        int const up_to = static_cast<int>(sum_up_to(count));
        int position = 0;
        if (lane == kWarpSize - 1) {
            position = atomicAdd(&storage.num_listed, up_to);
        }
        position = __shfl_sync(0xffffffffu, position, kWarpSize - 1) + up_to - count;
        for (uint32_t rest = active; rest != 0 && position < Cfg::kMostPairs; rest &= rest - 1, ++position) {
            int const i = __ffs(rest) - 1;
            uint32_t const values = i < 2 ? g.x : g.y;
            storage.pairs[position] = {static_cast<uint8_t>(quad.first + i), static_cast<uint8_t>(t),
                                       static_cast<uint16_t>(i % 2 == 0 ? values : values >> 16)};
        }
    }
}

// Whether rounding has made an h infinite or 0.
__device__ __forceinline__ bool is_lost(float h, float rounded) {
    return (rounded == 0.0f) != (h == 0.0f) || isinf(rounded) != isinf(h);
}

// h of a pair, where `sum` is u without its bias. Says whether it is lost.
template <class Element, class Storage>
__device__ __forceinline__ bool store_pair(Params const& params, Storage const& storage, Pair pair, int neuron_begin,
                                           int token_begin, float sum) {
    float const u = finish_up<Element>(params, sum, Element::to_float(storage.b_up[pair.neuron]));
    float const h = Element::to_float(pair.g) * u;
    uint16_t const bits = Element::from_float(h);
    params.h[(token_begin + pair.token) * h_stride(params) + neuron_begin + pair.neuron] = bits;
    return is_lost(h, Element::to_float(bits));
}

// h of a quad of a token, with g, and sums of the up projection in shared memory, from a column on. Says whether one is
// lost.
template <class Element, class Cfg>
__device__ __forceinline__ bool store_quad(Params const& params, Stages<Cfg> const& stages,
                                           typename Cfg::Storage const& storage, Quad<Cfg> const& quad,
                                           int first_column, int token_begin, int token, bool exists, uint2 g) {
    uint2 bits = make_uint2(0, 0);
    bool lost = false;
    // Mostly none is active.
    if (__any_sync(0xffffffffu, (g.x | g.y) != 0)) {
        float2 const g_low = Element::to_float2(g.x);
        float2 const g_high = Element::to_float2(g.y);
        float4 h = make_float4(g_low.x, g_low.y, g_high.x, g_high.y);
        if (params.w_up != nullptr) {
            float4 u = load_floats(stages.sums(token, first_column + quad.first));
            if (params.b_up != nullptr) {
                u = add_biases<Element>(u, storage.b_up + quad.first);
            }
            if (params.relu_on_up) {  // NaN is kept
                u = make_float4(u.x <= 0.0f ? 0.0f : u.x, u.y <= 0.0f ? 0.0f : u.y, u.z <= 0.0f ? 0.0f : u.z,
                                u.w <= 0.0f ? 0.0f : u.w);
            }
            h = make_float4(h.x * u.x, h.y * u.y, h.z * u.z, h.w * u.w);
        }
        uint2 const active = make_uint2(Element::is_not_zero2(g.x), Element::is_not_zero2(g.y));
        bits = make_uint2(Element::from_float2(h.x, h.y) & active.x, Element::from_float2(h.z, h.w) & active.y);
        auto const maybe_lost = [](uint32_t pair, uint32_t active) {
            return (Element::is_not_finite2(pair) | ~Element::is_not_zero2(pair)) & active;
        };
        if ((maybe_lost(bits.x, active.x) | maybe_lost(bits.y, active.y)) != 0) {
            float2 const low = Element::to_float2(bits.x);
            float2 const high = Element::to_float2(bits.y);
            lost = ((active.x & 0xffffu) != 0 && is_lost(h.x, low.x)) | (active.x > 0xffffu && is_lost(h.y, low.y)) |
                   ((active.y & 0xffffu) != 0 && is_lost(h.z, high.x)) | (active.y > 0xffffu && is_lost(h.w, high.y));
        }
    }
    if (exists && quad.neuron < h_stride(params)) {
        *reinterpret_cast<uint2*>(params.h + (token_begin + token) * h_stride(params) + quad.neuron) = bits;
    }
    return lost;
}

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    gate_up_kernel(__grid_constant__ Params const params) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    auto& storage = *reinterpret_cast<typename Cfg::Storage*>(dynamic + Cfg::kOffsetStorage);
    Stages<Cfg> const stages = {shared_address(dynamic)};
    matmul_sm90::Ring<Cfg::kNumStages> ring;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const rank = static_cast<int>(blockIdx.x) % kClusterSize;
    int const neuron_begin = static_cast<int>(blockIdx.x) / kClusterSize * Cfg::kNeurons;
    int const token_begin = rank * params.tokens_per_cta;
    int const token_end = min(token_begin + params.tokens_per_cta, params.tokens);
    bool const multiplies = warp < Cfg::kConsumerWarps;
    bool const loads = warp == kLoader;
    allow_dependent_launch();
    if (loads && lane == 0) {
        stages.init();
        prefetch_map(params.w_gate_map);
        prefetch_map(params.x_map);
        storage.num_listed = 0;
        for (int w = 0; w < Cfg::kMaskWords; ++w) {
            storage.active[w] = 0;
        }
    }
    sync_cluster();
    wait_for_previous_launch();

    int const num_tokens = token_end - token_begin;
    matmul_sm90::Tokens const loaded(token_begin, Cfg::kTokens, params.tokens);
    bool const has_up = params.w_up != nullptr;
    float accumulators[1][Cfg::kAccumulators];  // of those that multiply
    if (loads) {
        load_slices<Pass::kGate>(stages, ring, params, neuron_begin, loaded.begin);
    } else if (multiplies) {
        multiply<Element, Cfg>(stages, ring, params.d_model, accumulators);
    } else {
        constexpr int kIdleThreads = (kLoader - Cfg::kConsumerWarps) * kWarpSize;
        int const idle = thread - Cfg::kConsumerWarps * kWarpSize;
        for (int m = idle; m < Cfg::kNeurons; m += kIdleThreads) {
            int const n = neuron_begin + m;
            storage.b_gate[m] = params.b_gate != nullptr && n < params.d_ff ? params.b_gate[n] : 0;
            storage.b_up[m] = params.b_up != nullptr && n < params.d_ff ? params.b_up[n] : 0;
        }
        for (int t = idle; t < Cfg::kTokens; t += kIdleThreads) {
            storage.pairs_of_token[t] = 0;
        }
        clear<Cfg>(params, neuron_begin, token_begin, num_tokens);
    }
    // NOTE: a barrier of the consumers alone would do, but then compute-sanitizer's racecheck does not see the next
    // one.
    __syncthreads();
    if (multiplies) {
        store_sums(stages, loaded.skipped, num_tokens, accumulators[0]);
    }
    __syncthreads();
    Quad<Cfg> quad(params, neuron_begin);
    quad.template load_cuts<Element>(params);
    bool lost = false;
    if constexpr (Cfg::kComputesAll) {
#pragma unroll 1
        for (int first = 0; first < num_tokens; first += Cfg::kTokensAtOnce) {
            int const t = first + quad.token;
            bool const exists = quad.has(first, num_tokens);
            uint2 const g = activate_quad<Element>(params, stages, storage, quad, t, exists);
            store_mask<true, Cfg>(params, storage, quad, token_begin, t, exists, find_nonzeros(g));
            lost |= store_quad<Element>(params, stages, storage, quad, Cfg::kNeurons, token_begin, t, exists, g);
        }
    } else {
        list_active<Element, Cfg>(params, stages, storage, neuron_begin, token_begin, num_tokens);
        fence_shared_for_tma();  // TMA may take the place of the sums
        __syncthreads();
        int const num_pairs = count_pairs(storage).x;
        bool by_pairs = false;
        if (has_up) {
            // Both CTAs multiply w_up as a whole, or neither does. NOTE: a CTA tells when its sums have been read, for
            // the other one may then load w_up into their place.
            if (thread == 0) {
                send_word(shared_address(&storage.other_pairs), num_pairs, stages.told());
            }
            wait_for_cluster(stages.told(), 0);
            by_pairs = max(num_pairs, storage.other_pairs) <= Cfg::kMostPairs;
        }
        if (by_pairs) {
            int const n = lane * kWarps + warp;
            if (n < Cfg::kNeurons && (storage.active[n / kWarpSize] >> n % kWarpSize & 1u) != 0) {
                prefetch_down(params, neuron_begin + n);
            }
            // A warp each.
            int const count = (num_pairs - warp + kWarps - 1) / kWarps;
            auto const pair_of = [&](int i) { return storage.pairs[warp + i * kWarps]; };
            dot_products<Element, Cfg::kDotSlots>(
                count, params.d_model, stages.base + warp * (Cfg::kDotSlots * kBytesDot),
                [&](int i) { return params.x + int64_t{token_begin + pair_of(i).token} * params.d_model; },
                [&](int i) { return params.w_up + int64_t{neuron_begin + pair_of(i).neuron} * params.d_model; },
                [&](int i, float sum) {
                    lost |= store_pair<Element>(params, storage, pair_of(i), neuron_begin, token_begin, sum);
                });
        } else {
            if (has_up) {
                if (loads) {
                    load_slices<Pass::kUp>(stages, ring, params, neuron_begin, loaded.begin);
                } else if (multiplies) {
                    multiply<Element, Cfg>(stages, ring, params.d_model, accumulators);
                }
                __syncthreads();
                if (multiplies) {
                    store_sums(stages, loaded.skipped, num_tokens, accumulators[0]);
                }
                __syncthreads();
            }
#pragma unroll 1
            for (int first = 0; first < num_tokens; first += Cfg::kTokensAtOnce) {
                int const t = first + quad.token;
                bool const exists = quad.has(first, num_tokens);
                uint2 const g = exists ? storage.g[t * Cfg::kQuads + quad.first / kQuad] : make_uint2(0, 0);
                lost |= store_quad<Element>(params, stages, storage, quad, 0, token_begin, t, exists, g);
            }
        }
    }
    if (loads) {
        // Then the other CTA does not signal this one's barriers any more, so that it may end. (To meet the other one
        // takes longer, for that waits for what both have stored.)
        for (int i = 0; i < Cfg::kNumStages; ++i) {
            wait_barrier(stages.empty(ring.stage), ring.parity ^ 1);
            ring.advance();
        }
    }
    bool const any_lost = __syncthreads_or(lost) != 0;
    int2 const counted = count_pairs(storage);
    if (thread == 0) {
        params.counted[blockIdx.x] = make_int2(any_lost ? kManyPairs : counted.x, counted.y);
    }
}

}  // namespace twell::gate_up_sm90

// Gate and up projections for 33 to 128 tokens on Hopper (sm_90a): h[t, n] of the active neurons n of each token t.
//
// A cluster of two CTAs owns 96 neurons and all of d_model, so that the weights come from memory once, and nobody waits
// for another's sums. Each CTA has half of the tokens: with all tokens in each, reading x over and over would take
// longer than reading the weights. Warpgroups multiply tokens x neurons by wgmma, from a queue of slices that one
// warp fills by TMA. Clusters begin at different places of d_model, or all would read the same lines of x at the same
// time.
//
// Up to 64 tokens whoever finds a neuron active computes its up projection at once: if a CTA has few active pairs of a
// neuron and a token, a warp takes one after the other; if it has many, the CTA multiplies w_up as it did w_gate. For
// more tokens most neurons are active for some token, so w_up is multiplied together with w_gate. CTAs leave the number
// of their active pairs for the down projection, which is dense if there are many (down_sm90.cuh).
#ifndef TWELL_KERNELS_GATE_UP_SM90_CUH_
#define TWELL_KERNELS_GATE_UP_SM90_CUH_

#include <cuda.h>

#include "dependent_launch.cuh"
#include "element.cuh"
#include "gate_up_few.cuh"
#include "matmul_sm90.cuh"
#include "twell/twell.h"

namespace twell::gate_up_sm90 {

using matmul_sm90::BLOCK_K;
using matmul_sm90::kBytesRow;
using matmul_sm90::kMaxSharedBytes;
using matmul_sm90::kWarpgroupSize;
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_K;
using matmul_sm90::WGMMA_M;

constexpr int kWarps = 12;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kLoader = kWarps - 1;  // this warp loads; the first warpgroups multiply
constexpr int kClusterSize = 2;
// Of a cluster. 5632 or 11 008 neurons make 118 or 230 CTAs for 132 multiprocessors.
constexpr int kNeurons = 96;
constexpr int kMaskWords = kNeurons / gate_up_few::kMaskBits;
static_assert(kNeurons % gate_up_few::kMaskBits == 0 && gate_up_few::kMaskBits == kWarpSize, "a lane for each bit");

struct Params {
    CUtensorMap x;              // [tokens, d_model], boxes of [Config::kTokens, BLOCK_K]
    CUtensorMap w_gate;         // [d_ff, d_model], boxes of [Config::kBoxNeurons, BLOCK_K]
    CUtensorMap w_up;           // likewise; not used in a plain block
    uint16_t const* x_rows;     // the same matrices
    uint16_t const* w_up_rows;  // null in a plain block
    uint16_t const* w_down;     // [d_ff, d_out]; only brought closer
    uint16_t const* b_gate;     // [d_ff] or null
    uint16_t const* b_up;       // [d_ff] or null
    uint32_t* masks;            // [tokens, num_mask_words]: see gate_up_few.cuh
    uint16_t* h;                // [tokens, num_mask_words * kMaskBits], rounded, 0 where no neuron is active
    int2* counted;              // [CTAs]: see few.h; or kManyPairs
    int* counters;              // [num_counters], which become 0: see down_sm90.cuh
    int tokens;
    int tokens_per_cta;  // at most Config::kTokens
    int d_model;
    int d_ff;
    int d_out;
    int num_mask_words;
    int num_counters;
    int max_pairs;    // of a CTA, up to which it takes them one by one
    bool relu_on_up;  // dReLU
    Activation act;
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

// CTAs of kMaxTokens tokens; kUpAlways: u of all neurons is computed, active or not.
template <int kMaxTokens, bool kUpAlways, int kStages>
struct Config {
    static constexpr int kTokens = kMaxTokens;
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
    static constexpr int kDotSlots = kBytesStages >= 2 * kWarps * gate_up_few::kBytesDot ? 2 : 1;  // of each warp
    // Sums of a token. Padded, so that the 8 x 4 pairs of a fragment fall into different banks.
    static constexpr int kStrideSums = BLOCK_N + 8;
    struct Storage {
        uint16_t b_up[kNeurons];
        uint32_t prefetched[kMaskWords];  // neurons whose row of w_down is on its way
        int num_pairs;
        int most_of_token;
        int num_lost;                    // h that the element type cannot tell from infinity or 0
        Pair pairs[kTokens * kNeurons];  // in any order
    };
    static constexpr int kOffsetBarriers = kBytesStages;
    static constexpr int kOffsetStorage = kOffsetBarriers + 2 * kNumStages * 8;
    static constexpr int kSharedBytes = kOffsetStorage + static_cast<int>(sizeof(Storage));
    static_assert(kSharedBytes <= kMaxSharedBytes, "what a block of sm_90 can have");
    static_assert(kComputesAll || kWarps * kDotSlots * gate_up_few::kBytesDot <= kBytesStages,
                  "dot products take the stages' place");
    static_assert(kBytesX % 1024 == 0 && kBytesBox % 1024 == 0,
                  "swizzle patterns of 128 bytes start at multiples of 1024");
    // NOTE: for tokens that are not there it multiplies whatever lies behind x; their rows of the result are not used.
    static_assert(kBytesStage >= kConsumerWarps / kWarpgroupWarps * WGMMA_M * kBytesRow, "reads beyond the stages");
    static_assert(kTokens * kStrideSums * 4 <= kBytesStages, "sums take the stages' place");
    static_assert(kNeurons <= 256 && kTokens <= 256, "what a pair's word can hold");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using matmul_sm90::shared_address;

// What lies where in shared memory.
template <class Cfg>
struct Stages {
    uint32_t base;

    __device__ __forceinline__ uint32_t x(int stage) const { return base + stage * Cfg::kBytesStage; }
    __device__ __forceinline__ uint32_t w(int stage) const { return x(stage) + Cfg::kBytesX; }
    __device__ __forceinline__ uint32_t full(int stage) const { return base + Cfg::kOffsetBarriers + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(Cfg::kNumStages + stage); }

    __device__ __forceinline__ uint32_t sums(int token, int neuron) const {
        return base + (token * Cfg::kStrideSums + neuron) * 4;
    }

    // By one thread.
    __device__ __forceinline__ void init() const {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            matmul_sm90::init_barrier(full(stage), 1);
            matmul_sm90::init_barrier(empty(stage), kClusterSize * Cfg::kConsumerWarps);
        }
        matmul_sm90::publish_barriers();
    }
};

// Which matrices a pass over d_model multiplies, and who loads them.
enum class Pass {
    kShared,  // w_gate, and w_up if the kernel computes all: each CTA loads its part for the whole cluster
    kUpAlone  // w_up, by a CTA for itself
};

// Weights leave L2 first: no other CTA reads them, and what the next kernel needs should stay.
__device__ __forceinline__ uint64_t evict_first() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// matmul_sm90::load_box_for_all with that.
__device__ __forceinline__ void load_weights(uint32_t destination, CUtensorMap const& map, uint32_t barrier, int column,
                                             int row, uint64_t policy) {
    uint16_t const ctas = (1 << kClusterSize) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        ".L2::cache_hint [%0], [%1, {%4, %5}], [%2], %3, %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "h"(ctas), "r"(column), "r"(row), "l"(policy)
        : "memory");
}

// Brings all slices of the weights and x into the stages, by one warp.
template <Pass kPass, class Cfg>
__device__ __forceinline__ void load_slices(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                            Params const& params, int neuron_begin, int token_begin) {
    int const num_slices = (params.d_model + BLOCK_K - 1) / BLOCK_K;
    int const num_clusters = static_cast<int>(gridDim.x) / kClusterSize;
    int const rank = static_cast<int>(blockIdx.x) % kClusterSize;
    int const cluster = static_cast<int>(blockIdx.x) / kClusterSize;
    int slice = static_cast<int>(static_cast<int64_t>(num_slices) * cluster / num_clusters);
    bool const has_up = Cfg::kComputesAll && params.w_up_rows != nullptr;
    constexpr int kBoxesOfGate = kNeurons / Cfg::kBoxNeurons;
    uint64_t const policy = evict_first();
    int const num_boxes = kPass == Pass::kShared && has_up ? 2 * kBoxesOfGate : kBoxesOfGate;
    for (int i = 0; i < num_slices; ++i) {
        matmul_sm90::wait_barrier(stages.empty(ring.stage), ring.parity ^ 1);
        if (threadIdx.x % kWarpSize == 0) {
            uint32_t const full = stages.full(ring.stage);
            int const column = slice * BLOCK_K;
            matmul_sm90::arrive_and_expect(full, num_boxes * Cfg::kBytesBox + Cfg::kBytesX);
            if constexpr (kPass == Pass::kUpAlone) {
                for (int box = 0; box < num_boxes; ++box) {
                    matmul_sm90::load_box(stages.w(ring.stage) + box * Cfg::kBytesBox, params.w_up, full, column,
                                          neuron_begin + box * Cfg::kBoxNeurons);
                }
            } else if (rank < num_boxes) {
                load_weights(stages.w(ring.stage) + rank * Cfg::kBytesBox,
                             rank < kBoxesOfGate ? params.w_gate : params.w_up, full, column,
                             neuron_begin + rank % kBoxesOfGate * Cfg::kBoxNeurons, policy);
            }
            matmul_sm90::load_box(stages.x(ring.stage), params.x, full, column, token_begin);
        }
        __syncwarp();
        ring.advance();
        slice = slice + 1 == num_slices ? 0 : slice + 1;
    }
}

// Multiplies them, by the first warpgroups.
template <Pass kPass, class Element, class Cfg>
__device__ __forceinline__ void multiply(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                         int d_model, float (&accumulators)[Cfg::kAccumulators]) {
    int const lane = threadIdx.x % kWarpSize;
    int const num_slices = (d_model + BLOCK_K - 1) / BLOCK_K;
    uint32_t const rows = threadIdx.x / kWarpgroupSize * (WGMMA_M * kBytesRow);
    // Both CTAs' consumers say when a stage is empty, for both load into it; or each says so twice.
    uint32_t const rank = blockIdx.x % kClusterSize;
    auto const release = [&](int stage) {
        if (lane < kClusterSize) {
            matmul_sm90::arrive_at_cta(stages.empty(stage), kPass == Pass::kUpAlone ? rank : lane);
        }
    };
    int stage_before = 0;
    for (int slice = 0; slice < num_slices; ++slice) {
        matmul_sm90::wait_barrier(stages.full(ring.stage), ring.parity);
        uint64_t const a = matmul_sm90::describe(stages.x(ring.stage) + rows);
        uint64_t const b = matmul_sm90::describe(stages.w(ring.stage));
        matmul_sm90::begin_wgmma();
#pragma unroll
        for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
            Wgmma<Element, Cfg::BLOCK_N>::template run<false>(accumulators, a + k * (WGMMA_K * 2 >> 4),
                                                              b + k * (WGMMA_K * 2 >> 4), (slice | k) != 0);
        }
        matmul_sm90::commit_wgmma();
        // One slice stays in flight while the stage of the one before is handed back.
        matmul_sm90::wait_wgmma<1>();
        if (slice != 0) {
            release(stage_before);
        }
        stage_before = ring.stage;
        ring.advance();
    }
    matmul_sm90::wait_wgmma<0>();
    // The compiler does not know that the accumulators were not valid until here.
#pragma unroll
    for (int k = 0; k < Cfg::kAccumulators; ++k) {
        asm volatile("" : "+f"(accumulators[k])::"memory");
    }
    release(stage_before);
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
                asm volatile(
                    "st.shared.v2.f32 [%0], {%1, %2};" ::"r"(sums + (r * 8 * Cfg::kStrideSums + octet * 8) * 4),
                    "f"(accumulators[octet * 4 + r * 2]), "f"(accumulators[octet * 4 + r * 2 + 1])
                    : "memory");
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
    return static_cast<int64_t>(params.num_mask_words) * gate_up_few::kMaskBits;
}

__device__ __forceinline__ float load_sum(uint32_t address) {
    float sum;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(sum) : "r"(address) : "memory");
    return sum;
}

// What a lane knows of its neurons, the lane-th of each 32 of the cluster's.
struct Neurons {
    bool valid[kMaskWords];  // whether there is such a neuron
    float b_gate[kMaskWords];

    template <class Element>
    __device__ __forceinline__ void load(Params const& params, int neuron_begin) {
        int const lane = threadIdx.x % kWarpSize;
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) {
            int const n = neuron_begin + w * kWarpSize + lane;
            valid[w] = n < params.d_ff;
            b_gate[w] = params.b_gate != nullptr && valid[w] ? Element::to_float(params.b_gate[n]) : 0.0f;
        }
    }
};

// Stores zeros where list_active() and store_pairs() store nothing: h and masks. Clears the counters, too. By
// the warps that neither load nor multiply.
template <class Cfg>
__device__ __forceinline__ void clear(Params const& params, int neuron_begin, int token_begin, int num_tokens) {
    constexpr int kFirst = Cfg::kConsumerWarps * kWarpSize;
    constexpr int kIdle = kLoader * kWarpSize - kFirst;
    constexpr int kVectors = kNeurons / kVector;
    int const thread = static_cast<int>(threadIdx.x) - kFirst;
    for (int i = thread; i < num_tokens * kVectors; i += kIdle) {
        int const n = neuron_begin + i % kVectors * kVector;
        int64_t const token = token_begin + i / kVectors;
        if (n < h_stride(params)) {
            *reinterpret_cast<uint4*>(params.h + token * h_stride(params) + n) = {};
        }
    }
    for (int i = thread; i < num_tokens * kMaskWords; i += kIdle) {
        int const word = neuron_begin / kWarpSize + i % kMaskWords;
        int64_t const token = token_begin + i / kMaskWords;
        if (word < params.num_mask_words) {
            params.masks[token * params.num_mask_words + word] = 0;
        }
    }
    for (int i = blockIdx.x * kIdle + thread; i < params.num_counters; i += gridDim.x * kIdle) {
        params.counters[i] = 0;
    }
}

// Lists the active pairs, by the gate's sums, and stores the masks. A warp takes a token, each lane its neurons. NOTE:
// code that runs once costs its fetching, so that a short loop over all warps is faster than the consumers with their
// registers, and what can wait for the list does.
template <class Element, class Cfg>
__device__ __forceinline__ void list_active(Params const& params, Stages<Cfg> const& stages,
                                            typename Cfg::Storage& storage, Neurons const& neurons, int neuron_begin,
                                            int token_begin, int num_tokens) {
    int const lane = threadIdx.x % kWarpSize;
    int const word = neuron_begin / kWarpSize + lane;
    bool const stores_mask = lane < kMaskWords && word < params.num_mask_words;
#pragma unroll 1
    for (int t = threadIdx.x / kWarpSize; t < num_tokens; t += kWarps) {
        float z[kMaskWords];
        bool maybe_active = false;
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) {
            z[w] = load_sum(stages.sums(t, w * kWarpSize + lane)) + neurons.b_gate[w];
            maybe_active |= neurons.valid[w] && !(z[w] <= 0.0f);
        }
        // Mostly none is. (Every activation is 0 where z <= 0.)
        if (!__any_sync(0xffffffffu, maybe_active)) {
            continue;
        }
        uint16_t g[kMaskWords];
        int before[kMaskWords];
        uint32_t mine = 0;
        int total = 0;
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) {
            g[w] = neurons.valid[w] ? activate<Element>(z[w], params.act) : static_cast<uint16_t>(0);
            uint32_t const mask = __ballot_sync(0xffffffffu, is_nonzero(g[w]));
            mine = lane == w ? mask : mine;
            before[w] = total + __popc(mask & ((1u << lane) - 1u));
            total += __popc(mask);
        }
        if (stores_mask) {
            params.masks[static_cast<int64_t>(token_begin + t) * params.num_mask_words + word] = mine;
        }
        int position = 0;
        if (lane == 0) {
            position = atomicAdd(&storage.num_pairs, total);
            atomicMax(&storage.most_of_token, total);
        }
        position = __shfl_sync(0xffffffffu, position, 0);
#pragma unroll
        for (int w = 0; w < kMaskWords; ++w) {
            if (is_nonzero(g[w])) {
                storage.pairs[position + before[w]] = {static_cast<uint8_t>(w * kWarpSize + lane),
                                                       static_cast<uint8_t>(t), g[w]};
            }
        }
    }
}

// Brings the row of w_down that the next kernel needs for a pair into L2, unless it is on its way. NOTE: by TMA, since
// the units that load and store are busy until a prefetch of theirs has found its place.
template <class Storage>
__device__ __forceinline__ void prefetch_down(Params const& params, Storage& storage, Pair pair, int neuron_begin) {
    uint32_t const bit = 1u << pair.neuron % kWarpSize;
    if ((atomicOr(&storage.prefetched[pair.neuron / kWarpSize], bit) & bit) == 0) {
        int64_t const row = neuron_begin + pair.neuron;
        matmul_sm90::prefetch_bytes(params.w_down + row * params.d_out, static_cast<uint32_t>(params.d_out) * 2);
    }
}

// h of a pair, where u is without its bias; 1 in a plain block.
template <class Element, class Storage>
__device__ __forceinline__ void store_pair(Params const& params, Storage& storage, Pair pair, int neuron_begin,
                                           int token_begin, float sum) {
    float const bias = Element::to_float(storage.b_up[pair.neuron]);
    float const u = params.w_up_rows != nullptr ? finish_up<Element>(params, sum, bias) : 1.0f;
    float const h = Element::to_float(pair.g) * u;
    int64_t const token = token_begin + pair.token;
    int const neuron = neuron_begin + pair.neuron;
    uint16_t const bits = Element::from_float(h);
    float const rounded = Element::to_float(bits);
    if ((rounded == 0.0f) != (h == 0.0f) || isinf(rounded) != isinf(h)) {
        atomicAdd(&storage.num_lost, 1);
    }
    params.h[token * h_stride(params) + neuron] = bits;
}

// The same for all pairs, a thread each, with sums of the up projection in shared memory, from a column on.
template <class Element, class Cfg>
__device__ __forceinline__ void store_pairs(Params const& params, Stages<Cfg> const& stages,
                                            typename Cfg::Storage& storage, int first_column, int neuron_begin,
                                            int token_begin) {
    int const num_pairs = storage.num_pairs;
    // Where many are active, the down projection is probably dense and reads w_down in another order.
    bool const prefetches = num_pairs <= params.max_pairs;
    // A few are spread over the warps. Of many, mostly neighbours in memory go to neighbouring lanes.
    int const first =
        prefetches ? threadIdx.x % kWarpSize * kWarps + threadIdx.x / kWarpSize : static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int i = first; i < num_pairs; i += kThreads) {
        Pair const pair = storage.pairs[i];
        bool const has_up = params.w_up_rows != nullptr;
        float const sum = has_up ? load_sum(stages.sums(pair.token, first_column + pair.neuron)) : 1.0f;
        store_pair<Element>(params, storage, pair, neuron_begin, token_begin, sum);
        if (prefetches) {
            prefetch_down(params, storage, pair, neuron_begin);
        }
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    gate_up_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    auto& storage = *reinterpret_cast<typename Cfg::Storage*>(dynamic + Cfg::kOffsetStorage);
    Stages<Cfg> const stages = {shared_address(dynamic)};
    matmul_sm90::Ring<Cfg::kNumStages> ring;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const rank = static_cast<int>(blockIdx.x) % kClusterSize;
    int const neuron_begin = static_cast<int>(blockIdx.x) / kClusterSize * kNeurons;
    int const token_begin = rank * params.tokens_per_cta;
    int const token_end = min(token_begin + params.tokens_per_cta, params.tokens);
    bool const multiplies = warp < Cfg::kConsumerWarps;
    bool const loads = warp == kLoader;
    allow_dependent_launch();
    if (loads && lane == 0) {
        stages.init();
        matmul_sm90::prefetch_map(params.w_gate);
        matmul_sm90::prefetch_map(params.x);
        storage.num_pairs = 0;
        storage.most_of_token = 0;
        storage.num_lost = 0;
        for (int w = 0; w < kMaskWords; ++w) {
            storage.prefetched[w] = 0;
        }
    }
    matmul_sm90::sync_cluster();
    wait_for_previous_launch();

    int const num_tokens = token_end - token_begin;
    matmul_sm90::Tokens const loaded(token_begin, Cfg::kTokens, params.tokens);
    bool const has_up = params.w_up_rows != nullptr;
    float accumulators[Cfg::kAccumulators];  // of those that multiply
    Neurons neurons;
    if (warp != kLoader) {
        neurons.template load<Element>(params, neuron_begin);
    }
    if (loads) {
        load_slices<Pass::kShared>(stages, ring, params, neuron_begin, loaded.begin);
    } else if (multiplies) {
        multiply<Pass::kShared, Element, Cfg>(stages, ring, params.d_model, accumulators);
    } else {
        constexpr int kIdleThreads = (kLoader - Cfg::kConsumerWarps) * kWarpSize;
        int const idle = thread - Cfg::kConsumerWarps * kWarpSize;
        for (int m = idle; m < kNeurons; m += kIdleThreads) {
            int const n = neuron_begin + m;
            storage.b_up[m] = params.b_up != nullptr && n < params.d_ff ? params.b_up[n] : 0;
        }
        clear<Cfg>(params, neuron_begin, token_begin, num_tokens);
    }
    if (warp == kLoader) {
        neurons.template load<Element>(params, neuron_begin);
    }
    // NOTE: a barrier of the consumers alone would do, but then compute-sanitizer's racecheck does not see the next
    // one.
    __syncthreads();
    if (multiplies) {
        store_sums(stages, loaded.skipped, num_tokens, accumulators);
    }
    __syncthreads();
    list_active<Element, Cfg>(params, stages, storage, neurons, neuron_begin, token_begin, num_tokens);
    if constexpr (!Cfg::kComputesAll) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA may take the place of the sums
    }
    __syncthreads();
    int const num_pairs = storage.num_pairs;

    if (Cfg::kComputesAll) {
        store_pairs<Element, Cfg>(params, stages, storage, kNeurons, neuron_begin, token_begin);
    } else if (has_up && num_pairs <= params.max_pairs) {
        // A warp each.
        int const count = (num_pairs - warp + kWarps - 1) / kWarps;
        auto const pair_of = [&](int i) { return storage.pairs[warp + i * kWarps]; };
        if (lane < count) {
            prefetch_down(params, storage, pair_of(lane), neuron_begin);
        }
        gate_up_few::dot_products<Element, Cfg::kDotSlots>(
            count, params.d_model, stages.base + warp * (Cfg::kDotSlots * gate_up_few::kBytesDot),
            [&](int i) { return params.x_rows + int64_t{token_begin + pair_of(i).token} * params.d_model; },
            [&](int i) { return params.w_up_rows + int64_t{neuron_begin + pair_of(i).neuron} * params.d_model; },
            [&](int i, float sum) {
                store_pair<Element>(params, storage, pair_of(i), neuron_begin, token_begin, sum);
            });
    } else {
        if (has_up) {
            if (loads) {
                load_slices<Pass::kUpAlone>(stages, ring, params, neuron_begin, loaded.begin);
            } else if (multiplies) {
                multiply<Pass::kUpAlone, Element, Cfg>(stages, ring, params.d_model, accumulators);
            }
            __syncthreads();
            if (multiplies) {
                store_sums(stages, loaded.skipped, num_tokens, accumulators);
            }
            __syncthreads();
        }
        store_pairs<Element, Cfg>(params, stages, storage, 0, neuron_begin, token_begin);
    }
    matmul_sm90::sync_cluster();  // the other CTA may still arrive at this one's barriers
    if (thread == 0) {
        params.counted[blockIdx.x] = make_int2(storage.num_lost != 0 ? kManyPairs : num_pairs, storage.most_of_token);
    }
#endif
}

}  // namespace twell::gate_up_sm90

#endif  // TWELL_KERNELS_GATE_UP_SM90_CUH_

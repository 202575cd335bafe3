// Gate and up projections for few tokens on Hopper (sm_90a): h[t, n] of the active neurons n of each token t.
//
// A CTA owns 64 neurons, all tokens and all of d_model, so that w_gate comes from memory once, and nothing has to be
// exchanged. One warpgroup multiplies by wgmma, transposed: neurons x tokens. Each CTA begins at another place of
// d_model, or all would read the same lines of x at the same time.
//
// Whoever finds a neuron active computes its up projection at once. If a CTA has few active pairs of a neuron and a
// token, a warp takes one after the other; if it has many, the CTA multiplies w_up as it did w_gate. Such a CTA leaves
// word of it, for the down projection, which should then be dense, too (down_sm90.cuh).
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
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_K;
using matmul_sm90::WGMMA_M;

constexpr int kNeurons = WGMMA_M;  // of a CTA
constexpr int kThreads = 384;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kLoader = kWarps - 1;  // this warp loads; the first warpgroup multiplies
constexpr int kFirstIdle = kWarpgroupWarps;
// A CTA calls itself dense if it has too many active pairs, or a token with so many active neurons among 16 that the
// down projection should not take them one by one.
constexpr uint32_t kHeavy = 6;
// A warp's fragments have 16 neurons, in a core matrix for 8 tokens.
constexpr int kFragmentNeurons = 16;
constexpr int kFragmentTokens = 8;
static_assert(kNeurons % gate_up_few::kMaskBits == 0, "CTAs store whole mask words");

// Elements of a row that a dot product takes at a time, and bytes of w and x.
constexpr int kPiece = 2048;
constexpr int kBytesDot = 2 * kPiece * 2;

// Active pairs of a CTA up to which a warp computes u for each.
constexpr int kMaxPairs = 1024;

struct Params {
    CUtensorMap x;              // [tokens, d_model], boxes of [num_tokens_loaded, BLOCK_K]
    CUtensorMap w_gate;         // [d_ff, d_model], boxes of [kNeurons, BLOCK_K]
    CUtensorMap w_up;           // likewise; not used in a plain block
    uint16_t const* x_rows;     // the same matrices
    uint16_t const* w_up_rows;  // null in a plain block
    uint16_t const* w_down;     // [d_ff, d_out]; only brought closer
    uint16_t const* b_gate;     // [d_ff] or null
    uint16_t const* b_up;       // [d_ff] or null
    uint32_t* masks;            // [tokens, num_mask_words]: see gate_up_few.cuh
    float* h;                   // [tokens, d_ff], written where a neuron is active
    uint16_t* h_rounded;        // [tokens, num_mask_words * kMaskBits], of the element type, 0 where none is
    uint8_t* is_dense;          // [CTAs]
    int* counters;              // [num_counters], which become 0: see down_sm90.cuh
    int tokens;
    int num_tokens_loaded;  // the next multiple of 8
    int d_model;
    int d_ff;
    int d_out;
    int num_mask_words;
    int num_counters;
    int max_pairs;    // at most kMaxPairs
    bool relu_on_up;  // dReLU
    Activation act;
};

// For up to kMaxTokens tokens.
template <int kMaxTokens>
struct Config {
    static constexpr int BLOCK_N = kMaxTokens;
    static constexpr int kAccumulators = WGMMA_M * BLOCK_N / matmul_sm90::kWarpgroupSize;
    static constexpr int kOctets = BLOCK_N / kFragmentTokens;

    // Shared memory: stages; in their place first sums, later dot products too; the activated gate values, in the order
    // of fragments.
    static constexpr int kBytesA = kNeurons * kBytesRow;
    static constexpr int kBytesStage = kBytesA + BLOCK_N * kBytesRow;
    static constexpr int kBytesG = kNeurons * BLOCK_N * 2;
    struct Storage {
        uint16_t b_gate[kNeurons];
        uint16_t b_up[kNeurons];
        uint32_t pairs[kMaxPairs];  // neuron, token << 8, g << 16
        int num_pairs;
        uint32_t heaviest;  // most active neurons of a token among 16
    };
    static constexpr int kMostStages =
        (kMaxSharedBytes - kBytesG - static_cast<int>(sizeof(Storage)) - 512) / kBytesStage;
    static constexpr int kNumStages = kMostStages < 16 ? kMostStages : 16;
    static constexpr int kDotSlots = BLOCK_N > 64 ? 1 : 2;  // of each warp: what there is room for
    static constexpr int kBytesDots = kWarps * kDotSlots * kBytesDot;
    static constexpr int kOffsetDots = kNeurons * BLOCK_N * 4;  // behind the sums
    static constexpr int kOffsetG =
        kNumStages * kBytesStage > kOffsetDots + kBytesDots ? kNumStages* kBytesStage : kOffsetDots + kBytesDots;
    static constexpr int kOffsetBarriers = kOffsetG + kBytesG;
    static constexpr int kOffsetStorage = kOffsetBarriers + (2 * kNumStages + kWarps * kDotSlots) * 8;
    static constexpr int kSharedBytes = kOffsetStorage + static_cast<int>(sizeof(Storage));
    static_assert(kNumStages >= 3 && kSharedBytes <= kMaxSharedBytes, "what a block of sm_90 can have");
    static_assert(kBytesStage % 1024 == 0, "swizzle patterns of 128 bytes start at multiples of 1024");
    static_assert(kNeurons <= 256 && BLOCK_N <= 256, "what a pair's word can hold");
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using matmul_sm90::shared_address;

// Bits c, c + 4, ..., c + 28 of a ballot: what the lanes of one column of a fragment said, one bit a row.
__device__ __forceinline__ uint32_t bits_of_column(uint32_t ballot, int c) {
    uint32_t bits = (ballot >> c) & 0x11111111u;
    bits = (bits | bits >> 3) & 0x03030303u;
    bits = (bits | bits >> 6) & 0x000f000fu;
    return (bits | bits >> 12) & 0xffu;
}

// What lies where in shared memory.
template <class Cfg>
struct Stages {
    uint32_t base;

    __device__ __forceinline__ uint32_t a(int stage) const { return base + stage * Cfg::kBytesStage; }
    __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + Cfg::kBytesA; }
    __device__ __forceinline__ uint32_t full(int stage) const { return base + Cfg::kOffsetBarriers + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(Cfg::kNumStages + stage); }
    __device__ __forceinline__ uint32_t sums(int unit) const {
        return base + (unit * kWarpSize + threadIdx.x % kWarpSize) * 16;
    }
    __device__ __forceinline__ uint32_t dot(int slot) const { return base + Cfg::kOffsetDots + slot * kBytesDot; }
    __device__ __forceinline__ uint32_t dot_full(int slot) const { return full(2 * Cfg::kNumStages + slot); }
};

// Brings all slices of w and x into the stages, by one thread.
template <class Cfg>
__device__ __forceinline__ void load_slices(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                            Params const& params, CUtensorMap const& w) {
    int const num_slices = (params.d_model + BLOCK_K - 1) / BLOCK_K;
    int slice = static_cast<int>(static_cast<int64_t>(num_slices) * blockIdx.x / gridDim.x);
    for (int i = 0; i < num_slices; ++i) {
        matmul_sm90::wait_barrier(stages.empty(ring.stage), ring.parity ^ 1);
        uint32_t const full = stages.full(ring.stage);
        matmul_sm90::arrive_and_expect(full, (kNeurons + params.num_tokens_loaded) * kBytesRow);
        matmul_sm90::load_box(stages.a(ring.stage), w, full, slice * BLOCK_K, blockIdx.x * kNeurons);
        matmul_sm90::load_box(stages.b(ring.stage), params.x, full, slice * BLOCK_K, 0);
        ring.advance();
        slice = slice + 1 == num_slices ? 0 : slice + 1;
    }
}

// Multiplies them, by the first warpgroup. The sums take the stages' place.
template <class Element, class Cfg>
__device__ __forceinline__ void multiply(Stages<Cfg> const& stages, matmul_sm90::Ring<Cfg::kNumStages>& ring,
                                         Params const& params) {
    int const lane = threadIdx.x % kWarpSize;
    int const num_slices = (params.d_model + BLOCK_K - 1) / BLOCK_K;
    float accumulators[Cfg::kAccumulators];
    int stage_before = 0;
    for (int slice = 0; slice < num_slices; ++slice) {
        matmul_sm90::wait_barrier(stages.full(ring.stage), ring.parity);
        uint64_t const a = matmul_sm90::describe(stages.a(ring.stage));
        uint64_t const b = matmul_sm90::describe(stages.b(ring.stage));
        matmul_sm90::begin_wgmma();
#pragma unroll
        for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
            Wgmma<Element, Cfg::BLOCK_N>::template run<false>(accumulators, a + k * (WGMMA_K * 2 >> 4),
                                                              b + k * (WGMMA_K * 2 >> 4), (slice | k) != 0);
        }
        matmul_sm90::commit_wgmma();
        // One slice stays in flight while the stage of the one before is handed back.
        matmul_sm90::wait_wgmma<1>();
        if (slice != 0 && lane == 0) {
            matmul_sm90::arrive(stages.empty(stage_before));
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
    if (lane == 0) {
        matmul_sm90::arrive(stages.empty(stage_before));
    }
    asm volatile("bar.sync 1, %0;" ::"n"(matmul_sm90::kWarpgroupSize) : "memory");
#pragma unroll
    for (int octet = 0; octet < Cfg::kOctets; ++octet) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(
                         stages.sums(octet * kWarpgroupWarps + threadIdx.x / kWarpSize)),
                     "f"(accumulators[octet * 4]), "f"(accumulators[octet * 4 + 1]), "f"(accumulators[octet * 4 + 2]),
                     "f"(accumulators[octet * 4 + 3])
                     : "memory");
    }
}

// Then all warps, calls emit(unit, sums) for each warp and 8 tokens of the product, with the sums of the neurons
// lane / 4 and lane / 4 + 8 of that warp's 16, for the tokens lane % 4 * 2 and the next each. NOTE: a loop that stays
// one; unrolled, fetching its instructions takes longer than all else.
template <class Cfg, class Emit>
__device__ __forceinline__ void for_each_unit(Stages<Cfg> const& stages, Params const& params, Emit emit) {
    int const num_units = params.num_tokens_loaded / kFragmentTokens * kWarpgroupWarps;
#pragma unroll 1
    for (int unit = threadIdx.x / kWarpSize; unit < num_units; unit += kWarps) {
        float sums[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
                     : "r"(stages.sums(unit))
                     : "memory");
        emit(unit, sums);
    }
}

// Brings a row's piece into shared memory.
__device__ __forceinline__ void load_piece(uint32_t destination, uint16_t const* source, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// Calls emit(i, x_of(i) . w_of(i)) in one lane for i = 0 ... count - 1, by one warp, whose slots begin at `slots`. The
// order of a sum depends on d_model only.
template <class Element, class Cfg, class XOf, class WOf, class Emit>
__device__ __forceinline__ void dot_products(int count, int d_model, Stages<Cfg> const& stages, XOf x_of, WOf w_of,
                                             Emit emit) {
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const pieces = (d_model + kPiece - 1) / kPiece;
    int const num_items = count * pieces;
    auto const length_of = [&](int piece) { return min(kPiece, d_model - piece * kPiece); };
    auto const fetch = [&](int item) {
        if (lane == 0 && item < num_items) {
            int const i = item / pieces;
            int const piece = item - i * pieces;
            int const slot = warp * Cfg::kDotSlots + item % Cfg::kDotSlots;
            int const bytes = length_of(piece) * 2;
            matmul_sm90::arrive_and_expect(stages.dot_full(slot), 2 * bytes);
            load_piece(stages.dot(slot), w_of(i) + piece * kPiece, bytes, stages.dot_full(slot));
            load_piece(stages.dot(slot) + kPiece * 2, x_of(i) + piece * kPiece, bytes, stages.dot_full(slot));
        }
    };
#pragma unroll 1
    for (int item = 0; item < Cfg::kDotSlots; ++item) {
        fetch(item);
    }
    float sums[2] = {};
#pragma unroll 1
    for (int item = 0; item < num_items; ++item) {
        int const slot = warp * Cfg::kDotSlots + item % Cfg::kDotSlots;
        int const piece = item % pieces;
        uint32_t const w = stages.dot(slot) + lane * 16;
        matmul_sm90::wait_barrier(stages.dot_full(slot), item / Cfg::kDotSlots & 1);
        int const length = length_of(piece);
        constexpr int kStep = kWarpSize * kVector;
        auto const add = [&](float& sum, int step) {
            if (step * kStep + lane * kVector < length) {
                uint32_t const address = w + step * kStep * 2;
                accumulate<Element>(sum, gate_up_few::load_shared(address + kPiece * 2),
                                    gate_up_few::load_shared(address));
            }
        };
#pragma unroll 1
        for (int step = 0; step * kStep < length; step += 2) {
            add(sums[0], step);
            add(sums[1], step + 1);
        }
        __syncwarp();
        fetch(item + Cfg::kDotSlots);
        if (piece == pieces - 1) {
            float sum = sums[0] + sums[1];
#pragma unroll
            for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            if (lane == 0) {
                emit(item / pieces, sum);
            }
            sums[0] = sums[1] = 0.0f;
        }
    }
}

template <class Element>
__device__ __forceinline__ float finish_up(Params const& params, float sum, uint16_t bias) {
    float const u = params.b_up == nullptr ? sum : sum + Element::to_float(bias);
    return params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
}

// Clears this CTA's part of h_rounded, and the counters, by the warps that have nothing else to do.
__device__ __forceinline__ void clear(Params const& params, int neuron_begin, int thread) {
    constexpr int kIdleThreads = (kLoader - kFirstIdle) * kWarpSize;
    constexpr int kVectors = kNeurons / kVector;
    int const stride = params.num_mask_words * gate_up_few::kMaskBits;
    for (int i = thread; i < params.tokens * kVectors; i += kIdleThreads) {
        int const n = neuron_begin + i % kVectors * kVector;
        if (n < stride) {
            *reinterpret_cast<uint4*>(params.h_rounded + static_cast<int64_t>(i / kVectors) * stride + n) = {};
        }
    }
    if (blockIdx.x == 0) {
        for (int i = thread; i < params.num_counters; i += kIdleThreads) {
            params.counters[i] = 0;
        }
    }
}

template <class Element>
__device__ __forceinline__ void store_h(Params const& params, int64_t token, int64_t neuron, uint16_t g, float u) {
    float const h = Element::to_float(g) * u;
    params.h[token * params.d_ff + neuron] = h;
    params.h_rounded[token * params.num_mask_words * gate_up_few::kMaskBits + neuron] = Element::from_float(h);
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg>
__global__ void __launch_bounds__(kThreads, 1) gate_up_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    auto& storage = *reinterpret_cast<typename Cfg::Storage*>(dynamic + Cfg::kOffsetStorage);
    uint2* const g = reinterpret_cast<uint2*>(dynamic + Cfg::kOffsetG);  // [octet, warp, lane]: four values each
    Stages<Cfg> const stages = {shared_address(dynamic)};
    matmul_sm90::Ring<Cfg::kNumStages> ring;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const neuron_begin = blockIdx.x * kNeurons;
    bool const multiplies = warp < kWarpgroupWarps;
    bool const loads = thread == kLoader * kWarpSize;

    allow_dependent_launch();
    if (loads) {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            matmul_sm90::init_barrier(stages.full(stage), 1);
            matmul_sm90::init_barrier(stages.empty(stage), kWarpgroupWarps);
        }
        for (int slot = 0; slot < kWarps * Cfg::kDotSlots; ++slot) {
            matmul_sm90::init_barrier(stages.dot_full(slot), 1);
        }
        matmul_sm90::publish_barriers();
        matmul_sm90::prefetch_map(params.w_gate);
        matmul_sm90::prefetch_map(params.x);
        storage.num_pairs = 0;
        storage.heaviest = 0;
    }
    __syncthreads();
    wait_for_previous_launch();
    if (thread < kNeurons) {
        int const n = neuron_begin + thread;
        storage.b_gate[thread] = params.b_gate != nullptr && n < params.d_ff ? params.b_gate[n] : 0;
        storage.b_up[thread] = params.b_up != nullptr && n < params.d_ff ? params.b_up[n] : 0;
    }

    if (loads) {
        load_slices(stages, ring, params, params.w_gate);
    } else if (multiplies) {
        multiply<Element>(stages, ring, params);
    } else if (warp < kLoader) {
        clear(params, neuron_begin, thread - kFirstIdle * kWarpSize);
    }
    __syncthreads();
    for_each_unit(stages, params, [&](int unit, float const(&sums)[4]) {
        // Activate, and note which pairs are active.
        int const octet = unit / kWarpgroupWarps;
        int const row_tile = unit % kWarpgroupWarps;
        int const row = row_tile * kFragmentNeurons + lane / 4;
        int const token = octet * kFragmentTokens + lane % 4 * 2;
        uint32_t bits[4];
        uint32_t ballots[4];
        int before = 0;
        int total = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            int const m = row + k / 2 * 8;
            bool const valid = neuron_begin + m < params.d_ff && token + k % 2 < params.tokens;
            float const z = params.b_gate == nullptr ? sums[k] : sums[k] + Element::to_float(storage.b_gate[m]);
            bits[k] = valid ? activate<Element>(z, params.act) : static_cast<uint16_t>(0);
            ballots[k] = __ballot_sync(0xffffffffu, bits[k] != 0);
            before += __popc(ballots[k] & ((1u << lane) - 1u));
            total += __popc(ballots[k]);
        }
        g[unit * kWarpSize + lane] = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        uint32_t mask = 0;
        if (lane < kFragmentTokens) {
            int const t = octet * kFragmentTokens + lane;
            constexpr int kHalves = gate_up_few::kMaskBits / kFragmentNeurons;
            int const half = neuron_begin / kFragmentNeurons + row_tile;
            uint32_t const low = lane % 2 == 0 ? ballots[0] : ballots[1];
            uint32_t const high = lane % 2 == 0 ? ballots[2] : ballots[3];
            mask = bits_of_column(low, lane / 2) | bits_of_column(high, lane / 2) << 8;
            if (t < params.tokens && half < params.num_mask_words * kHalves) {
                reinterpret_cast<uint16_t*>(params.masks)[t * params.num_mask_words * kHalves + half] =
                    static_cast<uint16_t>(mask);
            }
        }
        if (total == 0) {
            return;
        }
        uint32_t const most = __reduce_max_sync(0xffffffffu, __popc(mask));
        int position = 0;
        if (lane == 0) {
            position = atomicAdd(&storage.num_pairs, total);
            atomicMax(&storage.heaviest, most);
        }
        position = __shfl_sync(0xffffffffu, position, 0) + before;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (bits[k] != 0) {
                if (position < kMaxPairs) {
                    storage.pairs[position] = static_cast<uint32_t>(row + k / 2 * 8) |
                                              static_cast<uint32_t>(token + k % 2) << 8 | bits[k] << 16;
                }
                ++position;
            }
        }
    });
    __syncthreads();
    int const num_pairs = storage.num_pairs;
    if (thread == 0) {
        params.is_dense[blockIdx.x] = num_pairs > params.max_pairs || storage.heaviest >= kHeavy ? 1 : 0;
    }

    if (num_pairs <= params.max_pairs) {
        // A warp each. (In whatever order they were found: each has its own place in h.)
        // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
        int const count = (num_pairs - warp + kWarps - 1) / kWarps;
        auto const pair_of = [&](int i) { return storage.pairs[warp + i * kWarps]; };
        auto const neuron_of = [&](int i) { return neuron_begin + static_cast<int64_t>(pair_of(i) & 0xffu); };
        auto const token_of = [&](int i) { return static_cast<int64_t>(pair_of(i) >> 8 & 0xffu); };
        auto const finish = [&](int i, float u) {
            store_h<Element>(params, token_of(i), neuron_of(i), static_cast<uint16_t>(pair_of(i) >> 16), u);
        };
        for (int i = 0; i < count; ++i) {
            // The next kernel reads this row.
            gate_up_few::prefetch_row(params.w_down + neuron_of(i) * params.d_out, params.d_out);
            if (params.w_up_rows == nullptr && lane == 0) {
                finish(i, 1.0f);
            }
        }
        if (params.w_up_rows != nullptr) {
            dot_products<Element>(
                count, params.d_model, stages, [&](int i) { return params.x_rows + token_of(i) * params.d_model; },
                [&](int i) { return params.w_up_rows + neuron_of(i) * params.d_model; },
                [&](int i, float sum) {
                    finish(i, finish_up<Element>(params, sum, storage.b_up[pair_of(i) & 0xffu]));
                });
        }
        return;
    }

    if (params.w_up_rows != nullptr) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA overwrites what was written or read
        __syncthreads();
        if (loads) {
            load_slices(stages, ring, params, params.w_up);
        } else if (multiplies) {
            multiply<Element>(stages, ring, params);
        }
        __syncthreads();
    }
    for_each_unit(stages, params, [&](int unit, float const(&sums)[4]) {
        uint2 const values = g[unit * kWarpSize + lane];
        uint32_t const words[2] = {values.x, values.y};
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            uint16_t const bits = static_cast<uint16_t>(words[k / 2] >> k % 2 * 16);
            int const m = unit % kWarpgroupWarps * kFragmentNeurons + lane / 4 + k / 2 * 8;
            int64_t const t = unit / kWarpgroupWarps * kFragmentTokens + lane % 4 * 2 + k % 2;
            if (is_nonzero(bits)) {
                float const u =
                    params.w_up_rows == nullptr ? 1.0f : finish_up<Element>(params, sums[k], storage.b_up[m]);
                store_h<Element>(params, t, neuron_begin + m, bits, u);
            }
        }
    });
#endif
}

}  // namespace twell::gate_up_sm90

#endif  // TWELL_KERNELS_GATE_UP_SM90_CUH_

// Down projection for few tokens on Hopper (sm_90a): the sparse one of masked_down.cuh, or a dense one.
//
// The sparse one reads a row of Wd for each pair of a token and an active neuron; where there are many, reading Wd once
// takes less. All CTAs know the number of pairs from what the gate left, and so take the same one of the two.
//
// The dense one is a matrix product by wgmma, transposed (columns x tokens). The CTAs of a block of columns share out
// the neurons; the last one to finish adds up what all have left in memory, in a fixed order. (In clusters, by
// distributed shared memory, that takes less. But clusters of four leave a tenth of the multiprocessors to themselves,
// and then the sparse projection needs a second round of CTAs.)
#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/epilogue.cuh"
#include "device/gather_rows.cuh"
#include "device/mbarrier.cuh"
#include "device/sum_again.cuh"
#include "device/tma.cuh"
#include "matmul/masked_down.cuh"
#include "matmul/matmul_sm90.cuh"
#include "twell/twell.h"

namespace twell::down_sm90 {

using matmul_sm90::BLOCK_K;
using matmul_sm90::kBytesRow;
using matmul_sm90::kWarpgroupSize;
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_M;

constexpr int kOctet = 8;
// A CTA's block of columns in a dense projection.
template <int kTokensOfWarpgroup, int kTokenTiles, int kStages>
struct Dense {
    static constexpr int kColumns = WGMMA_M;
    static constexpr int WGMMA_N = kTokensOfWarpgroup;
    static constexpr int kTokens = kTokenTiles * WGMMA_N;
    static constexpr int kMostShares = kTokens <= 64 ? 8 : 4;  // of the neurons
    static constexpr int kNumStages = kStages;
    static constexpr int kAccumulators = WGMMA_M * WGMMA_N / kWarpgroupSize;
    static constexpr int kConsumerWarps = kTokenTiles * kWarpgroupWarps;

    // Shared memory: stages of w_down, [BLOCK_K, kColumns], and of h.
    static constexpr int kBytesW = BLOCK_K * kBytesRow;
    static constexpr int kBytesStage = kBytesW + kTokens * kBytesRow;
    static constexpr int kSharedBytes = kNumStages * kBytesStage + 1024;  // and to the next multiple of the swizzle
    static constexpr int kSums = kTokens * kColumns;
    static_assert(kBytesStage % 1024 == 0, "swizzle patterns of 128 bytes start at multiples of 1024");
};

struct Params {
    masked_down::Params sparse;
    CUtensorMap w_down;   // [d_ff, d_out], boxes of [BLOCK_K, 64]
    CUtensorMap h;        // sparse.h_rounded, boxes of [Dense::kTokens, BLOCK_K]
    int2 const* counted;  // [num_gate_ctas]: see few.h
    float* sums;          // [blocks of columns, num_shares, Dense::kTokens, Dense::kColumns]
    int* counters;        // [blocks of columns], all 0
    int tokens;
    int num_gate_ctas;
    int2 most_sparse;  // in all, up to which the sparse projection is taken: likewise
    // Of a dense projection: blocks of columns x shares of the neurons. The first slices_left shares have a slice of
    // BLOCK_K more than the others.
    int num_dense_ctas;
    int num_column_blocks;
    int num_shares;
    int slices_each;
    int slices_left;
    // Of a sparse projection: slabs of columns x groups of tokens, each num_groups-th of them.
    int num_sparse_ctas;
    int num_slabs;
    int num_groups;
};

// By a warp whose lanes have stored four columns each, from the lane's `i` on: sums those again that were not finite.
template <class Element, class Cfg>
__device__ __forceinline__ void sum_failed_again(Params const& params, int column_begin, int i, bool failed) {
    constexpr int kLanes = kVector / 4;  // that share a sum
    constexpr int kVectors = Cfg::kColumns / 4;
    uint32_t rest = __ballot_sync(0xffffffffu, failed);
    __syncwarp();  // after the first store of these values
    while (rest != 0) {
        int const lane = (__ffs(rest) - 1) / kLanes * kLanes;
        rest &= ~(((1u << kLanes) - 1) << lane);
        int const first = i - static_cast<int>(threadIdx.x) % kWarpSize + lane;
        int const token = first / kVectors;
        sum_again<Element>(params.sparse, masked_down::h_of<uint16_t>(params.sparse, token), token,
                           column_begin + first % kVectors * 4);
    }
}

// A CTA's part of a dense projection.
template <class Cfg>
struct Part {
    int share;
    int block;
    int column_begin;
    int slice_begin;
    int num_slices;

    __device__ __forceinline__ explicit Part(Params const& params) {
        share = 0;
        block = static_cast<int>(blockIdx.x);
        for (; block >= params.num_column_blocks; block -= params.num_column_blocks) {
            ++share;  // a division takes longer
        }
        column_begin = block * Cfg::kColumns;
        slice_begin = share * params.slices_each + min(share, params.slices_left);
        num_slices = params.slices_each + (share < params.slices_left ? 1 : 0);
    }
};

// Brings a part of the CTA's w_down to L2 while memory is idle, which helps a sparse projection, too. (More is in the
// way.) May be called before wait_for_previous_launch(), as nothing gets to L1.
template <class Cfg>
__device__ __forceinline__ void prefetch_dense(Params const& params) {
    constexpr int kSlices = 4;
    Part<Cfg> const part(params);
    for (int slice = 0; slice < min(kSlices, part.num_slices); ++slice) {
        prefetch_box(params.w_down, part.column_begin, (part.slice_begin + slice) * BLOCK_K);
    }
}

// By a CTA: its part.
template <class Element, class Cfg, int kNumThreads>
__device__ __forceinline__ void multiply_dense(Params const& params, uint32_t base) {
    __shared__ uint64_t barriers[2 * Cfg::kNumStages];
    __shared__ bool is_last;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    Part<Cfg> const part(params);
    float* const sums = params.sums + static_cast<int64_t>(part.block) * (params.num_shares * Cfg::kSums);
    auto const full = [&](int stage) { return shared_address(&barriers[stage]); };
    auto const empty = [&](int stage) { return shared_address(&barriers[Cfg::kNumStages + stage]); };
    auto const stage_w = [&](int stage) { return base + stage * Cfg::kBytesStage; };
    auto const stage_h = [&](int stage) { return stage_w(stage) + Cfg::kBytesW; };
    auto const load = [&](int slice, int stage) {
        int const neuron = (part.slice_begin + slice) * BLOCK_K;
        arrive_and_expect(full(stage), Cfg::kBytesStage);
        load_box(stage_w(stage), params.w_down, full(stage), part.column_begin, neuron);
        load_box(stage_h(stage), params.h, full(stage), neuron, 0);
    };
    if (thread == 0) {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            init_barrier(full(stage), 1);
            init_barrier(empty(stage), Cfg::kConsumerWarps);
        }
        publish_barriers();
        // NOTE: h was written by ordinary stores of the kernel before.
        fence_for_tma();
        for (int slice = 0; slice < min(Cfg::kNumStages, part.num_slices); ++slice) {
            load(slice, slice);
        }
    }
    __syncthreads();

    if (warp < Cfg::kConsumerWarps) {
        float accumulators[1][Cfg::kAccumulators] = {};
        matmul_sm90::Ring<Cfg::kNumStages> ring;
        int const token_tile = warp / kWarpgroupWarps;
        matmul_sm90::multiply_slices<Element, Cfg::WGMMA_N, true>(
            accumulators, ring, part.num_slices, full, stage_w,
            [&](int stage) { return stage_h(stage) + token_tile * (Cfg::WGMMA_N * kBytesRow); },
            [&](int slice, int stage) {
                if (lane == 0) {
                    arrive(empty(stage));
                }
                if (thread == 0 && slice + Cfg::kNumStages < part.num_slices) {
                    wait_barrier(empty(stage), slice / Cfg::kNumStages % 2);
                    load(slice + Cfg::kNumStages, stage);
                }
            });
        // Fragments: columns lane / 4 and lane / 4 + 8 of a warp's 16, tokens lane % 4 * 2 and the next of each 8.
        int const column = warp % kWarpgroupWarps * 16 + lane / 4;
        int const token = token_tile * Cfg::WGMMA_N + lane % 4 * 2;
        float* const mine = sums + part.share * Cfg::kSums + token * Cfg::kColumns + column;
#pragma unroll
        for (int k = 0; k < Cfg::kAccumulators; ++k) {
            __stcg(mine + (k / 4 * kOctet + k % 2) * Cfg::kColumns + k / 2 % 2 * 8, accumulators[0][k]);
        }
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        is_last = atomicAdd(&params.counters[part.block], 1) == params.num_shares - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    constexpr int kVectors = Cfg::kColumns / 4;
    constexpr int kTurns = (Cfg::kTokens * kVectors + kNumThreads - 1) / kNumThreads;
    uint32_t failed = 0;  // turns in which this thread had a value that is not finite
#pragma unroll 2
    for (int turn = 0; turn < kTurns; ++turn) {
        int const i = thread + turn * kNumThreads;
        if (i >= Cfg::kTokens * kVectors) {
            break;
        }
        int const token = i / kVectors;
        int const column = part.column_begin + i % kVectors * 4;
        bool const exists = token < params.tokens && column < params.sparse.d_out;
        float4 shares[Cfg::kMostShares];
#pragma unroll
        for (int s = 0; s < Cfg::kMostShares; ++s) {
            shares[s] = s < params.num_shares ? __ldcg(reinterpret_cast<float4 const*>(sums + s * Cfg::kSums) + i)
                                              : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        // Comes together with the shares.
        float values[4] = {};
        if (exists) {
            add_bias_and_residual<Element>(values, params.sparse, token, column);
        }
#pragma unroll
        for (int s = 0; s < Cfg::kMostShares; ++s) {
            values[0] += shares[s].x;
            values[1] += shares[s].y;
            values[2] += shares[s].z;
            values[3] += shares[s].w;
        }
        if (exists) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                failed |= isfinite(values[k]) ? 0 : 1u << turn;
            }
            *reinterpret_cast<uint2*>(params.sparse.y + static_cast<int64_t>(token) * params.sparse.d_out + column) =
                make_uint2(Element::from_float2(values[0], values[1]), Element::from_float2(values[2], values[3]));
        }
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
        sum_failed_again<Element, Cfg>(params, part.column_begin, thread + turn * kNumThreads,
                                       (failed >> turn & 1) != 0);
    }
}

// A warp's part of what the gate's CTAs have counted.
template <int kThreads>
__device__ __forceinline__ int2 sum_counted(Params const& params) {
    int2 sum = make_int2(0, 0);
    // Loads that do not wait for each other, though the additions do.
    constexpr int kAtOnce = 2;
    for (int first = threadIdx.x; first < params.num_gate_ctas; first += kAtOnce * kThreads) {
        int2 counts_of_ctas[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            int const i = first + k * kThreads;
            counts_of_ctas[k] = i < params.num_gate_ctas ? __ldcg(params.counted + i) : make_int2(0, 0);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
            sum.x += counts_of_ctas[k].x;
            sum.y += counts_of_ctas[k].y;
        }
    }
    return make_int2(__reduce_add_sync(0xffffffffu, sum.x), __reduce_add_sync(0xffffffffu, sum.y));
}

// A CTA computes one unit of the sparse projection, a slab of columns of a token, by masked_down.cuh; or several side
// by side, where the dense projection needs a multiprocessor's shared memory. Then teams of threads list the units'
// neurons, and all warps are shared out over the units by how many neurons they have: else the heaviest would decide
// the time.
template <int kUnits>
constexpr int kTeams = std::min(kUnits, 4);

// Active neurons of a token, up to which such a sparse projection may be taken.
constexpr int kMostListed = 2048;

template <int kUnits, class Sparse>
struct SparseShared {
    alignas(16) unsigned char queues[kTeams<kUnits> * Sparse::kWarps][kQueuedRows * kBytesPiece];
    float partial[kTeams<kUnits> * Sparse::kWarps][Sparse::kColumns];
    uint16_t lists[kUnits][kMostListed];
    int counts[kUnits];    // listed neurons
    int units[kWarpSize];  // whose neurons each warp takes
};

template <class Sparse>
struct SparseShared<1, Sparse> : masked_down::Shared<Sparse> {};

template <int kUnits, class Sparse, class Dense>
constexpr int kSharedBytes = std::max(static_cast<int>(sizeof(SparseShared<kUnits, Sparse>)), Dense::kSharedBytes);

template <int kUnits, class Sparse>
constexpr int kThreads = kTeams<kUnits> * Sparse::kThreads;

// As in masked_down.cuh; 0 if the token does not exist.
__device__ __forceinline__ uint32_t load_mask(Params const& params, int token, int word_begin, int thread) {
    return token < params.tokens ? masked_down::load_mask(params.sparse, token, word_begin, thread) : 0;
}

// Shares out a CTA's 32 warps over its units, by one warp: neighbours for each, by its number of neurons, and one at
// least if it exists. shared.counts are those of the passes before the last one.
template <int kUnits, class Sparse>
__device__ __forceinline__ void share_warps(SparseShared<kUnits, Sparse>& shared,
                                            masked_down::WordTotals const (&totals)[kUnits], int num_units,
                                            bool is_first_pass) {
    constexpr int kWarps = kTeams<kUnits> * Sparse::kWarps;
    static_assert(kWarps == kWarpSize && kUnits <= kWarpSize / 2, "a lane for each warp, and for each unit");
    int const lane = threadIdx.x % kWarpSize;
    int count = lane < num_units ? masked_down::count_active(totals[lane]) : 0;
    if (lane < num_units && !is_first_pass) {
        count += shared.counts[lane];
    }
    int const all = __reduce_add_sync(0xffffffffu, count);
    // Each weight is at least the 32nd part of all weights.
    int const least = all / (kWarps - kUnits) + 1;
    uint32_t const total = all + num_units * least;
    uint32_t const up_to = sum_up_to<kUnits>(lane < num_units ? count + least : 0);
    int unit = 0;
#pragma unroll
    for (int i = 0; i + 1 < kUnits; ++i) {
        unit += kWarps * __shfl_sync(0xffffffffu, up_to, i) < (lane + 1) * total ? 1 : 0;
    }
    shared.units[lane] = unit;
    if (lane < kUnits) {
        shared.counts[lane] = count;
    }
}

// The sparse projection of a slab of columns of a group of tokens, kUnits of them at a time; a team lists kUnits /
// kTeams of these: the team-th, the (team + kTeams)-th and so on. `masks`, `ends`: of the team's first units, as for
// masked_down::compute.
template <class Element, int kUnits, class Sparse, class H>
__device__ __forceinline__ void multiply_sparse(Params const& params, SparseShared<kUnits, Sparse>& shared,
                                                masked_down::WordTotals (&totals)[kUnits], int slab, int group,
                                                uint32_t (&masks)[kUnits / kTeams<kUnits>],
                                                int (&ends)[kUnits / kTeams<kUnits>]) {
    constexpr int kWarps = kTeams<kUnits> * Sparse::kWarps;
    constexpr int kUnitsOfTeam = kUnits / kTeams<kUnits>;
    constexpr int kSumThreads = Sparse::kColumns / 2;  // of a unit: two columns each
    static_assert(
        Sparse::kLanes <= kWarpSize && kSumThreads % kWarpSize == 0 && kUnits * kSumThreads <= kWarps * kWarpSize,
        "lanes for columns, threads for sums");
    masked_down::Params const& sparse = params.sparse;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const team = threadIdx.x / Sparse::kThreads;
    int const thread = threadIdx.x % Sparse::kThreads;
    int const step = params.num_groups;
    // Columns past the end repeat the last ones and are not stored.
    int const column = lane % Sparse::kLanes * kVector;
    int const from = min(slab * Sparse::kColumns + column, sparse.d_out - kVector);
    int const sum_unit = static_cast<int>(threadIdx.x) / kSumThreads;
    int const sum_column = static_cast<int>(threadIdx.x) % kSumThreads * 2;
    for (int first = group;; first += kUnits * step) {
        int const num_units = min((params.tokens - first + step - 1) / step, kUnits);
        int counts[kUnitsOfTeam] = {};
        int word_begin = 0;
        while (true) {
#pragma unroll
            for (int i = 0; i < kUnitsOfTeam; ++i) {
                int const listed = i * kTeams<kUnits> + team;
                masked_down::list_active(shared.lists[listed] + counts[i], totals[listed], masks[i], ends[i], thread,
                                         word_begin);
            }
            if (word_begin + masked_down::kPassWords >= sparse.num_mask_words) {
                break;
            }
#pragma unroll
            for (int i = 0; i < kUnitsOfTeam; ++i) {
                int const listed = i * kTeams<kUnits> + team;
                counts[i] += masked_down::count_active(totals[listed]);
                if (thread == 0) {
                    shared.counts[listed] = counts[i];
                }
            }
            __syncthreads();
            word_begin += masked_down::kPassWords;
#pragma unroll
            for (int i = 0; i < kUnitsOfTeam; ++i) {
                int const listed = i * kTeams<kUnits> + team;
                masks[i] = load_mask(params, first + listed * step, word_begin, thread);
                ends[i] = masked_down::scan_words(totals[listed], masks[i], thread);
            }
            __syncthreads();
        }
        if (warp == kWarps - 1) {
            share_warps(shared, totals, num_units, word_begin == 0);
        }
        __syncthreads();

        int const unit_of_lane = shared.units[lane];
        int const unit = __shfl_sync(0xffffffffu, unit_of_lane, warp);
        uint32_t const own_warps = __ballot_sync(0xffffffffu, unit_of_lane == unit);
        constexpr int kSlotsOfWarp = kWarpSize / Sparse::kLanes;
        float accumulators[kVector] = {};
        gather_queued<Element, Sparse::kLanes>(
            accumulators, shared.lists[unit], __popc(own_warps & ((1u << warp) - 1)) * kSlotsOfWarp,
            __popc(own_warps) * kSlotsOfWarp, shared.counts[unit], masked_down::h_of<H>(sparse, first + unit * step),
            sparse.w_down + from, sparse.d_out, shared_address(shared.queues[warp]));
        masked_down::store_partial<Sparse>(accumulators, shared.partial[warp], column);
        __syncthreads();
        uint32_t const summed_warps = __ballot_sync(0xffffffffu, shared.units[lane] == sum_unit);
        if (sum_unit < num_units && slab * Sparse::kColumns + sum_column < sparse.d_out) {
            float2 sum = make_float2(0.0f, 0.0f);
            float const* part = &shared.partial[__ffs(summed_warps) - 1][sum_column];
            for (int w = __popc(summed_warps); w != 0; --w, part += Sparse::kColumns) {
                float2 const values = *reinterpret_cast<float2 const*>(part);
                sum.x += values.x;
                sum.y += values.y;
            }
            masked_down::store_sums<Element>(sparse, first + sum_unit * step, slab * Sparse::kColumns + sum_column,
                                             sum);
        }
        int const next = first + kUnits * step;
        if (next >= params.tokens) {
            break;
        }
#pragma unroll
        for (int i = 0; i < kUnitsOfTeam; ++i) {
            int const listed = i * kTeams<kUnits> + team;
            masks[i] = load_mask(params, next + listed * step, 0, thread);
            ends[i] = masked_down::scan_words(totals[listed], masks[i], thread);
        }
        __syncthreads();
    }
}

template <class Element, int kUnits, class Sparse, class Dense>
__global__ void __launch_bounds__((kThreads<kUnits, Sparse>), kUnits > 1 ? 1 : 1024 / Sparse::kThreads)
    down_kernel(__grid_constant__ Params const params) {
    constexpr int kNumThreads = kThreads<kUnits, Sparse>;
    constexpr int kWarps = kNumThreads / kWarpSize;
    static_assert(Dense::kConsumerWarps <= kWarps, "a warpgroup for each tile");
    static_assert(kWarps <= kWarpSize, "a lane for each warp");
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ int2 counts[kWarps];
    __shared__ masked_down::WordTotals totals[kUnits];
    constexpr int kUnitsOfTeam = kUnits / kTeams<kUnits>;
    int const team = kUnits == 1 ? 0 : static_cast<int>(threadIdx.x) / Sparse::kThreads;
    int const thread = kUnits == 1 ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) % Sparse::kThreads;
    int const group = static_cast<int>(blockIdx.x) / params.num_slabs;
    int const slab = static_cast<int>(blockIdx.x) - group * params.num_slabs;
    bool const is_sparse_cta = static_cast<int>(blockIdx.x) < params.num_sparse_ctas;
    constexpr bool kPrefetches = kUnits > 1 && Dense::kTokens <= 64;  // with more tokens that gains nothing
    // Those that come first, for later memory is not idle.
    if (kPrefetches && threadIdx.x == 0 && is_sparse_cta && static_cast<int>(blockIdx.x) < params.num_dense_ctas) {
        prefetch_dense<Dense>(params);
    }
    wait_for_previous_launch();
    allow_dependent_launch();
    // A sparse CTA fetches its first masks together with the counts that decide.
    uint32_t masks[kUnitsOfTeam] = {};
    int ends[kUnitsOfTeam] = {};
    if (is_sparse_cta) {
#pragma unroll
        for (int i = 0; i < kUnitsOfTeam; ++i) {
            masks[i] = load_mask(params, group + (i * kTeams<kUnits> + team) * params.num_groups, 0, thread);
        }
    }
    int2 const warp_count = sum_counted<kNumThreads>(params);
    if (is_sparse_cta) {
#pragma unroll
        for (int i = 0; i < kUnitsOfTeam; ++i) {
            ends[i] = masked_down::scan_words(totals[i * kTeams<kUnits> + team], masks[i], thread);
        }
    }
    if (threadIdx.x % kWarpSize == 0) {
        counts[threadIdx.x / kWarpSize] = warp_count;
    }
    __syncthreads();
    int const lane = threadIdx.x % kWarpSize;
    int2 const of_warp = lane < kWarps ? counts[lane] : make_int2(0, 0);
    int2 const counted =
        make_int2(__reduce_add_sync(0xffffffffu, of_warp.x), __reduce_add_sync(0xffffffffu, of_warp.y));
    if (counted.x <= params.most_sparse.x && counted.y <= params.most_sparse.y) {
        if (is_sparse_cta) {
            // The type of h, which gate_up_few.cuh leaves for up to 16 tokens, gate_up_sm90.cuh for more.
            using H = std::conditional_t<Dense::kTokens <= 16, float, uint16_t>;
            auto& shared = *reinterpret_cast<SparseShared<kUnits, Sparse>*>(dynamic);
            if constexpr (kUnits == 1) {
                masked_down::compute<Element, Sparse, false, H>(params.sparse, shared, totals[0], slab, group, masks[0],
                                                                ends[0]);
            } else {
                multiply_sparse<Element, kUnits, Sparse, H>(params, shared, totals, slab, group, masks, ends);
            }
        }
    } else if (static_cast<int>(blockIdx.x) < params.num_dense_ctas) {
        multiply_dense<Element, Dense, kNumThreads>(params, (shared_address(dynamic) + 1023u) & ~1023u);
    }
}

}  // namespace twell::down_sm90

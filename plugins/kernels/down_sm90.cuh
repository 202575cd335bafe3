// Down projection for few tokens on Hopper (sm_90a): the sparse one of down_few.cuh, or a dense one, in one kernel.
//
// The sparse one reads a row of Wd for each pair of a token and an active neuron; where there are many, reading Wd once
// takes less. All CTAs know the number of pairs from what the gate left, and so take the same one of the two.
//
// The dense one is a matrix product by wgmma, transposed (columns x tokens). The CTAs of a block of columns and tokens
// share out the neurons; the last one to finish adds up what all have left in memory, in a fixed order. (In clusters,
// by distributed shared memory, that takes less. But clusters of four leave a tenth of the multiprocessors to
// themselves, and then the sparse projection needs a second round of CTAs.)
#ifndef TWELL_KERNELS_DOWN_SM90_CUH_
#define TWELL_KERNELS_DOWN_SM90_CUH_

#include <cuda.h>

#include <algorithm>

#include "dependent_launch.cuh"
#include "down_few.cuh"
#include "element.cuh"
#include "matmul_sm90.cuh"
#include "sum_again.cuh"
#include "twell/twell.h"

namespace twell::down_sm90 {

using matmul_sm90::BLOCK_K;
using matmul_sm90::kBytesRow;
using matmul_sm90::kWarpgroupSize;
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_K;
using matmul_sm90::WGMMA_M;

constexpr int kOctet = 8;
// Shares of the neurons of a dense projection.
constexpr int kShares = 4;

// A CTA's block of columns and tokens in a dense projection.
template <int kTokensOfWarpgroup, int kTokenTiles, int kStages>
struct Dense {
    static constexpr int kColumns = WGMMA_M;
    static constexpr int WGMMA_N = kTokensOfWarpgroup;
    static constexpr int kTokens = kTokenTiles * WGMMA_N;
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
    down_few::Params sparse;
    BlockTensors block;
    CUtensorMap w_down;   // [d_ff, d_out], boxes of [BLOCK_K, 64]
    CUtensorMap h;        // sparse.h_rounded, boxes of [Dense::kTokens, BLOCK_K]
    int2 const* counted;  // [num_gate_ctas]: see few.h
    float* sums;          // [blocks of tokens, blocks of columns, kShares, Dense::kTokens, Dense::kColumns]
    int* counters;        // [blocks of tokens, blocks of columns], all 0
    int tokens;
    int num_gate_ctas;
    int2 most_sparse;  // in all, up to which the sparse projection is taken: likewise
    int num_column_blocks;
    int num_dense_ctas;
    int num_sparse_ctas;
    int num_units;  // of a sparse projection: tokens x slabs of columns
    int num_slabs;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// By a warp whose lanes have stored four columns each, from the lane's `i` on: sums again what was not finite.
template <class Element, class Cfg>
__device__ __forceinline__ void sum_failed_again(Params const& params, int token_begin, int column_begin, int i,
                                                 bool failed) {
    constexpr int kLanes = kVector / 4;  // that share what is summed together
    constexpr int kVectors = Cfg::kColumns / 4;
    uint32_t rest = __ballot_sync(0xffffffffu, failed);
    __syncwarp();  // what is stored again has been stored
    while (rest != 0) {
        int const lane = (__ffs(rest) - 1) / kLanes * kLanes;
        rest &= ~(((1u << kLanes) - 1) << lane);
        int const first = i - static_cast<int>(threadIdx.x) % kWarpSize + lane;
        int const token = token_begin + first / kVectors;
        sum_again<Element, 1>(params.block, down_few::h_of<uint16_t>(params.sparse, token), token,
                              column_begin + first % kVectors * 4);
    }
}

// A CTA's part of the dense projection.
template <class Element, class Cfg, int kNumThreads>
__device__ __forceinline__ void multiply_dense(Params const& params, uint32_t base) {
    __shared__ uint64_t barriers[2 * Cfg::kNumStages];
    __shared__ bool is_last;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const share = static_cast<int>(blockIdx.x) % kShares;
    int const block = static_cast<int>(blockIdx.x) / kShares;
    int const column_begin = block % params.num_column_blocks * Cfg::kColumns;
    int const token_begin = block / params.num_column_blocks * Cfg::kTokens;
    int const all_slices = (params.sparse.num_mask_words * down_few::kMaskBits + BLOCK_K - 1) / BLOCK_K;
    int const slice_begin = all_slices * share / kShares;
    int const num_slices = all_slices * (share + 1) / kShares - slice_begin;
    float* const sums = params.sums + static_cast<int64_t>(block) * (kShares * Cfg::kSums);
    auto const full = [&](int stage) { return matmul_sm90::shared_address(&barriers[stage]); };
    auto const empty = [&](int stage) { return matmul_sm90::shared_address(&barriers[Cfg::kNumStages + stage]); };
    auto const stage_w = [&](int stage) { return base + stage * Cfg::kBytesStage; };
    auto const stage_h = [&](int stage) { return stage_w(stage) + Cfg::kBytesW; };
    auto const load = [&](int slice, int stage) {
        int const neuron = (slice_begin + slice) * BLOCK_K;
        matmul_sm90::arrive_and_expect(full(stage), Cfg::kBytesStage);
        matmul_sm90::load_box(stage_w(stage), params.w_down, full(stage), column_begin, neuron);
        matmul_sm90::load_box(stage_h(stage), params.h, full(stage), neuron, token_begin);
    };
    if (thread == 0) {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            matmul_sm90::init_barrier(full(stage), 1);
            matmul_sm90::init_barrier(empty(stage), Cfg::kConsumerWarps);
        }
        matmul_sm90::publish_barriers();
        // NOTE: h was written by ordinary stores of the kernel before.
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int slice = 0; slice < min(Cfg::kNumStages, num_slices); ++slice) {
            load(slice, slice);
        }
    }
    __syncthreads();

    if (warp < Cfg::kConsumerWarps) {
        float accumulators[Cfg::kAccumulators] = {};
        matmul_sm90::Ring<Cfg::kNumStages> ring;
        int stage_before = 0;
        uint32_t parity_before = 0;
        int const token_tile = warp / kWarpgroupWarps;
        for (int slice = 0; slice < num_slices; ++slice) {
            matmul_sm90::wait_barrier(full(ring.stage), ring.parity);
            uint64_t const a = matmul_sm90::describe(stage_w(ring.stage));
            uint64_t const b = matmul_sm90::describe(stage_h(ring.stage) + token_tile * (Cfg::WGMMA_N * kBytesRow));
            matmul_sm90::begin_wgmma();
#pragma unroll
            for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
                Wgmma<Element, Cfg::WGMMA_N>::template run<true>(accumulators, a + k * (WGMMA_K * kBytesRow >> 4),
                                                                 b + k * (WGMMA_K * 2 >> 4), 1);
            }
            matmul_sm90::commit_wgmma();
            // One slice stays in flight while the stage of the one before is filled again.
            matmul_sm90::wait_wgmma<1>();
            if (slice != 0) {
                if (lane == 0) {
                    matmul_sm90::arrive(empty(stage_before));
                }
                if (thread == 0 && slice - 1 + Cfg::kNumStages < num_slices) {
                    matmul_sm90::wait_barrier(empty(stage_before), parity_before);
                    load(slice - 1 + Cfg::kNumStages, stage_before);
                }
            }
            stage_before = ring.stage;
            parity_before = ring.parity;
            ring.advance();
        }
        matmul_sm90::wait_wgmma<0>();
        // The compiler does not know that the accumulators were not valid until here.
#pragma unroll
        for (int k = 0; k < Cfg::kAccumulators; ++k) {
            asm volatile("" : "+f"(accumulators[k])::"memory");
        }
        // Fragments: columns lane / 4 and lane / 4 + 8 of a warp's 16, tokens lane % 4 * 2 and the next of each 8.
        int const column = warp % kWarpgroupWarps * 16 + lane / 4;
        int const token = token_tile * Cfg::WGMMA_N + lane % 4 * 2;
        float* const mine = sums + share * Cfg::kSums + token * Cfg::kColumns + column;
#pragma unroll
        for (int k = 0; k < Cfg::kAccumulators; ++k) {
            __stcg(mine + (k / 4 * kOctet + k % 2) * Cfg::kColumns + k / 2 % 2 * 8, accumulators[k]);
        }
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        is_last = atomicAdd(&params.counters[block], 1) == kShares - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    constexpr int kVectors = Cfg::kColumns / 4;
    uint32_t failed = 0;  // turns in which this thread had a value that is not finite
    int turn = 0;
#pragma unroll 2
    for (int i = thread; i < Cfg::kTokens * kVectors; i += kNumThreads, ++turn) {
        int const token = token_begin + i / kVectors;
        int const column = column_begin + i % kVectors * 4;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float4 parts[kShares];
#pragma unroll
        for (int s = 0; s < kShares; ++s) {
            parts[s] = __ldcg(reinterpret_cast<float4 const*>(sums + s * Cfg::kSums) + i);
        }
#pragma unroll
        for (int s = 0; s < kShares; ++s) {
            total.x += parts[s].x;
            total.y += parts[s].y;
            total.z += parts[s].z;
            total.w += parts[s].w;
        }
        if (token < params.tokens && column < params.sparse.d_out) {
            float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (params.sparse.b_down != nullptr) {
                    values[k] += Element::to_float(params.sparse.b_down[column + k]);
                }
                failed |= isfinite(values[k]) ? 0 : 1u << turn;
            }
            *reinterpret_cast<uint2*>(params.sparse.y + static_cast<int64_t>(token) * params.sparse.d_out + column) =
                make_uint2(Element::from_float2(values[0], values[1]), Element::from_float2(values[2], values[3]));
        }
    }
    for (uint32_t turns = __reduce_or_sync(0xffffffffu, failed); turns != 0; turns &= turns - 1) {
        turn = __ffs(turns) - 1;
        sum_failed_again<Element, Cfg>(params, token_begin, column_begin, thread + turn * kNumThreads,
                                       (failed >> turn & 1) != 0);
    }
}

// A warp's share of what the gate's CTAs have counted. NOTE: not by way of L1, which may hold what was there when this
// kernel started.
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

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// A CTA is a team of the sparse projection, or so many of them side by side where the dense one needs a
// multiprocessor's shared memory.
template <int kTeams, class Sparse, class Dense>
constexpr int kSharedBytes = std::max(kTeams * static_cast<int>(sizeof(down_few::Shared<Sparse>)), Dense::kSharedBytes);

template <class Element, int kTeams, class Sparse, class Dense>
__global__ void __launch_bounds__(kTeams* Sparse::kThreads, kTeams == 1 ? 1024 / Sparse::kThreads : 1)
    down_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kNumThreads = kTeams * Sparse::kThreads;
    constexpr int kWarps = kNumThreads / kWarpSize;
    static_assert(Dense::kConsumerWarps <= kWarps && kWarps <= kWarpSize, "a warpgroup for each tile, a lane a warp");
    using Team = std::conditional_t<kTeams == 1, down_few::WholeCta, down_few::PartOfCta<Sparse::kThreads>>;
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ int2 counts[kWarps];
    __shared__ down_few::WordTotals word_totals[kTeams];
    wait_for_previous_launch();
    allow_dependent_launch();
    Team const team = {};
    int const team_idx = kTeams == 1 ? 0 : static_cast<int>(threadIdx.x) / Sparse::kThreads;
    down_few::WordTotals& totals = word_totals[team_idx];
    int const units_step = kTeams * params.num_sparse_ctas;
    // What a team needs first is fetched together with what decides.
    int unit = static_cast<int>(blockIdx.x) < params.num_sparse_ctas
                   ? static_cast<int>(blockIdx.x) + team_idx * params.num_sparse_ctas
                   : params.num_units;
    auto const load_mask = [&](int unit) {
        return unit < params.num_units ? down_few::load_mask(params.sparse, unit / params.num_slabs, 0, team) : 0;
    };
    uint32_t mask = load_mask(unit);
    int2 const warp_count = sum_counted<kNumThreads>(params);
    int end = down_few::scan_words(totals, mask, team);
    if (threadIdx.x % kWarpSize == 0) {
        counts[threadIdx.x / kWarpSize] = warp_count;
    }
    __syncthreads();
    int const lane = threadIdx.x % kWarpSize;
    int2 const of_warp = lane < kWarps ? counts[lane] : make_int2(0, 0);
    int2 const counted =
        make_int2(__reduce_add_sync(0xffffffffu, of_warp.x), __reduce_add_sync(0xffffffffu, of_warp.y));
    if (counted.x <= params.most_sparse.x && counted.y <= params.most_sparse.y) {
        // What gate_up_few.cuh leaves for up to 32 tokens, gate_up_sm90.cuh for more.
        using H = std::conditional_t<Dense::kTokens <= 32, float, uint16_t>;
        auto& shared = reinterpret_cast<down_few::Shared<Sparse>*>(dynamic)[team_idx];
        auto const compute = [&] {
            down_few::compute<Element, Sparse, false, H>(params.sparse, shared, totals, unit % params.num_slabs,
                                                         unit / params.num_slabs, mask, end, 0, team);
        };
        if constexpr (kTeams == 1) {
            if (unit < params.num_units) {
                compute();
            }
        } else {
            while (unit < params.num_units) {
                uint32_t const next_mask = load_mask(unit + units_step);
                compute();
                unit += units_step;
                mask = next_mask;
                end = down_few::scan_words(totals, mask, team);
                team.sync();
            }
        }
    } else if (static_cast<int>(blockIdx.x) < params.num_dense_ctas) {
        multiply_dense<Element, Dense, kNumThreads>(params, (matmul_sm90::shared_address(dynamic) + 1023u) & ~1023u);
    }
#endif
}

}  // namespace twell::down_sm90

#endif  // TWELL_KERNELS_DOWN_SM90_CUH_

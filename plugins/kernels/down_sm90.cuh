// Down projection for few tokens on Hopper (sm_90a): the sparse one of down_few.cuh, or a dense one.
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

    // Of a kernel that does nothing else: more add up the shares faster.
    static constexpr int kThreads = 1024;

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

// Which projections a kernel can do. Where one can do either, there is no other launch; else each leaves the other to
// the next one.
enum class Role { kSparse, kDense, kEither };

// A CTA computes one unit of the sparse projection, a slab of columns of a token, by down_few.cuh; or several side by
// side, where it can do either and the dense projection needs a multiprocessor's shared memory. Then a team of threads
// lists each unit's neurons, and all warps are shared out over the units by how many neurons they have: else the
// heaviest would decide the time.
template <int kUnits, class Sparse>
struct SparseShared {
    uint16_t lists[kUnits][down_few::kPassNeurons];
    float partial[kUnits * Sparse::kWarps][Sparse::kColumns];
};

template <class Sparse>
struct SparseShared<1, Sparse> : down_few::Shared<Sparse> {};

template <Role kRole, int kUnits, class Sparse, class Dense>
constexpr int kSharedBytes =
    std::max(kRole == Role::kDense ? 0 : static_cast<int>(sizeof(SparseShared<kUnits, Sparse>)),
             kRole == Role::kSparse ? 0 : Dense::kSharedBytes);

template <Role kRole, int kUnits, class Sparse, class Dense>
constexpr int kThreads = kRole == Role::kDense ? Dense::kThreads : kUnits * Sparse::kThreads;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A mask word of the first pass over a unit; without one, 0.
__device__ __forceinline__ uint32_t load_mask(Params const& params, int unit, int thread) {
    return unit < params.num_units ? down_few::load_mask(params.sparse, unit / params.num_slabs, 0, thread) : 0;
}

// The 32 warps of a CTA, shared out over up to four units: neighbours for each, by its number of neurons, and one at
// least. Lane i knows the (i / kLanesOfUnit)-th unit's.
struct WarpShares {
    static constexpr int kWarps = 32;
    static constexpr int kMostUnits = 4;
    static constexpr int kLanesOfUnit = kWarpSize / kMostUnits;

    int count;  // of neurons
    int end;    // of its warps
    int unit;   // whose neurons this warp takes

    __device__ __forceinline__ WarpShares(int count, bool exists) : count(count) {
        int const lane = threadIdx.x % kWarpSize;
        int const all = __reduce_add_sync(0xffffffffu, count) / kLanesOfUnit;
        // Each weight is at least the 32nd part of all weights, all + 4 (all / 16 + 1).
        uint32_t const weight = exists && lane % kLanesOfUnit == 0 ? count + all / 16 + 1 : 0;
        uint32_t const up_to = sum_up_to(weight);
        end = static_cast<int>(kWarps * up_to / __shfl_sync(0xffffffffu, up_to, kWarpSize - 1));
        int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
        unit = __popc(__ballot_sync(0xffffffffu, lane % kLanesOfUnit == 0 && end <= warp));
    }

    __device__ __forceinline__ int count_of(int unit) const {
        return __shfl_sync(0xffffffffu, count, unit * kLanesOfUnit);
    }
    __device__ __forceinline__ int end_of(int unit) const { return __shfl_sync(0xffffffffu, end, unit * kLanesOfUnit); }
    __device__ __forceinline__ int begin_of(int unit) const {
        int const before = end_of(max(unit - 1, 0));
        return unit == 0 ? 0 : before;
    }
};

// The sparse projection of kUnits units after the other. `mask`, `end`: of the team's first unit, as for
// down_few::compute.
template <class Element, int kUnits, class Sparse, class H>
__device__ __forceinline__ void multiply_sparse(Params const& params, SparseShared<kUnits, Sparse>& shared,
                                                down_few::WordTotals (&totals)[kUnits], uint32_t mask, int end) {
    static_assert(Sparse::kLanes <= kWarpSize && kUnits == WarpShares::kMostUnits &&
                      kUnits * Sparse::kWarps == WarpShares::kWarps &&
                      sizeof(totals[0]) / sizeof(totals[0][0]) == WarpShares::kLanesOfUnit,
                  "see WarpShares");
    down_few::Params const& sparse = params.sparse;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const team = threadIdx.x / Sparse::kThreads;
    int const thread = threadIdx.x % Sparse::kThreads;
    int const column = lane % Sparse::kLanes * kVector;
    int const step = params.num_sparse_ctas;
    for (int first = blockIdx.x; first < params.num_units; first += kUnits * step) {
        int const own_unit = first + team * step;
        int64_t const own_token = own_unit / params.num_slabs;
        uint32_t const next_mask = load_mask(params, own_unit + kUnits * step, thread);
        float2 sum = make_float2(0.0f, 0.0f);  // of two columns of the team's unit
        int word_begin = 0;
        while (true) {
            down_few::list_active(shared.lists[team], totals[team], mask, end, thread);
            int const lane_unit = lane / WarpShares::kLanesOfUnit;
            int count = totals[lane_unit][lane % WarpShares::kLanesOfUnit];
#pragma unroll
            for (int distance = 1; distance < WarpShares::kLanesOfUnit; distance *= 2) {
                count += __shfl_xor_sync(0xffffffffu, count, distance);
            }
            WarpShares const shares(count, first + lane_unit * step < params.num_units);
            int const warps_begin = shares.begin_of(shares.unit);
            int const num_warps = shares.end_of(shares.unit) - warps_begin;
            int const unit_count = shares.count_of(shares.unit);
            int const sum_begin = shares.begin_of(team);
            int const sum_end = shares.end_of(team);
            __syncthreads();

            int const unit = first + shares.unit * step;
            // Columns past the end repeat the last ones and are not stored.
            int const from = min(unit % params.num_slabs * Sparse::kColumns + column, sparse.d_out - kVector);
            int64_t const neuron_begin = static_cast<int64_t>(word_begin) * down_few::kMaskBits;
            constexpr int kSlotsOfWarp = kWarpSize / Sparse::kLanes;
            constexpr int kRowsAtOnce = 6;
            float accumulators[kVector] = {};
            down_few::add_all_rows<Element, kRowsAtOnce>(
                accumulators, shared.lists[shares.unit], (warp - warps_begin) * kSlotsOfWarp + lane / Sparse::kLanes,
                num_warps * kSlotsOfWarp, unit_count, down_few::h_of<H>(sparse, unit / params.num_slabs) + neuron_begin,
                sparse.w_down + neuron_begin * sparse.d_out + from, sparse.d_out);
            down_few::store_partial<Sparse>(accumulators, shared.partial[warp], column);
            word_begin += down_few::kPassWords;
            bool const is_last = word_begin >= sparse.num_mask_words;
            if (!is_last) {
                mask = own_unit < params.num_units ? down_few::load_mask(sparse, own_token, word_begin, thread) : 0;
                end = down_few::scan_words(totals[team], mask, thread);
            }
            __syncthreads();
            for (int w = sum_begin; w < sum_end && thread * 2 < Sparse::kColumns; ++w) {
                float2 const part = *reinterpret_cast<float2 const*>(&shared.partial[w][thread * 2]);
                sum.x += part.x;
                sum.y += part.y;
            }
            if (is_last) {
                break;
            }
        }
        int const own_column = own_unit % params.num_slabs * Sparse::kColumns + thread * 2;
        if (own_unit < params.num_units && thread * 2 < Sparse::kColumns && own_column < sparse.d_out) {
            down_few::store_sums<Element>(sparse, own_token, own_column, sum);
        }
        mask = next_mask;
        end = down_few::scan_words(totals[team], mask, thread);
        __syncthreads();
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, Role kRole, int kUnits, class Sparse, class Dense>
__global__ void __launch_bounds__((kThreads<kRole, kUnits, Sparse, Dense>),
                                  kRole == Role::kDense || kUnits > 1 ? 1 : 1024 / Sparse::kThreads)
    down_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int kNumThreads = kThreads<kRole, kUnits, Sparse, Dense>;
    constexpr int kWarps = kNumThreads / kWarpSize;
    static_assert(Dense::kConsumerWarps <= kWarps || kRole == Role::kSparse, "a warpgroup for each tile");
    static_assert(kWarps <= kWarpSize, "a lane for each warp");
    extern __shared__ __align__(1024) unsigned char dynamic[];
    __shared__ int2 counts[kWarps];
    __shared__ down_few::WordTotals totals[kUnits];
    // A dense launch follows a sparse one, which lets it start when the gate has ended: it waits for nothing else.
    if (kRole != Role::kDense) {
        wait_for_previous_launch();
    }
    allow_dependent_launch();
    // What a sparse CTA needs first is fetched together with what decides.
    int const team = kUnits == 1 ? 0 : static_cast<int>(threadIdx.x) / Sparse::kThreads;
    int const thread = kUnits == 1 ? static_cast<int>(threadIdx.x) : static_cast<int>(threadIdx.x) % Sparse::kThreads;
    int const unit = static_cast<int>(blockIdx.x) + team * params.num_sparse_ctas;
    bool const is_sparse_cta = kRole != Role::kDense && static_cast<int>(blockIdx.x) < params.num_sparse_ctas;
    uint32_t const mask = is_sparse_cta ? load_mask(params, unit, thread) : 0;
    int2 const warp_count = sum_counted<kNumThreads>(params);
    int const end = is_sparse_cta ? down_few::scan_words(totals[team], mask, thread) : 0;
    if (threadIdx.x % kWarpSize == 0) {
        counts[threadIdx.x / kWarpSize] = warp_count;
    }
    __syncthreads();
    int const lane = threadIdx.x % kWarpSize;
    int2 const of_warp = lane < kWarps ? counts[lane] : make_int2(0, 0);
    int2 const counted =
        make_int2(__reduce_add_sync(0xffffffffu, of_warp.x), __reduce_add_sync(0xffffffffu, of_warp.y));
    bool const is_sparse = counted.x <= params.most_sparse.x && counted.y <= params.most_sparse.y;
    if (kRole == Role::kDense && ends_early(is_sparse)) {
        return;
    }
    if (kRole != Role::kDense && is_sparse && is_sparse_cta) {
        // What gate_up_few.cuh leaves for up to 32 tokens, gate_up_sm90.cuh for more.
        using H = std::conditional_t<Dense::kTokens <= 32, float, uint16_t>;
        auto& shared = *reinterpret_cast<SparseShared<kUnits, Sparse>*>(dynamic);
        if constexpr (kUnits == 1) {
            down_few::compute<Element, Sparse, false, H>(params.sparse, shared, totals[0], unit % params.num_slabs,
                                                         unit / params.num_slabs, mask, end);
        } else {
            multiply_sparse<Element, kUnits, Sparse, H>(params, shared, totals, mask, end);
        }
    } else if (kRole != Role::kSparse && !is_sparse && static_cast<int>(blockIdx.x) < params.num_dense_ctas) {
        multiply_dense<Element, Dense, kNumThreads>(params, (matmul_sm90::shared_address(dynamic) + 1023u) & ~1023u);
    }
    // Either launch leaves alone what the other one works on; but who waits for the end of the dense one takes it for
    // the end of both.
    if (kRole == Role::kDense && blockIdx.x == 0) {
        wait_for_previous_launch();
    }
#endif
}

}  // namespace twell::down_sm90

#endif  // TWELL_KERNELS_DOWN_SM90_CUH_

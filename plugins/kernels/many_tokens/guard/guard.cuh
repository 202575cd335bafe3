// How many rows take the dense path: see guard.h. Depends on nothing but the numbers of non-zeros, so results are
// repeatable.
#pragma once

#include "many_tokens/guard/guard.h"

namespace twell::guard {

__host__ __device__ __forceinline__ float cost_of(DenseRounds const& dense, uint32_t rows, bool overlaps = false) {
    float const rounds = ceilf(static_cast<float>(rows) * dense.blocks_per_token) * dense.rounds_per_block;
    return (overlaps ? rounds : ceilf(rounds)) * dense.round_ns;
}

// By a warp: the sum of what the gate has counted. NOTE: the gate has ended before any kernel behind count_kernel
// or cluster_kernel starts, so that may ask before wait_for_previous_launch().
__device__ __forceinline__ uint32_t sum_of(GateCount const& count) {
    constexpr int kWarpSize = 32;
    uint32_t sum = 0;
#pragma unroll
    for (int begin = 0; begin < kMostCountParts; begin += kWarpSize) {
        int const i = begin + static_cast<int>(threadIdx.x) % kWarpSize;
        sum += i < count.num_parts ? __ldcg(count.parts + i) : 0;
    }
    return __reduce_add_sync(0xffffffffu, sum);
}

// By a warp: whether all rows are dense, as the count tells: see guard_model.
__device__ __forceinline__ bool all_are_dense(GateCount const& count) {
    return count.num_parts != 0 && sum_of(count) >= count.all_dense_from;
}

// Results of the warps of decide(), each for its buckets.
template <int kBuckets>
struct Votes {
    static constexpr int kWarps = kBuckets / 32;

    float nonzeros[kWarps];
    float costs[kWarps];
    uint32_t choices[kWarps];
};

// By a CTA of at least kBuckets threads. Rows are ordered by buckets, the heaviest first: those of bucket b have the
// places [bucket_begin[b], bucket_begin[b + 1]) and at most most_of(b) non-zeros. Rows in buckets before first_sparse
// must be dense. Gives the number of places, from 0 on, that the dense path should take: whole buckets.
template <int kBuckets, class MostOf>
__device__ __forceinline__ uint32_t decide(Votes<kBuckets>& votes, GuardModel const& model,
                                           uint32_t const* bucket_begin, int first_sparse, MostOf most_of) {
    constexpr int kWarpSize = 32;
    constexpr int kWarps = Votes<kBuckets>::kWarps;
    static_assert(kBuckets % kWarpSize == 0, "buckets are taken by the warp");
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    uint32_t const tokens = bucket_begin[kBuckets];
    if (model.forced >= 0) {
        uint32_t const rows = max(static_cast<uint32_t>(model.forced), bucket_begin[first_sparse]);
        return rows <= model.max_part ? rows : tokens;
    }
    // All rows; then the sparse path has nothing to do.
    float best_cost = cost_of(model.up, tokens) + cost_of(model.down, tokens);
    uint32_t best = tokens;
    // A thread has the choice that this bucket and the lighter ones are sparse, the first thread the lightest.
    int const bucket = kBuckets - 1 - static_cast<int>(threadIdx.x);
    float nonzeros = 0.0f;
    if (warp < kWarps) {
        nonzeros =
            static_cast<float>(bucket_begin[bucket + 1] - bucket_begin[bucket]) * static_cast<float>(most_of(bucket));
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            float const below = __shfl_up_sync(0xffffffffu, nonzeros, distance);
            nonzeros += lane >= distance ? below : 0.0f;
        }
        if (lane == kWarpSize - 1) {
            votes.nonzeros[warp] = nonzeros;
        }
    }
    __syncthreads();
    if (warp < kWarps) {
        float lighter = 0.0f;
        for (int w = 0; w < warp; ++w) {
            lighter += votes.nonzeros[w];
        }
        nonzeros += lighter;
        uint32_t const heavy = bucket_begin[bucket];
        float const excess = fmaxf(nonzeros - static_cast<float>(tokens - heavy) * model.excess_begin, 0.0f);
        float const sum_cost = nonzeros * model.nonzero_ns + excess * model.excess_ns;
        float const heaviest_cost = static_cast<float>(most_of(bucket)) * model.heaviest_ns;
        // Throughput and latency overlap, the less the nearer they are: measured, the root of the sum of squares.
        float cost = sqrtf(sum_cost * sum_cost + heaviest_cost * heaviest_cost);
        if (heavy > 0) {
            float const down_cost = cost_of(model.down, heavy, model.down_overlaps);
            float const not_covered = cost_of(model.down, heavy) - down_cost - cost * model.down_share;
            cost += cost_of(model.up, heavy) + down_cost + fmaxf(not_covered, 0.0f) +
                    static_cast<float>(heavy) * model.part_row_ns + model.part_ns;
        }
        if (bucket >= first_sparse && bucket_begin[bucket + 1] > heavy && heavy <= model.max_part && cost < best_cost) {
            best_cost = cost;
            best = heavy;
        }
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            float const other_cost = __shfl_xor_sync(0xffffffffu, best_cost, distance);
            uint32_t const other = __shfl_xor_sync(0xffffffffu, best, distance);
            if (other_cost < best_cost || (other_cost == best_cost && other < best)) {
                best_cost = other_cost;
                best = other;
            }
        }
        if (lane == 0) {
            votes.costs[warp] = best_cost;
            votes.choices[warp] = best;
        }
    }
    __syncthreads();
    best_cost = votes.costs[0];
    best = votes.choices[0];
    for (int w = 1; w < kWarps; ++w) {
        if (votes.costs[w] < best_cost || (votes.costs[w] == best_cost && votes.choices[w] < best)) {
            best_cost = votes.costs[w];
            best = votes.choices[w];
        }
    }
    return best;
}

}  // namespace twell::guard

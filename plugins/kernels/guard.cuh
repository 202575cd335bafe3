// How many rows take the dense path: see guard.h. Depends on nothing but the numbers of non-zeros, so results are
// repeatable.
#ifndef TWELL_KERNELS_GUARD_CUH_
#define TWELL_KERNELS_GUARD_CUH_

#include "guard.h"

namespace twell::guard {

__device__ __forceinline__ float cost_of(DenseRounds const& rounds, uint32_t rows) {
    float const blocks = ceilf(static_cast<float>(rows) * rounds.blocks_per_token);
    return ceilf(blocks * rounds.rounds_per_block) * rounds.round_ns;
}

// By one warp. Rows are ordered by buckets, the heaviest first: those of bucket b have the places
// [bucket_begin[b], bucket_begin[b + 1]) and at most most_of(b) non-zeros. Gives the number of places, from 0 on, that
// the dense path should take: whole buckets.
template <int kBuckets, class MostOf>
__device__ __forceinline__ uint32_t decide(GuardModel const& model, uint32_t const* bucket_begin, MostOf most_of) {
    constexpr int kWarpSize = 32;
    static_assert(kBuckets % kWarpSize == 0, "buckets are taken by the warp");
    if (!model.enabled || model.forced >= 0) {
        return model.enabled ? static_cast<uint32_t>(model.forced) : 0;
    }
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint32_t const tokens = bucket_begin[kBuckets];
    // All rows; then the sparse path has nothing to do.
    float best_cost = cost_of(model.up, tokens) + cost_of(model.down, tokens);
    uint32_t best = tokens;
    // From the lightest bucket on: lane l stands for the choice that bucket `first - l` and the lighter ones are
    // sparse.
    float sparse_cost = 0.0f;
    for (int first = kBuckets - 1; first >= 0; first -= kWarpSize) {
        int const bucket = first - lane;
        uint32_t const heavy = bucket_begin[bucket];
        uint32_t const rows = bucket_begin[bucket + 1] - heavy;
        float cost = static_cast<float>(rows) * static_cast<float>(most_of(bucket)) * model.nonzero_ns;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            float const lighter = __shfl_up_sync(0xffffffffu, cost, distance);
            cost += lane >= distance ? lighter : 0.0f;
        }
        cost += sparse_cost;
        sparse_cost = __shfl_sync(0xffffffffu, cost, kWarpSize - 1);
        // Throughput and latency overlap, the less the nearer they are: measured, the root of the sum of squares.
        float const heaviest_cost = static_cast<float>(most_of(bucket)) * model.heaviest_ns;
        cost = sqrtf(cost * cost + heaviest_cost * heaviest_cost);
        if (heavy > 0) {
            cost += cost_of(model.up, heavy) + cost_of(model.down, heavy) +
                    static_cast<float>(heavy) * model.part_row_ns + model.part_ns;
        }
        if (rows > 0 && heavy <= model.max_part && cost < best_cost) {
            best_cost = cost;
            best = heavy;
        }
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
    return best;
}

}  // namespace twell::guard

#endif  // TWELL_KERNELS_GUARD_CUH_

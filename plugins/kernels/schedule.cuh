// Bucket sort of the rows by their non-zeros, for every GPU from sm_80 on, in two launches and without anything to be
// cleared beforehand.
//
// count_kernel   blocks of rows: each row's bucket and its rank among the block's rows of that bucket
// order_kernel   the same blocks: where each bucket of the block starts, from all blocks' numbers; then row_order, and
//                what the dense path needs of the block's rows
//
// Ranks are handed out by atomics in shared memory, so the order within a bucket varies from run to run. No result may
// depend on it. How many rows a bucket has does not vary.
#ifndef TWELL_KERNELS_SCHEDULE_CUH_
#define TWELL_KERNELS_SCHEDULE_CUH_

#include "dependent_launch.cuh"
#include "gather.cuh"
#include "guard.cuh"
#include "schedule.h"
#include "twell/twell.h"

namespace twell::schedule {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxBlocks = 128;

// Levels of non-zeros: exact below 16, then eight to an octave, up to 65536.
constexpr int kExactLevels = 16;
constexpr int kLevelsPerOctave = 8;
constexpr int kLevels = kExactLevels + 12 * kLevelsPerOctave + 1;
// Bucket 0 holds, without a guard, the rows with a tile that overflowed, then come levels, the heaviest first.
constexpr int kBuckets = 128;
static_assert(kLevels + 1 <= kBuckets && kThreads % kBuckets == 0, "order_kernel shares out buckets to threads");

__host__ __device__ __forceinline__ int level_of(int count) {
    if (count < kExactLevels) {
        return count;
    }
    int octave = 4;
    while (count >> (octave + 1) != 0) {
        ++octave;
    }
    return kExactLevels + (octave - 4) * kLevelsPerOctave + (count >> (octave - 3)) % kLevelsPerOctave;
}

// The most non-zeros that a row of a level has.
__host__ __device__ __forceinline__ int most_of_level(int level) {
    if (level < kExactLevels) {
        return level;
    }
    int const octave = 4 + (level - kExactLevels) / kLevelsPerOctave;
    return ((kLevelsPerOctave + (level - kExactLevels) % kLevelsPerOctave + 1) << (octave - 3)) - 1;
}

__host__ __device__ __forceinline__ int bucket_of(int count, bool overflowed) {
    return overflowed ? 0 : kLevels - level_of(count);
}

// The most non-zeros that a row of a bucket has, other than of bucket 0.
__host__ __device__ __forceinline__ int most_of_bucket(int bucket) {
    return bucket <= kLevels ? most_of_level(kLevels - bucket) : 0;
}

// `place` of a row: bucket and rank.
constexpr int kRankBits = 24;
static_assert(TWELL_MAX_TOKENS / kMaxBlocks < 1 << kRankBits && kBuckets <= 1 << (32 - kRankBits), "fit 32 bits");

struct Params {
    uint32_t const* packed;  // [tokens, num_tiles * words_per_tile]
    Schedule schedule;
    GuardModel guard;
    Gather gather;  // if the guard is enabled
    int64_t tokens;
    int rows_per_block;
    int num_tiles;
    int words_per_tile;
};

__global__ void __launch_bounds__(kThreads, 1) count_kernel(Params const params) {
    __shared__ uint32_t bucket_rows[kBuckets];

    int const lane = threadIdx.x % kWarpSize;
    wait_for_previous_launch();
    // Only now: what runs next may read the caller's weights before it waits for this kernel.
    allow_dependent_launch();
    if (threadIdx.x < kBuckets) {
        bucket_rows[threadIdx.x] = 0;
    }
    __syncthreads();

    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    int64_t const words_per_row = static_cast<int64_t>(params.num_tiles) * params.words_per_tile;
    constexpr int kRows = 4;  // whose loads a warp issues together
    for (int64_t first = begin + threadIdx.x / kWarpSize * kRows; first < end; first += kWarps * kRows) {
        // Non-zeros in the low bits, tiles that overflowed from kTileShift on: one sum for both.
        constexpr int kTileShift = 20;
        uint32_t sums[kRows] = {};
        for (int t = lane; t < params.num_tiles; t += kWarpSize) {
            uint32_t counts[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                int64_t const row = min(first + r, end - 1);
                counts[r] = params.packed[row * words_per_row + t * params.words_per_tile];
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                bool const overflowed =
                    !params.guard.enabled && counts[r] >= static_cast<uint32_t>(params.words_per_tile);
                sums[r] += counts[r] + (overflowed ? 1u << kTileShift : 0u);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            uint32_t const sum = __reduce_add_sync(0xffffffffu, sums[r]);
            if (lane == r && first + r < end) {
                int const count = static_cast<int>(sum & ((1u << kTileShift) - 1));
                int const bucket = bucket_of(count, sum >> kTileShift != 0);
                uint32_t const rank = atomicAdd(&bucket_rows[bucket], 1u);
                params.schedule.place[first + r] = static_cast<uint32_t>(bucket) << kRankBits | rank;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x < kBuckets) {
        params.schedule.block_buckets[blockIdx.x * kBuckets + threadIdx.x] = bucket_rows[threadIdx.x];
    }
}

__global__ void __launch_bounds__(kThreads, 1) order_kernel(Params const params) {
    __shared__ uint32_t bucket_rows[kBuckets];       // of all blocks
    __shared__ uint32_t block_begin[kBuckets];       // place of the block's first row of a bucket
    __shared__ uint32_t bucket_begin[kBuckets + 1];  // place of a bucket
    __shared__ uint32_t heavy_count;

    int const lane = threadIdx.x % kWarpSize;
    int const bucket = threadIdx.x % kBuckets;
    allow_dependent_launch();
    if (threadIdx.x < kBuckets) {
        bucket_rows[threadIdx.x] = 0;
        block_begin[threadIdx.x] = 0;
    }
    wait_for_previous_launch();
    __syncthreads();
    uint32_t all = 0;
    uint32_t before = 0;
#pragma unroll 4
    for (unsigned block = threadIdx.x / kBuckets; block < gridDim.x; block += kThreads / kBuckets) {
        uint32_t const rows = params.schedule.block_buckets[block * kBuckets + bucket];
        all += rows;
        before += block < blockIdx.x ? rows : 0;
    }
    atomicAdd(&bucket_rows[bucket], all);
    atomicAdd(&block_begin[bucket], before);
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
        // A lane has kPerLane neighbouring buckets.
        constexpr int kPerLane = kBuckets / kWarpSize;
        uint32_t ends[kPerLane];
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            sum += bucket_rows[lane * kPerLane + i];
            ends[i] = sum;
        }
        uint32_t const own = sum;
#pragma unroll
        for (int distance = 1; distance < kWarpSize; distance *= 2) {
            uint32_t const below = __shfl_up_sync(0xffffffffu, sum, distance);
            sum += lane >= distance ? below : 0;
        }
        uint32_t begin = sum - own;
        if (lane == 0) {
            bucket_begin[0] = 0;
        }
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            int const b = lane * kPerLane + i;
            block_begin[b] += i == 0 ? begin : begin + ends[i - 1];
            bucket_begin[b + 1] = begin + ends[i];
        }
    }
    __syncthreads();
    if (threadIdx.x < kWarpSize) {
        uint32_t const heavy = guard::decide<kBuckets>(params.guard, bucket_begin, most_of_bucket);
        if (lane == 0) {
            heavy_count = heavy;
            if (blockIdx.x == 0) {
                params.schedule.header->heavy_count = heavy;
                params.schedule.header->failed_count = 0;
            }
        }
    }

    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    auto const position_of = [&](int64_t row) {
        uint32_t const place = params.schedule.place[row];
        return block_begin[place >> kRankBits] + (place & ((1u << kRankBits) - 1));
    };
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
        params.schedule.row_order[position_of(row)] = static_cast<uint32_t>(row);
        params.schedule.has_failed[row] = 0;
    }
    __syncthreads();
    bool const all_heavy = heavy_count == params.tokens;
    if (heavy_count != 0 && gather::is_needed(params.gather, all_heavy)) {
        for (int64_t row = begin + threadIdx.x / kWarpSize; row < end; row += kWarps) {
            uint32_t const position = position_of(row);
            if (position < heavy_count) {
                gather::gather_row(params.gather, all_heavy, row, position);
            }
        }
    }
}

}  // namespace twell::schedule

#endif  // TWELL_KERNELS_SCHEDULE_CUH_

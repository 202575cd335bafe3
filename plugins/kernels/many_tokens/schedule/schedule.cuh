// Bucket sort of the rows by their non-zeros, for every GPU from sm_80 on, without anything to be cleared beforehand,
// in two launches:
//
// count_kernel   blocks of rows: each row's bucket, its rank among the block's rows of that bucket, lists of light rows
//                and a sample for hot neurons
// order_kernel   the same blocks: where each bucket of the block starts, from all blocks' numbers; hot neurons; then
//                row_order, the units of the up projection, other lists, chunks, and a gather of the block's rows for
//                the dense path: with chunks the up projection gathers them, just before they are read
//
// Where rows may be direct (format/schedule.cuh), cluster_kernel does both, from the gate's count of each tile, while
// the up projection is at those rows, which also gathers rows for the dense path.
//
// Much of this runs once in a CTA, where 32 warps share four schedulers: an instruction of all of them costs eight
// cycles.
//
// If the gate's count shows that all rows are dense, none is ordered, and the sparse kernels leave at once.
//
// Ranks are handed out by atomics in shared memory, so the order within a bucket varies from run to run. No result may
// depend on it. The number of rows of a bucket does not vary.
#pragma once

#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "format/list.cuh"
#include "format/pack.cuh"
#include "format/schedule.cuh"
#include "format/sparse_rows.cuh"
#include "many_tokens/chunks/chunk.cuh"
#include "many_tokens/chunks/hot.cuh"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.cuh"
#include "twell/twell.h"

namespace twell::schedule {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxBlocks = 128;
// Of cluster_kernel. Few, since they take the place of others that compute.
constexpr int kClusterBlocks = 8;

// Levels of non-zeros: exact below 16, then eight to an octave, up to 65536.
constexpr int kExactLevels = 16;
constexpr int kLevelsPerOctave = 8;
constexpr int kLevels = kExactLevels + 12 * kLevelsPerOctave + 1;
// Buckets are levels, the heaviest first.
constexpr int kBuckets = 128;
static_assert(kLevels <= kBuckets, "every level has a bucket");

__host__ __device__ __forceinline__ int level_of(int count) {
    if (count < kExactLevels) {
        return count;
    }
#if defined(__CUDA_ARCH__)
    int const octave = 31 - __clz(count);
#else
    int const octave = 31 - __builtin_clz(static_cast<unsigned>(count));
#endif
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

__host__ __device__ __forceinline__ int bucket_of(int count) { return kLevels - 1 - level_of(count); }

// The most non-zeros that a row of a bucket has.
__host__ __device__ __forceinline__ int most_of_bucket(int bucket) {
    return bucket < kLevels ? most_of_level(kLevels - 1 - bucket) : 0;
}

static_assert((kSplitNonzeros & (kSplitNonzeros - 1)) == 0 && kSplitNonzeros > kExactLevels, "a bucket begins there");

// From this bucket on all rows have a list.
__host__ __device__ __forceinline__ int first_listed_bucket(int num_tiles) {
    return bucket_of(max_listed(num_tiles) + 1) + 1;
}

// The units of a sparse row of a bucket; some may have nothing to do.
__host__ __device__ __forceinline__ int units_of_bucket(int bucket, int direct_below) {
    constexpr int kUnit = static_cast<int>(kUnitNonzeros);
    int const most = most_of_bucket(bucket);
    return most < direct_below ? 0 : (most + kUnit - 1) / kUnit;
}

// `place` of a row: bucket and rank, and whether count_kernel has listed the row.
constexpr int kRankBits = 24;
constexpr uint32_t kHasList = 1u << 31;
static_assert(TWELL_MAX_TOKENS / kMaxBlocks < 1 << kRankBits && kBuckets <= 1 << (31 - kRankBits), "fit 31 bits");
constexpr int64_t kMostTokensOfCluster = int64_t{kClusterBlocks} << kRankBits;

__device__ __forceinline__ int bucket_of_place(uint32_t place) {
    return static_cast<int>((place & ~kHasList) >> kRankBits);
}

__device__ __forceinline__ uint32_t rank_of_place(uint32_t place) { return place & ((1u << kRankBits) - 1); }

struct Params {
    uint32_t const* packed;   // [tokens, num_tiles * words_per_tile]
    uint16_t const* spilled;  // [tokens, num_tiles * TWELL_TILE]
    Schedule schedule;
    GuardModel guard;
    Gather gather;
    Chunks chunks;
    uint16_t const* w_up;  // [d_ff, d_model], for hot neurons
    int d_model;
    int d_ff;
    SparseRows rows;
    int64_t tokens;
    int num_blocks;
    int rows_per_block;
    int num_tiles;
    int words_per_tile;
};

// By one warp: the lists of the rows where `wanted` is true.
template <int kRows>
__device__ __forceinline__ void list_rows(Params const& params, int64_t const (&rows)[kRows],
                                          bool const (&wanted)[kRows]) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t before[kRows] = {};
    for (int tile_begin = 0; tile_begin < params.num_tiles; tile_begin += kWarpSize) {
        int64_t const t = min(tile_begin + lane, params.num_tiles - 1);
        uint32_t const* tiles[kRows];
        uint32_t heads[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            tiles[r] = params.packed + (rows[r] * params.num_tiles + t) * params.words_per_tile;
            heads[r] = tiles[r][0];
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            if (!wanted[r]) {
                continue;
            }
            uint32_t const head = tile_begin + lane < params.num_tiles ? heads[r] : 0;
            uint32_t const count = count_of(head);
            bool const overflowed = head >= static_cast<uint32_t>(params.words_per_tile);
            uint32_t const last = before[r] + sum_up_to(count);
            uint32_t* const words = params.schedule.words + rows[r] * max_listed(params.num_tiles);
            if (!overflowed) {
                list_tile(AllPlaces{words + last - count}, count, [&](uint32_t i) { return tiles[r][1 + i]; });
            }
            for (uint32_t rest = __ballot_sync(0xffffffffu, overflowed); rest != 0; rest &= rest - 1) {
                int const owner = __ffs(rest) - 1;
                list_spilled_tile(AllPlaces{words + __shfl_sync(0xffffffffu, last - count, owner)}, params.spilled,
                                  rows[r] * params.num_tiles, tile_begin + owner);
            }
            before[r] = __shfl_sync(0xffffffffu, last, kWarpSize - 1);
        }
    }
}

// By one warp: whether the gate's count tells that all rows are dense, for the CTA, after a __syncthreads().
__device__ __forceinline__ void ask_gate(bool& is_early, Params const& params) {
    bool const all_are_dense = guard::all_are_dense(params.guard.count);
    if (threadIdx.x % kWarpSize == 0) {
        is_early = all_are_dense;
    }
}

// By one thread of the launch, before any row is ordered.
__device__ __forceinline__ void begin_header(Params const& params, bool is_early) {
    params.schedule.header->is_early = is_early ? 1 : 0;
    params.schedule.header->left_count = 0;
    for (int i = 0; params.chunks.counts != nullptr && i <= params.chunks.num_blocks; ++i) {
        params.chunks.counts[i] = 0;
    }
}

// Enters a row with `count` non-zeros into its bucket, and whether it has been listed.
__device__ __forceinline__ void enter_row(Params const& params, uint32_t* bucket_rows, int64_t row, uint32_t count,
                                          bool has_list) {
    uint32_t const bucket = static_cast<uint32_t>(bucket_of(static_cast<int>(count)));
    uint32_t const rank = atomicAdd(&bucket_rows[bucket], 1u);
    params.schedule.place[row] = (has_list ? kHasList : 0) | bucket << kRankBits | rank;
    params.schedule.counts[row] = count;
}

__device__ __forceinline__ void store_buckets(Params const& params, uint32_t const* bucket_rows) {
    __syncthreads();
    if (threadIdx.x < kBuckets) {
        params.schedule.block_buckets[blockIdx.x * kBuckets + threadIdx.x] = bucket_rows[threadIdx.x];
    }
}

// By a CTA, where rows may be direct: its rows' buckets.
__device__ __forceinline__ void count_direct_rows(Params const& params) {
    __shared__ uint32_t bucket_rows[kBuckets];
    if (threadIdx.x < kBuckets) {
        bucket_rows[threadIdx.x] = 0;
    }
    __syncthreads();
    int const lane = threadIdx.x % kWarpSize;
    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    constexpr int kRows = 8;  // whose loads a warp issues together
#pragma unroll 1
    for (int64_t first = begin + threadIdx.x / kWarpSize * kRows; first < end; first += kWarps * kRows) {
        uint32_t own_count = 0;
#pragma unroll 1
        for (int tile_begin = 0; tile_begin < params.num_tiles; tile_begin += kWarpSize) {
            int const t = tile_begin + lane;
            uint32_t counts[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                int64_t const row = min(first + r, end - 1);
                counts[r] = t < params.num_tiles ? params.schedule.tile_counts[row * params.num_tiles + t] : 0;
            }
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                uint32_t const sum = __reduce_add_sync(0xffffffffu, counts[r]);
                own_count += lane == r ? sum : 0;
            }
        }
        if (lane < kRows && first + lane < end) {
            enter_row(params, bucket_rows, first + lane, own_count, false);
        }
    }
    store_buckets(params, bucket_rows);
}

__global__ void __launch_bounds__(kThreads, 1) count_kernel(Params const params) {
    __shared__ uint32_t bucket_rows[kBuckets];

    int const lane = threadIdx.x % kWarpSize;
    wait_for_previous_launch();
    // Only now: the next kernel may read the caller's weights before it waits for this kernel.
    allow_dependent_launch();
    if (threadIdx.x < kBuckets) {
        bucket_rows[threadIdx.x] = 0;
    }
    if (blockIdx.x == params.num_blocks) {
        // One CTA more, which has no rows.
        bool const is_early = threadIdx.x < kWarpSize && guard::all_are_dense(params.guard.count);
        if (threadIdx.x == 0) {
            begin_header(params, is_early);
        }
        return;
    }
    __syncthreads();

    constexpr int kRows = 2;  // whose loads a warp issues together
    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    int64_t const words_per_row = static_cast<int64_t>(params.num_tiles) * params.words_per_tile;
    auto const tile_at = [&](int64_t row, int tile_begin) {
        return reinterpret_cast<uint4 const*>(params.packed + min(row, end - 1) * words_per_row +
                                              min(tile_begin + lane, params.num_tiles - 1) * params.words_per_tile);
    };
    int64_t const own_begin = begin + threadIdx.x / kWarpSize * kRows;
    uint4 next_heads[kRows];  // loaded while those before are looked at
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        next_heads[r] = *tile_at(own_begin + r, 0);
    }
    for (int64_t first = own_begin; first < end; first += kWarps * kRows) {
        uint32_t sums[kRows] = {};
        bool light[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            light[r] = first + r < end;
        }
        for (int tile_begin = 0; tile_begin < params.num_tiles; tile_begin += kWarpSize) {
            bool const is_last = tile_begin + kWarpSize >= params.num_tiles;
            int64_t const next_first = first + (is_last ? kWarps * kRows : 0);
            uint4 heads[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                heads[r] = next_heads[r];
                if (next_first < end) {
                    next_heads[r] = *tile_at(next_first + r, is_last ? 0 : tile_begin + kWarpSize);
                }
            }
            uint32_t head_words[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                head_words[r] = tile_begin + lane < params.num_tiles ? heads[r].x : 0;
            }
            // Both rows' at once, in 16 bits each.
            static_assert(kRows == 2 && kWarpSize * TWELL_TILE < 1 << 16, "sums fit");
            uint32_t const ends = sum_up_to(count_of(head_words[0]) | count_of(head_words[1]) << 16);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                uint32_t const head = head_words[r];
                uint32_t const count = count_of(head);
                uint32_t const last = sums[r] + (r == 0 ? ends & 0xffffu : ends >> 16);
                light[r] &= __all_sync(0xffffffffu, head <= kFrontEntries);
                if (light[r]) {
                    // Few tiles have that many: a load costs time for each line of memory that it touches.
                    uint4 const more = count > kMostUnspilled ? tile_at(first + r, tile_begin)[1] : uint4{};
                    TileFront{heads[r], more}.list(
                        AllPlaces{params.schedule.words + (first + r) * max_listed(params.num_tiles) + last - count},
                        count);
                }
                sums[r] = __shfl_sync(0xffffffffu, last, kWarpSize - 1);
                if (hot::is_sampled(params.chunks.hot, first + r) && first + r < end) {
                    bool const has_entries = head < static_cast<uint32_t>(params.words_per_tile);
                    if (has_entries) {
                        hot::sample(params.chunks.hot,
                                    reinterpret_cast<uint32_t const*>(tile_at(first + r, tile_begin)) + 1, count);
                    }
                    for (uint32_t rest = __ballot_sync(0xffffffffu, !has_entries); rest != 0; rest &= rest - 1) {
                        int const tile_idx = tile_begin + __ffs(rest) - 1;
                        hot::sample_spilled(params.chunks.hot,
                                            params.spilled + ((first + r) * params.num_tiles + tile_idx) * TWELL_TILE,
                                            tile_idx * TWELL_TILE);
                    }
                }
            }
        }
        if (lane < kRows && first + lane < end) {
            bool const one = lane == 0;
            enter_row(params, bucket_rows, first + lane, one ? sums[0] : sums[1], one ? light[0] : light[1]);
        }
    }
    store_buckets(params, bucket_rows);
}

// By one warp: for each of a lane's values the sum of those before it, in this lane and the ones below. Gives the sum
// up to this lane's last.
template <int kPerLane>
__device__ __forceinline__ uint32_t sums_before(uint32_t (&sums)[kPerLane], uint32_t const (&values)[kPerLane]) {
    uint32_t own = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        sums[i] = own;
        own += values[i];
    }
    uint32_t const end = sum_up_to(own);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        sums[i] += end - own;
    }
    return end;
}

constexpr int kBucketsPerLane = kBuckets / kWarpSize;  // neighbouring ones
static_assert(kBucketsPerLane == 4 && kMaxBlocks % kWarps == 0 && kClusterBlocks <= kWarps, "loaded in vectors");

__device__ __forceinline__ void add_atomically(uint32_t* shared_sums, uint4 values) {
    atomicAdd(shared_sums, values.x);
    atomicAdd(shared_sums + 1, values.y);
    atomicAdd(shared_sums + 2, values.z);
    atomicAdd(shared_sums + 3, values.w);
}

// Where all rows are dense, by a CTA: the header, and a gather of the CTA's rows for the dense path.
template <bool kDirect>
__device__ __forceinline__ void leave_early(Params const& params) {
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        uint32_t const tokens = static_cast<uint32_t>(params.tokens);
        params.schedule.header->heavy_count = tokens;
        params.schedule.header->split_end = tokens;
        params.schedule.header->unit_count = 0;
    }
    if (kDirect) {
        return;  // no plain block
    }
    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    for (int64_t row = begin + threadIdx.x / kWarpSize; row < end && gather::is_needed(params.gather, true);
         row += kWarps) {
        gather::gather_row(params.gather, true, row, row);
    }
}

// By a CTA: its rows' places and all else, when all CTAs have counted theirs.
template <bool kDirect>
__device__ __forceinline__ void order_rows(Params const& params) {
    __shared__ uint32_t bucket_rows[kBuckets];       // of all blocks
    __shared__ uint32_t block_begin[kBuckets];       // place of the block's first row of a bucket
    __shared__ uint32_t bucket_begin[kBuckets + 1];  // place of a bucket
    __shared__ uint32_t unit_begin[kBuckets];        // first unit of a bucket
    __shared__ guard::Votes<kBuckets> votes;

    int const lane = threadIdx.x % kWarpSize;
    int const direct_below = kDirect ? params.schedule.direct_below : 0;
    int64_t const begin = static_cast<int64_t>(blockIdx.x) * params.rows_per_block;
    int64_t const end = min(begin + params.rows_per_block, params.tokens);
    if (threadIdx.x < kBuckets) {
        bucket_rows[threadIdx.x] = 0;
        block_begin[threadIdx.x] = 0;
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ chunk::HotShared hot_neurons;
    __shared__ chunk::Shared chunk_shared;
    bool const has_chunks = !kDirect && params.chunks.counts != nullptr;
    if (!kDirect && threadIdx.x < hot::kBins) {
        hot_neurons.bins[threadIdx.x] = 0;
    }
    if (!kDirect && threadIdx.x == 0) {
        hot_neurons.pairs = 0;
    }
#endif
    __syncthreads();
    {
        // Four buckets a lane, every kWarps-th block a warp.
        uint4 all = {};
        uint4 before = {};
        constexpr int kAtOnce = kDirect ? 1 : kMaxBlocks / kWarps;
        uint4 rows[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            unsigned const block = threadIdx.x / kWarpSize + i * kWarps;
            rows[i] =
                block < gridDim.x
                    ? __ldcg(reinterpret_cast<uint4 const*>(params.schedule.block_buckets) + block * kWarpSize + lane)
                    : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            add(all, rows[i]);
            if (threadIdx.x / kWarpSize + i * kWarps < blockIdx.x) {
                add(before, rows[i]);
            }
        }
        add_atomically(bucket_rows + lane * kBucketsPerLane, all);
        add_atomically(block_begin + lane * kBucketsPerLane, before);
    }
    __syncthreads();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (!kDirect && params.chunks.hot.sampled != nullptr) {
        hot::choose<kWarps>(hot_neurons, params.chunks.hot, params.d_ff);
    }
#endif
    constexpr int kPerLane = kBucketsPerLane;
    uint32_t rows[kPerLane];
    uint32_t begins[kPerLane];
    if (threadIdx.x < kWarpSize) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            rows[i] = bucket_rows[lane * kPerLane + i];
        }
        uint32_t const end = sums_before(begins, rows);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            bucket_begin[lane * kPerLane + i] = begins[i];
            block_begin[lane * kPerLane + i] += begins[i];
        }
        if (lane == kWarpSize - 1) {
            bucket_begin[kBuckets] = end;
        }
    }
    __syncthreads();
    uint32_t const heavy_count =
        guard::decide(votes, params.guard, bucket_begin, first_listed_bucket(params.num_tiles), most_of_bucket);
    if (threadIdx.x < kWarpSize) {
        uint32_t units[kPerLane];
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            uint32_t const sparse_begin = max(begins[i], heavy_count);
            uint32_t const sparse_end = max(begins[i] + rows[i], heavy_count);
            units[i] =
                (sparse_end - sparse_begin) * static_cast<uint32_t>(units_of_bucket(lane * kPerLane + i, direct_below));
        }
        uint32_t const unit_count = sums_before(begins, units);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            unit_begin[lane * kPerLane + i] = begins[i];
        }
        if (lane == kWarpSize - 1 && blockIdx.x == 0) {
            params.schedule.header->heavy_count = heavy_count;
            params.schedule.header->split_end = max(bucket_begin[bucket_of(kSplitNonzeros) + 1], heavy_count);
            params.schedule.header->unit_count = unit_count;
        }
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    else if (has_chunks) {
        chunk::clear_counts<kThreads - kWarpSize>(chunk_shared, static_cast<int>(threadIdx.x) - kWarpSize);
    }
#endif
    __syncthreads();

    auto const position_of = [&](int64_t row) {
        uint32_t const place = params.schedule.place[row];
        return block_begin[bucket_of_place(place)] + rank_of_place(place);
    };
    for (int64_t row = begin + threadIdx.x; row < end; row += kThreads) {
        uint32_t const position = position_of(row);
        uint32_t const count = params.schedule.counts[row];
        params.schedule.row_order[position] = {static_cast<uint32_t>(row), count};
        if (position < heavy_count) {
            continue;
        }
        int const own_bucket = bucket_of_place(params.schedule.place[row]);
        uint32_t const num_units = static_cast<uint32_t>(units_of_bucket(own_bucket, direct_below));
        Unit* const units = params.schedule.units + unit_begin[own_bucket] +
                            (position - max(bucket_begin[own_bucket], heavy_count)) * num_units;
        for (uint32_t i = 0; i < num_units; ++i) {
            uint32_t const unit_first = i * kUnitNonzeros;
            uint32_t const in_unit = min(count - unit_first, kUnitNonzeros);
            uint32_t const is_listed =
                kDirect && static_cast<int>(count) >= params.schedule.listed_from ? Unit::kIsListed : 0;
            units[i] = {static_cast<uint32_t>(row),
                        unit_first >= count ? kNoRange : unit_first + in_unit - 1 + is_listed};
        }
    }
    bool const all_heavy = heavy_count == params.tokens;
    for (int64_t first = begin + threadIdx.x / kWarpSize; !all_heavy && first < end; first += kThreads) {
        int64_t const row = first + lane * kWarps;
        bool const wanted =
            row < end && (params.schedule.place[row] & kHasList) == 0 &&
            (!kDirect || params.schedule.counts[row] >= static_cast<uint32_t>(params.schedule.listed_from)) &&
            position_of(row) >= heavy_count;
        uint32_t rest = __ballot_sync(0xffffffffu, wanted);
        while (rest != 0) {
            int64_t const one = first + (__ffs(rest) - 1) * kWarps;
            rest &= rest - 1;
            int64_t const other = rest == 0 ? one : first + (__ffs(rest) - 1) * kWarps;
            list_rows<2>(params, {one, other}, {true, rest != 0});
            rest &= rest - 1;
        }
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (has_chunks && !all_heavy) {
        __syncthreads();  // the lists
        chunk::build<kThreads>(
            chunk_shared, hot_neurons, params.chunks, params.schedule, params.rows, params.num_tiles, begin, end,
            [&](int64_t row) { return position_of(row) < heavy_count ? 0 : params.schedule.counts[row]; },
            [&](int thread) {
                if (params.chunks.hot.sampled != nullptr) {
                    hot::copy_weights<kThreads / 2>(hot_neurons, params.chunks.hot, params.w_up, params.d_model,
                                                    thread);
                }
            });
    }
#endif
    // Where there are chunks or rows may be direct, the up projection has more CTAs for that.
    if (!kDirect && params.chunks.counts == nullptr && heavy_count != 0 &&
        gather::is_needed(params.gather, all_heavy)) {
        for (int64_t row = begin + threadIdx.x / kWarpSize; row < end; row += kWarps) {
            uint32_t const position = position_of(row);
            if (position < heavy_count) {
                gather::gather_row(params.gather, all_heavy, row, position);
            }
        }
    }
}

__global__ void __launch_bounds__(kThreads, 1) order_kernel(Params const params) {
    // As count_kernel puts into the header, but to read that after the wait would take longer.
    __shared__ bool is_early;
    if (threadIdx.x < kWarpSize) {
        ask_gate(is_early, params);
    }
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, since the next kernel begins with header->is_early
    __syncthreads();
    if (is_early) {
        leave_early<false>(params);
    } else {
        order_rows<false>(params);
    }
}

// Both where rows may be direct, by a cluster, beside their up projection. On compute capability 9.0 alone.
__global__ void __launch_bounds__(kThreads, 1) cluster_kernel(Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __shared__ bool is_early;
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, as the next kernel reads the gate's results without a wait
    if (threadIdx.x < kWarpSize) {
        ask_gate(is_early, params);
    }
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        begin_header(params, is_early);
    }
    if (is_early) {
        leave_early<true>(params);
        return;
    }
    count_direct_rows(params);
    sync_cluster();  // what all CTAs have counted
    order_rows<true>(params);
#endif
}

}  // namespace twell::schedule

// Builds the chunks of the rows that have lists, in order_kernel.
//
// A row's pairs of one block of neurons follow one another, those of the next row of the run behind them; an octet that
// has pairs of two rows takes no third one. Where in the order of a block's chunks a run's come, varies from call to
// call; no result may depend on it. The rows in chunks do not vary: they are those that come first in a run, as far as
// its chunks go.
#pragma once

#include "device/vector.cuh"
#include "format/schedule.cuh"
#include "format/sparse_rows.cuh"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/chunks/hot.cuh"

namespace twell::chunk {

constexpr int kRunsAtOnce = 4;
constexpr int kRowsAtOnce = kRunsAtOnce * kRunRows;
// A run's rows are placed in parts at the same time, one after the other in each.
constexpr int kParts = 2;
constexpr int kPartRows = kRunRows / kParts;

// In the list of a row that is in no chunk, at the beginning of each unit, in place of the neuron.
constexpr uint32_t kIsLeft = 0xffffffffu;

// An unfinished octet wastes fewer than kOctetPairs places: it has the end of one row's pairs and all of another's.
// Counting every row with at least that many pairs bounds the total waste.
constexpr uint32_t kLeastCounted = kOctetPairs - 1;

constexpr int kMostHotWords = kMostNeuronBlocks * kMostBlockNeurons / kWarpSize;

constexpr int kBlockStride = kMostBlocks;
static_assert(kBlockStride % 2 == 1, "against bank conflicts");

struct Shared {
    // A row's pairs in a block; then the place of the first one, less the row's pairs in blocks before.
    uint32_t pairs[kRowsAtOnce][kBlockStride];
    // Places up to this row's; then its pairs in blocks before; then the place of the first pair, maybe with
    // kSecondRow.
    uint32_t first[kRowsAtOnce][kBlockStride];
    uint32_t parts[kRunsAtOnce][kParts][kMostBlocks];  // places of a part; then where they begin
    uint32_t chunks[kRunsAtOnce][kMostBlocks];
    uint32_t begin[kRunsAtOnce][kMostBlocks];  // the run's first chunk in the block
    bool is_in[kRowsAtOnce];
};

using HotShared = hot::Shared<kMostHotWords>;

// A neuron's block, and the neuron's number in it.
struct Member {
    uint32_t block;
    uint32_t neuron;
};

__device__ __forceinline__ Member member_of(HotShared const& hot, Chunks const& chunks, uint32_t neuron) {
    if (chunks.hot.sampled != nullptr) {
        HotWord const word = hot.words[neuron / kWarpSize];
        uint32_t const bit = 1u << neuron % kWarpSize;
        if ((word.bits & bit) != 0) {
            return {static_cast<uint32_t>(chunks.num_blocks), word.before + __popc(word.bits & (bit - 1))};
        }
    }
    uint32_t const block = chunks.num_blocks == 1 ? 0 : __umulhi(neuron, chunks.inverse);
    return {block, neuron - block * chunks.block_neurons};
}

static_assert(kMostNeuronBlocks * kMostBlockNeurons / TWELL_TILE * kListedPerTile < 0xffff,
              "a row's list is told from kNoPair by 16 bits");

// By kThreads threads, this one being number `thread`, before pairs are counted.
template <int kThreads>
__device__ __forceinline__ void clear_counts(Shared& shared, int thread) {
    for (int i = thread; i < kRowsAtOnce * kBlockStride; i += kThreads) {
        (&shared.pairs[0][0])[i] = 0;
    }
}

// Of the last octet of a part and of the last chunk all but one place may stay unused.
constexpr uint32_t kUnused = kChunkPairs + kParts * kOctetPairs;

// By one warp: for each row of a run the places that it and those before it may take in a block.
__device__ __forceinline__ void count_places(Shared& shared, int run, int block) {
    constexpr int kPerLane = kRunRows / kWarpSize;
    int const first = run * kRunRows + threadIdx.x % kWarpSize * kPerLane;
    uint32_t own = 0;
    uint32_t up_to[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        uint32_t const pairs = shared.pairs[first + i][block];
        own += pairs == 0 ? 0 : max(pairs, kLeastCounted);
        up_to[i] = own;
    }
    uint32_t const before = sum_up_to(own) - own;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        shared.first[first + i][block] = before + up_to[i];
    }
}

// By one thread: whether a row is in chunks, and its pairs in blocks before each. Those of hot neurons come before
// none.
__device__ __forceinline__ void admit(Shared& shared, Chunks const& chunks, int r) {
    constexpr uint32_t kMostOfBlock = kRunChunksOfBlock * kChunkPairs - kUnused;
    uint32_t const most = chunks.num_blocks * (kRunChunks * kChunkPairs - kUnused);
    bool fits = shared.first[r][chunks.num_blocks] <= kMostOfBlock;
    uint32_t all = 0;
    for (int b = 0; b < chunks.num_blocks; ++b) {
        uint32_t const places = shared.first[r][b];
        fits &= places <= kMostOfBlock;
        all += places;
    }
    bool const is_in = fits && all <= most;
    shared.is_in[r] = is_in;
    uint32_t before = 0;
    for (int b = 0; b <= chunks.num_blocks; ++b) {
        shared.first[r][b] = b < chunks.num_blocks ? before : 0;
        before += shared.pairs[r][b];
        if (!is_in) {
            shared.pairs[r][b] = 0;
        }
    }
}

// By one thread: the places of a part's pairs in a block, counted from where the part's begin.
__device__ __forceinline__ void place_rows(Shared& shared, int run, int part, int block) {
    uint32_t place = 0;
    uint32_t rows_of_octet = 0;
    constexpr int kAtOnce = 8;
    int const first = run * kRunRows + part * kPartRows;
#pragma unroll 1
    for (int begin = first; begin < first + kPartRows; begin += kAtOnce) {
        uint32_t pairs[kAtOnce];
        uint32_t before[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            pairs[i] = shared.pairs[begin + i][block];
            before[i] = shared.first[begin + i][block];
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            bool const is_full = rows_of_octet == kRowsOfOctet && pairs[i] != 0;
            place = is_full ? (place + kOctetPairs - 1) & ~(kOctetPairs - 1u) : place;
            rows_of_octet = place % kOctetPairs == 0 ? 0 : rows_of_octet;
            shared.pairs[begin + i][block] = place - before[i];
            shared.first[begin + i][block] = place | (rows_of_octet != 0 ? kSecondRow : 0);
            uint32_t const end = place + pairs[i];
            bool const stays = (place ^ end) < kOctetPairs;
            rows_of_octet = stays ? rows_of_octet + (pairs[i] != 0 ? 1 : 0) : 1;
            place = end;
        }
    }
    shared.parts[run][part][block] = place;
}

// By one warp: where a run's chunks lie among all.
__device__ __forceinline__ void take_chunks(Shared& shared, Chunks const& chunks, int run) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t places = 0;
    for (int part = 0; part < kParts && lane <= chunks.num_blocks; ++part) {
        uint32_t const of_part = shared.parts[run][part][lane];
        shared.parts[run][part][lane] = places;
        places += (of_part + kOctetPairs - 1) / kOctetPairs * kOctetPairs;
    }
    uint32_t const count = (places + kChunkPairs - 1) / kChunkPairs;
    if (lane <= chunks.num_blocks) {
        shared.chunks[run][lane] = count;
        shared.begin[run][lane] = lane * chunks.block_capacity + atomicAdd(&chunks.counts[lane], count);
    }
}

// By kThreads threads, this one being number `thread`: places among those of all chunks.
template <int kThreads>
__device__ __forceinline__ void move_places(Shared& shared, int num_blocks, int thread) {
    for (int i = thread; i < kRowsAtOnce * (num_blocks + 1); i += kThreads) {
        int const r = i % kRowsAtOnce;
        int const block = i / kRowsAtOnce;
        int const run = r / kRunRows;
        uint32_t const begin =
            shared.begin[run][block] * kChunkPairs + shared.parts[run][r % kRunRows / kPartRows][block];
        shared.pairs[r][block] += begin;
        shared.first[r][block] += begin;
    }
}

// By one warp: a chunk, the i-th of a run in a block, in which no pair has been entered. Any row of x may stand in for
// those that it will not have.
__device__ __forceinline__ void clear_chunk(Shared const& shared, Chunks const& chunks, int run, int block, uint32_t i,
                                            int64_t row) {
    int const lane = threadIdx.x % kWarpSize;
    Chunk& chunk = chunks.chunks[shared.begin[run][block] + i];
    chunk.entries[lane] = 0;
    chunk.items[lane] = kNoPair;
    if (lane < kRowsOfChunk) {
        chunk.rows[lane] = static_cast<uint32_t>(row);
    }
}

// Enters a pair, the i-th of a row and the order-th of those that are hot, or that are not. r: the row's number among
// those at once.
__device__ __forceinline__ void enter(Shared const& shared, Member member, Chunks const& chunks, int r, int64_t row,
                                      uint32_t i, uint32_t order, uint32_t word) {
    uint32_t const place = shared.pairs[r][member.block] + order;
    // Whether the octet has the row's first pair, and this row is its second one.
    bool const second = (shared.first[r][member.block] ^ (place | kSecondRow)) < kOctetPairs;
    uint32_t const in_chunk = place % kChunkPairs;
    uint32_t const octet = in_chunk / kOctetPairs;
    Chunk& chunk = chunks.chunks[place / kChunkPairs];
    chunk.entries[in_chunk % kOctetPairs * kOctets + octet] = member.neuron | (second ? kSecondRow : 0);
    chunk.items[in_chunk] = i | (word & 0xffff0000u);
    chunk.rows[octet * kRowsOfOctet + (second ? 1 : 0)] = static_cast<uint32_t>(row);
}

// By a CTA of kThreads, which has cleared the counts, for the rows from `begin`, a multiple of kRunRows, to `end`,
// whose lists it sees. Neurons of a list ascend, so a row's pairs in a block are neighbours, but for hot ones. count_of
// gives the non-zeros of a row, 0 for one that is not to be in chunks. While few warps are at work, others do
// meanwhile(thread), once.
template <int kThreads, class CountOf, class Meanwhile>
__device__ __forceinline__ void build(Shared& shared, HotShared const& hot, Chunks const& chunks,
                                      Schedule const& schedule, SparseRows const& rows, int num_tiles, int64_t begin,
                                      int64_t end, CountOf count_of, Meanwhile meanwhile) {
    constexpr int kWarps = kThreads / kWarpSize;
    constexpr int kPerWarp = kRowsAtOnce / kWarps;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int64_t const list_step = static_cast<int64_t>(kWarps) * max_listed(num_tiles);
    bool is_first = true;
#pragma unroll 1
    for (; begin < end; begin += kRowsAtOnce, is_first = false) {
        // Row j of a warp is row j * kWarps + warp of those at once. A lane has one's count.
        int64_t const counted = begin + lane * kWarps + warp;
        uint32_t const own_count = lane < kPerWarp && counted < end ? count_of(counted) : 0;
        int const num_rows = static_cast<int>(min((end - begin + kWarps - 1) / kWarps, int64_t{kPerWarp}));
        // For the pairs of a warp's rows, a lane each; the next ones are loaded meanwhile.
        auto const for_each = [&](auto use) {
            uint32_t const* list = schedule.words + (begin + warp) * max_listed(num_tiles) + lane;
            uint32_t count = __shfl_sync(0xffffffffu, own_count, 0);
            uint32_t word = lane < count ? *list : 0;
#pragma unroll 1
            for (int j = 0; j < num_rows; ++j) {
                uint32_t const next_count = __shfl_sync(0xffffffffu, own_count, j + 1);
                uint32_t const first_of_next = lane < next_count ? list[list_step] : 0;
                uint32_t hot_before = 0;
#pragma unroll 1
                for (uint32_t i = lane; i - lane < count; i += kWarpSize) {
                    uint32_t const next_word = i + kWarpSize < count ? list[i - lane + kWarpSize] : 0;
                    use(j * kWarps + warp, i, i < count, word, hot_before);
                    word = next_word;
                }
                list += list_step;
                count = next_count;
                word = first_of_next;
            }
        };
        for_each([&](int r, uint32_t, bool is_pair, uint32_t word, uint32_t&) {
            if (is_pair) {
                atomicAdd(&shared.pairs[r][member_of(hot, chunks, word & 0xffffu).block], 1u);
            }
        });
        __syncthreads();
        int const num_sections = kRunsAtOnce * (chunks.num_blocks + 1);  // what a run has in a block
#pragma unroll 1
        for (int i = warp; i < num_sections; i += kWarps) {
            count_places(shared, i % kRunsAtOnce, i / kRunsAtOnce);
        }
        __syncthreads();
        if (threadIdx.x < kRowsAtOnce) {
            admit(shared, chunks, static_cast<int>(threadIdx.x));
        }
        __syncthreads();
        constexpr int kBusy = kThreads / 2;
        static_assert(kMostBlocks * kRunsAtOnce * kParts <= kBusy, "the others do something else");
        if (int const block = threadIdx.x / (kRunsAtOnce * kParts); block <= chunks.num_blocks) {
            place_rows(shared, threadIdx.x / kParts % kRunsAtOnce, threadIdx.x % kParts, block);
        } else if (is_first && static_cast<int>(threadIdx.x) >= kBusy) {
            meanwhile(static_cast<int>(threadIdx.x) - kBusy);
        }
        __syncthreads();
        if (warp < kRunsAtOnce) {
            take_chunks(shared, chunks, warp);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = warp; i < num_sections; i += kWarps) {
            int const run = i % kRunsAtOnce;
            int const block = i / kRunsAtOnce;
            uint32_t const count = shared.chunks[run][block];
            for (uint32_t k = 0; k < count; ++k) {
                clear_chunk(shared, chunks, run, block, k, begin + run * kRunRows);
            }
        }
        move_places<kThreads>(shared, chunks.num_blocks, static_cast<int>(threadIdx.x));
        __syncthreads();
        for_each([&](int r, uint32_t i, bool is_pair, uint32_t word, uint32_t& hot_before) {
            Member const member = member_of(hot, chunks, word & 0xffffu);
            uint32_t order = i;
            if (chunks.hot.sampled != nullptr) {
                bool const is_hot = is_pair && member.block == static_cast<uint32_t>(chunks.num_blocks);
                uint32_t const hot_lanes = __ballot_sync(0xffffffffu, is_hot);
                uint32_t const before = hot_before + __popc(hot_lanes & ((1u << lane) - 1));
                order = is_hot ? before : i - before;
                hot_before += __popc(hot_lanes);
            }
            if (is_pair && shared.is_in[r]) {
                enter(shared, member, chunks, r, begin + r, i, order, word);
            }
        });
        // Units' first entries say which way a row goes.
        if (lane < kPerWarp) {
            int const r = lane * kWarps + warp;
            for (uint32_t i = 0; i < own_count; i += kUnitNonzeros) {
                rows.list(begin + r)[i].neuron = shared.is_in[r] ? 0 : kIsLeft;
            }
            if (own_count != 0 && !shared.is_in[r]) {
                atomicAdd(&schedule.header->left_count, 1u);
            }
        }
        __syncthreads();
        if (begin + kRowsAtOnce < end) {
            clear_counts<kThreads>(shared, static_cast<int>(threadIdx.x));
            __syncthreads();
        }
    }
}

}  // namespace twell::chunk

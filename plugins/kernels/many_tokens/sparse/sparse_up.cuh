// Up projection of active neurons, for every GPU from sm_80 on: h[n] = g[n] (x . Wu[n] + bu[n]), into a list per row.
//
// One CTA takes a unit, up to kUnitNonzeros neighbouring entries of one row, or a direct row (schedule.h). Its warps
// share them out and do not wait for each other; a warp keeps its part of x in registers for all its neurons. Each sum
// has one owner and one order, so results are bitwise repeatable; how a unit is added up does not depend on what else
// is in a call. Without chunks large matrices are multiplied in several launches, some columns after others.
//
// Where there are chunks (chunk.h), chunk_up.cuh has multiplied their pairs, and hot_sm90.cuh those of hot neurons. A
// warp adds up the parts of a chunk's sums; units are for the rows that are in none.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"
#include "format/list.cuh"
#include "format/sparse_rows.cuh"
#include "many_tokens/chunks/chunk.cuh"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.cuh"

namespace twell::sparse_up {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMinBlocks = 6;  // a multiprocessor: the step is bound by loads in flight
constexpr int kMinBlocksDirect = 7;
// A warp's share of a unit.
constexpr int kNeurons = static_cast<int>(kUnitNonzeros) / kWarps;
// A launch has a multiple of that many columns, or the last ones.
constexpr int kLeastColumns = kLeastDotColumns;

// Of FP8 weights alone: x rounded to these, too.
template <class Stored>
struct RoundedOf {};
template <>
struct RoundedOf<E4m3> {
    E4m3 const* x_rounded;  // [tokens, d_model]
    float const* x_scale;   // [tokens]
};

template <class Stored>
struct ParamsOf : BlockTensorsOf<Stored>, RoundedOf<Stored> {
    uint32_t const* packed;   // [tokens, num_tiles * words_per_tile]
    uint16_t const* spilled;  // [tokens, num_tiles * TWELL_TILE]
    Schedule schedule;
    GateCount count;
    Gather gather;
    SparseRows rows;
    Chunks chunks;
    int column_begin;  // the columns of this launch; the lists hold the sums of those before, in place of h
    int column_end;
    int num_tiles;
    int words_per_tile;
    uint32_t tokens;
    uint32_t num_direct;  // rows that may be direct: all or none
};

// A warp's share of a unit: pairs of neurons are shared out, for the loads of two are issued together.
struct Share {
    int64_t row;
    int begin;
    int count;

    __device__ __forceinline__ Share(int64_t row, int unit_begin, int in_unit) : row(row) {
        int const warp = threadIdx.x / kWarpSize;
        int const pairs = (in_unit + 1) / 2;
        int const first = 2 * (pairs * warp / kWarps);
        begin = unit_begin + first;
        count = min(2 * (pairs * (warp + 1) / kWarps), in_unit) - first;
    }

    __device__ __forceinline__ explicit Share(Unit unit)
        : Share(unit.row, unit.begin(), unit.range == kNoRange ? 0 : unit.count()) {}

    // The packed word of this lane's entry.
    template <class Params>
    __device__ __forceinline__ uint32_t load_word(Params const& params) const {
        int const lane = threadIdx.x % kWarpSize;
        return lane < count ? params.schedule.words[row * max_listed(params.num_tiles) + begin + lane] : 0;
    }
};

// h, from u without its bias.
template <class Element, class Params>
__device__ __forceinline__ float finish(Params const& params, uint32_t neuron, uint32_t word, float u) {
    u = scale_sum(params, params.up_scale, u, static_cast<int>(neuron));
    u += params.b_up == nullptr ? 0.0f : Element::to_float(params.b_up[neuron]);
    // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here. NaN is kept.
    float const h = Element::to_float(static_cast<uint16_t>(word >> 16)) * (params.relu_on_up && u <= 0.0f ? 0.0f : u);
    return scale_h(params, h, static_cast<int>(neuron));
}

// row_list: of h, of the share's row.
template <class Element, class Params>
__device__ __forceinline__ void compute(Params const& params, Share const& share, uint32_t word,
                                        SparseEntry* row_list) {
    if (share.count <= 0) {
        return;
    }
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const neuron = word & 0xffffu;
    SparseEntry* const list = row_list + share.begin;
    if (params.w_up == nullptr) {
        if (lane < share.count) {
            float const h = Element::to_float(static_cast<uint16_t>(word >> 16));
            list[lane] = {neuron, scale_h(params, h, static_cast<int>(neuron))};
        }
        return;
    }
    float u;
    if constexpr (Params::kHasScales) {
        u = dot_rows_of_bytes<kNeurons>(params.x_rounded + share.row * params.d_model, params.w_up, params.d_model,
                                        params.column_begin, params.column_end, neuron, share.count);
        u *= __ldcg(params.x_scale + share.row) * kUnitOfBytes;
    } else {
        u = dot_rows<Element, kNeurons>(params.x + share.row * params.d_model, params.w_up, params.d_model,
                                        params.column_begin, params.column_end, neuron, share.count);
    }
    int const owned = lane / (kWarpSize / kNeurons);
    uint32_t const owned_neuron = __shfl_sync(0xffffffffu, neuron, owned);
    uint32_t const owned_word = __shfl_sync(0xffffffffu, word, owned);
    if (lane % (kWarpSize / kNeurons) == 0 && owned < share.count) {
        if (params.column_begin != 0) {
            u += list[owned].h;
        }
        if (params.column_end != params.d_model) {
            list[owned] = {owned_neuron, u};
            return;
        }
        list[owned] = {owned_neuron, finish<Element>(params, owned_neuron, owned_word, u)};
    }
}

// By one warp: u of the pairs of a chunk, the i-th of all, from the parts of their sums.
__device__ __forceinline__ float add_parts(Chunks const& chunks, uint32_t i) {
    int const num_slabs = chunks.num_slabs;
    float const* const sums = chunks.sums + static_cast<int64_t>(i) * num_slabs * kChunkPairs + threadIdx.x % kWarpSize;
    constexpr int kAtOnce = 32;
    float u = 0.0f;
    for (int slab = 0; slab < num_slabs; slab += kAtOnce) {
        float values[kAtOnce];
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
            values[s] = __ldcg(sums + min(slab + s, num_slabs - 1) * kChunkPairs);
        }
#pragma unroll
        for (int s = 0; s < kAtOnce; ++s) {
            u += slab + s < num_slabs ? values[s] : 0.0f;
        }
    }
    return u;
}

// By one warp: h of the pairs of a chunk of a block of neurons, the i-th of all chunks.
template <class Element, class Params>
__device__ __forceinline__ void finish_chunk(Params const& params, Chunk const& chunk, int block, uint32_t i) {
    Chunks const& chunks = params.chunks;
    int const lane = threadIdx.x % kWarpSize;
    int const octet = lane / kOctetPairs;
    uint32_t const chunk_entry = chunk.entries[lane % kOctetPairs * kOctets + octet];
    uint32_t const item = chunk.items[lane];
    int64_t const row = chunk.rows[octet * kRowsOfOctet + ((chunk_entry & kSecondRow) != 0 ? 1 : 0)];
    uint32_t const member = chunk_entry & ~kSecondRow;
    bool const is_hot = block == chunks.num_blocks;
    float const u = is_hot ? __ldcg(chunks.hot.u + row * kMostHot + member) : add_parts(chunks, i);
    if (item != kNoPair) {
        uint32_t const neuron = is_hot ? __ldcg(chunks.hot.neurons + member) : block * chunks.block_neurons + member;
        params.rows.list(row)[item & 0xffffu] = {neuron, finish<Element>(params, neuron, item, u)};
    }
}

constexpr uint32_t kTooMany = 0xffffffffu;

// By a CTA: entries of a row of the packed matrix, from the first-th on, up to `most`, in `words`. Gives how many the
// row has, or kTooMany if these are `limit` or more.
template <class Params>
__device__ __forceinline__ uint32_t list_entries(uint32_t* words, Params const& params, int64_t row, uint32_t first,
                                                 uint32_t most, uint32_t limit) {
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    uint32_t before = 0;
    for (int tile_begin = 0; tile_begin < params.num_tiles; tile_begin += kWarpSize) {
        // Every warp adds up the counts of all tiles, one lists the entries of these.
        int64_t const t = min(tile_begin + lane, params.num_tiles - 1);
        uint4 const* const tile =
            reinterpret_cast<uint4 const*>(params.packed + (row * params.num_tiles + t) * params.words_per_tile);
        TileFront const front = {__ldcg(tile), __ldcg(tile + 1)};
        uint32_t const head = tile_begin + lane < params.num_tiles ? front.head() : 0;
        uint32_t const count = count_of(head);
        uint32_t const end = before + sum_up_to(count);
        bool const has_entries = head < static_cast<uint32_t>(params.words_per_tile);
        uint32_t rest = __ballot_sync(0xffffffffu, !has_entries);
        before = __shfl_sync(0xffffffffu, end, kWarpSize - 1);
        if (before >= limit) {
            return kTooMany;
        }
        if (tile_begin / kWarpSize % kWarps == warp) {
            SomePlaces const places = {words, end - count - first, most};
            if (has_entries) {
                front.list(places, count);
                if (count > kFrontEntries) {
                    uint32_t const* const entries = reinterpret_cast<uint32_t const*>(tile) + 1 + kFrontEntries;
                    list_tile(places + kFrontEntries, count - kFrontEntries,
                              [&](uint32_t i) { return __ldcg(entries + i); });
                }
            }
            for (; rest != 0; rest &= rest - 1) {
                int const owner = __ffs(rest) - 1;
                list_spilled_tile(SomePlaces{words, __shfl_sync(0xffffffffu, places.begin, owner), most},
                                  params.spilled, row * params.num_tiles, tile_begin + owner);
            }
        }
    }
    return before;
}

// By a CTA: a row, if it is direct.
template <class Element, class Params>
__device__ __forceinline__ void compute_direct(Params const& params, int64_t row) {
    __shared__ uint32_t words[kMostDirectBelow];
    __shared__ uint32_t counted;
    int const lane = threadIdx.x % kWarpSize;
    if (threadIdx.x / kWarpSize == kWarps - 1) {
        uint32_t const sum = guard::sum_of(params.count);
        if (lane == 0) {
            counted = sum;
        }
    }
    uint32_t const limit = static_cast<uint32_t>(params.schedule.direct_below);
    uint32_t const count = list_entries(words, params, row, 0, limit, limit);
    __syncthreads();
    if (count == kTooMany || counted >= params.count.all_dense_from) {
        return;
    }
    if (counted >= params.count.some_sparse_to) {
        // It may all be in vain, and delay the dense path.
        wait_for_previous_launch();
        if (__ldcg(&params.schedule.header->heavy_count) == params.num_direct) {
            return;
        }
    }
    for (int begin = 0; begin < static_cast<int>(count); begin += static_cast<int>(kUnitNonzeros)) {
        Share const share(row, begin, min(static_cast<int>(count) - begin, static_cast<int>(kUnitNonzeros)));
        compute<Element>(params, share, lane < share.count ? words[share.begin + lane] : 0,
                         list_in_words(params.schedule, params.num_tiles, row));
    }
}

// By a CTA: a unit, where rows may be direct.
template <class Element, class Params>
__device__ __forceinline__ void compute_unit(Params const& params, Unit unit) {
    __shared__ uint32_t words[kUnitNonzeros];
    int const lane = threadIdx.x % kWarpSize;
    Share const share(unit);
    bool const is_listed = (unit.range & Unit::kIsListed) != 0;  // or kNoRange
    if (!is_listed) {
        __syncthreads();  // those of the unit before have been read
        list_entries(words, params, unit.row, static_cast<uint32_t>(unit.begin()), kUnitNonzeros, kTooMany);
        __syncthreads();
    }
    uint32_t const word = is_listed            ? share.load_word(params)
                          : lane < share.count ? words[share.begin - unit.begin() + lane]
                                               : 0;
    compute<Element>(
        params, share, word,
        is_listed ? params.rows.list(unit.row) : list_in_words(params.schedule, params.num_tiles, unit.row));
}

// By the CTAs behind those that have a row: gathers data of rows for the dense path.
template <class Params>
__device__ __forceinline__ void gather_rows(Params const& params) {
    uint32_t const dense_rows = params.schedule.header->heavy_count;
    if (dense_rows == params.tokens) {
        return;  // all: they stay where they are
    }
    uint32_t const warps = (gridDim.x - params.num_direct) * kWarps;
    for (uint32_t i = (blockIdx.x - params.num_direct) * kWarps + threadIdx.x / kWarpSize; i < dense_rows; i += warps) {
        gather::gather_row(params.gather, false, params.schedule.row_order[i].row, i);
    }
}

// Where rows may be direct, the first CTAs have a row each. They do not wait for the schedule; the others, which have
// the units of rows with more non-zeros, do. On compute capability 9.0 alone.
template <class Element, class Stored>
__global__ void __launch_bounds__(kThreads, kMinBlocksDirect) up_direct_kernel(ParamsOf<Stored> const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (blockIdx.x < params.num_direct) {
        if (params.column_begin != 0) {
            wait_for_previous_launch();  // for the sums over the columns before
        }
        allow_dependent_launch();
        compute_direct<Element>(params, blockIdx.x);
        return;
    }
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, as the next kernels begin with the schedule
    if (params.column_begin == 0) {
        gather_rows(params);
    }
    uint32_t const num_units = params.schedule.header->unit_count;
    for (uint32_t i = blockIdx.x - params.num_direct; i < num_units; i += gridDim.x - params.num_direct) {
        compute_unit<Element>(params, params.schedule.units[i]);
    }
#endif
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kThreads, kMinBlocks) up_kernel(ParamsOf<Stored> const params) {
    if (ends_early(is_early(params.schedule))) {
        return;
    }
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, as the next kernels begin with the schedule
    uint32_t const num_units = params.schedule.header->unit_count;
    for (uint32_t i = blockIdx.x; i < num_units; i += gridDim.x) {
        Share const share(params.schedule.units[i]);
        compute<Element>(params, share, share.load_word(params), params.rows.list(share.row));
    }
}

// By a CTA: units of rows that are in no chunk, of all units.
template <class Element, class Params>
__device__ __forceinline__ void compute_left(Params const& params) {
    __shared__ uint32_t left_lanes;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const num_units = params.schedule.header->unit_count;
    // The heaviest rows' units come first: neighbours are for different CTAs.
    for (uint32_t begin = blockIdx.x; begin < num_units; begin += gridDim.x * kWarpSize) {
        __syncthreads();
        if (threadIdx.x < kWarpSize) {
            uint32_t const i = begin + lane * gridDim.x;
            Unit const unit = i < num_units ? params.schedule.units[i] : Unit{0, kNoRange};
            bool const is_left =
                unit.range != kNoRange && params.rows.list(unit.row)[unit.begin()].neuron == chunk::kIsLeft;
            uint32_t const lanes = __ballot_sync(0xffffffffu, is_left);
            if (lane == 0) {
                left_lanes = lanes;
            }
        }
        __syncthreads();
        for (uint32_t rest = left_lanes; rest != 0; rest &= rest - 1) {
            Share const share(params.schedule.units[begin + (__ffs(rest) - 1) * gridDim.x]);
            compute<Element>(params, share, share.load_word(params), params.rows.list(share.row));
        }
    }
}

// up_kernel where there are chunks.
template <class Element, class Stored>
__global__ void __launch_bounds__(kThreads, kMinBlocks) up_with_chunks_kernel(ParamsOf<Stored> const params) {
    int const lane = threadIdx.x % kWarpSize;
    Chunks const& chunks = params.chunks;
    if (ends_early(is_early(params.schedule))) {
        return;
    }
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: as above
    gather_rows(params);
    if (params.schedule.header->left_count != 0) {
        compute_left<Element>(params);
    }
    // A lane has the end of a block's chunks among all.
    uint32_t const count = lane <= chunks.num_blocks ? chunks.counts[lane] : 0;
    uint32_t const end = sum_up_to<kMostBlocks>(count);
    uint32_t const all = __shfl_sync(0xffffffffu, end, kMostBlocks - 1);
    for (uint32_t i = blockIdx.x * kWarps + threadIdx.x / kWarpSize; i < all; i += gridDim.x * kWarps) {
        int const block = __popc(__ballot_sync(0xffffffffu, lane <= chunks.num_blocks && end <= i));
        uint32_t const begin = __shfl_sync(0xffffffffu, end - count, block);
        finish_chunk<Element>(params, chunks.chunks[static_cast<int64_t>(block) * chunks.block_capacity + i - begin],
                              block, i);
    }
}

}  // namespace twell::sparse_up

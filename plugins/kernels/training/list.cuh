// Lists of pairs, from what the gate has packed: count, add up, list.
#pragma once

#include "device/dependent_launch.cuh"
#include "format/list.cuh"
#include "format/pack.cuh"
#include "training/pairs.cuh"

namespace twell::training {

// Of a chunk of rows, those from `first_row` on.
struct ListParams {
    uint32_t const* packed;   // [rows, num_tiles * words_per_tile]
    uint16_t const* spilled;  // [rows, num_tiles * TWELL_TILE]
    int64_t* row_begin;       // [tokens + 2], see Pairs
    uint32_t* words;          // [capacity]
    uint32_t* counts;         // for how many rows each neuron is active: neuron j's at neurons[j], or j
    int32_t const* neurons;
    int64_t capacity;
    int64_t tokens;  // of all chunks
    int64_t first_row;
    int rows;
    int num_tiles;
    int words_per_tile;
};

// Each row's number of pairs goes where its end will be.
static __global__ __launch_bounds__(kThreads) void count_pairs_kernel(__grid_constant__ ListParams const params) {
    wait_for_previous_launch();
    int const row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    if (row >= params.rows) {
        return;
    }
    uint32_t count = 0;
    uint32_t const* const heads = params.packed + static_cast<int64_t>(row) * params.num_tiles * params.words_per_tile;
    for (int tile = lane; tile < params.num_tiles; tile += kWarpSize) {
        count += count_of(heads[tile * params.words_per_tile]);
    }
    count = __reduce_add_sync(0xffffffffu, count);
    if (lane == 0) {
        params.row_begin[params.first_row + row + 1] = count;
    }
}

// By one CTA: where each row of the chunk ends, and how many rows are listed. Counts are in shared memory, so that
// threads read neighbours one after the other.
constexpr int kMostChunkRows = 16384;
constexpr int kBytesScan = kMostChunkRows * static_cast<int>(sizeof(uint32_t));

static __global__ __launch_bounds__(kScanThreads) void add_up_pairs_kernel(__grid_constant__ ListParams const params) {
    wait_for_previous_launch();
    extern __shared__ uint32_t counts[];
    __shared__ uint32_t sums[kScanThreads];
    __shared__ int listed;
    int const thread = threadIdx.x;
    int64_t* const ends = params.row_begin + params.first_row + 1;
    // Of what another thread writes nothing is read: the chunk before wrote where this one starts.
    int64_t const start = params.first_row == 0 ? 0 : ends[-1];
#pragma unroll 4
    for (int i = thread; i < params.rows; i += kScanThreads) {
        counts[i] = static_cast<uint32_t>(ends[i]);
    }
    if (thread == 0) {
        listed = 0;
    }
    __syncthreads();
    int const each = (params.rows + kScanThreads - 1) / kScanThreads;
    int const begin = min(thread * each, params.rows);
    int const end = min(begin + each, params.rows);
    uint32_t own = 0;
    for (int i = begin; i < end; ++i) {
        own += counts[i];
    }
    uint32_t place = sum_before(sums, own);
    int own_listed = 0;
    for (int i = begin; i < end; ++i) {
        place += counts[i];
        counts[i] = place;
        own_listed += start + place <= params.capacity ? 1 : 0;
    }
    atomicAdd(&listed, own_listed);
    __syncthreads();
    for (int i = thread; i < params.rows; i += kScanThreads) {
        ends[i] = start + counts[i];
    }
    if (thread == 0) {
        int64_t& all = params.row_begin[params.tokens + 1];
        all = (params.first_row == 0 ? 0 : all) + listed;
        if (params.first_row == 0) {
            params.row_begin[0] = 0;
        }
    }
}

// Where a row's words go, if there is place, and where its neurons are counted.
struct CountedPlaces {
    uint32_t* words;  // null: there is none
    uint32_t* counts;
    int32_t const* neurons;

    __device__ __forceinline__ void store(uint32_t i, uint32_t word) const {
        if (words != nullptr) {
            words[i] = word;
        }
        uint32_t const neuron = neuron_of(word);
        // Of integers: the order does not matter.
        atomicAdd(counts + (neurons == nullptr ? neuron : neurons[neuron]), 1u);
    }
    __device__ __forceinline__ CountedPlaces operator+(uint32_t offset) const {
        return {words == nullptr ? nullptr : words + offset, counts, neurons};
    }
};

static __global__ __launch_bounds__(kThreads) void list_pairs_kernel(__grid_constant__ ListParams const params) {
    wait_for_previous_launch();
    int const row = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    if (row >= params.rows) {
        return;
    }
    int64_t const row_begin = params.row_begin[params.first_row + row];
    bool const is_listed = params.row_begin[params.first_row + row + 1] <= params.capacity;
    CountedPlaces places = {is_listed ? params.words + row_begin : nullptr, params.counts, params.neurons};
    int64_t const first_tile = static_cast<int64_t>(row) * params.num_tiles;
    uint32_t const num_slots = static_cast<uint32_t>(params.words_per_tile) - 1;
    for (int tiles = 0; tiles < params.num_tiles; tiles += kWarpSize) {
        int const tile = tiles + lane;
        uint32_t const* const words = params.packed + (first_tile + tile) * params.words_per_tile;
        uint32_t const head = tile < params.num_tiles ? words[0] : 0;
        uint32_t const count = count_of(head);
        uint32_t const end = sum_up_to(count);
        bool const has_entries = count <= num_slots && (head & kHasNoEntries) == 0;
        if (has_entries) {
            list_tile(places + (end - count), count, [&](uint32_t i) { return words[1 + i]; });
        }
        for (uint32_t left = __ballot_sync(0xffffffffu, !has_entries); left != 0; left &= left - 1) {
            int const owner = __ffs(left) - 1;
            list_spilled_tile(places + __shfl_sync(0xffffffffu, end - count, owner), params.spilled, first_tile,
                              tiles + owner);
        }
        places = places + __shfl_sync(0xffffffffu, end, kWarpSize - 1);
    }
}

}  // namespace twell::training

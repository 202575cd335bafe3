// Lists of features out of packed and spilled tiles: of each row the active neurons in ascending order, with g.
//
// A CTA has a group: up to kTilesOfGroup tiles of a row, one a thread. Its entries come after those of the groups
// before, so a row's list is in order without atomics. Where lists are to have no gaps, one launch counts, one adds up
// the counts, and one lists. Entries have 16 bits of their column; the number of the tile says the rest.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"
#include "format/pack.cuh"

namespace twell::features {

constexpr int kTilesOfGroup = 256;

struct ListParams {
    PackedGate gate;  // spilled may be null: then entries may be lost
    int num_groups;   // of a row
    int first_neuron;
    uint32_t* counts;  // [tokens, num_groups]: becomes how many entries each group has; null: not wanted
    // [tokens, num_groups]: how many entries all groups before have, behind which a group's go. Null: they go to the
    // group's number times `stride`.
    uint32_t const* before;
    int64_t stride;
    int32_t* indices;  // null: not wanted
    uint16_t* values;
    int64_t capacity;  // places for entries; those behind are not written
    // With `before`: [tokens + 1], where rows begin; the first is read, the others become known.
    int64_t* offsets;
    int64_t* missing;  // and how many entries have not been written, to which a launch adds
    bool is_first;     // of a call, which makes the first offset and `missing` 0
};

struct ScanParams {
    uint32_t* counts;
    int64_t num_counts;
};

// Entries of a tile that has spilled, by one warp.
__device__ __forceinline__ void list_spilled(ListParams const& params, int64_t place, int64_t begin, int column) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint4 const values = load_written_vector(params.gate.spilled + place * TWELL_TILE + lane * kVector);
    uint32_t mask = find_nonzeros(values);
    uint32_t const own = __popc(mask);
    int64_t to = begin + sum_up_to(own) - own;
    uint32_t const pairs[kVector / 2] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if ((mask >> i & 1) != 0) {
            if (to < params.capacity) {
                params.indices[to] = column + lane * kVector + i;
                params.values[to] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
            }
            ++to;
        }
    }
}

// By all warps: the sum of all threads' values, which all get. `parts` is shared, a word a warp.
__device__ __forceinline__ uint32_t sum_of_block(uint32_t value, uint32_t* parts) {
    uint32_t const up_to = sum_up_to(value);
    if (threadIdx.x % kWarpSize == kWarpSize - 1) {
        parts[threadIdx.x / kWarpSize] = up_to;
    }
    __syncthreads();
    uint32_t sum = 0;
    for (unsigned w = 0; w < blockDim.x / kWarpSize; ++w) {
        sum += parts[w];
    }
    return sum;
}

constexpr int kScanThreads = 1024;
constexpr int kCountsOfThread = 4;  // at a time

// counts [num_counts] becomes how much is counted before each, by one CTA: work that grows with `num_counts` alone.
__global__ void __launch_bounds__(kScanThreads) scan_kernel(ScanParams const params) {
    __shared__ uint32_t totals[kScanThreads / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    uint32_t before = 0;  // this round
    for (int64_t first = 0; first < params.num_counts; first += kScanThreads * kCountsOfThread) {
        int64_t const own = first + static_cast<int64_t>(threadIdx.x) * kCountsOfThread;
        uint32_t counts[kCountsOfThread];
        uint32_t count = 0;
#pragma unroll
        for (int i = 0; i < kCountsOfThread; ++i) {
            counts[i] = own + i < params.num_counts ? params.counts[own + i] : 0;
            count += counts[i];
        }
        uint32_t const total = sum_of_block(count, totals);
        uint32_t sum = before + sum_up_to(count) - count;
        for (int w = 0; w < warp; ++w) {
            sum += totals[w];
        }
#pragma unroll
        for (int i = 0; i < kCountsOfThread; ++i) {
            if (own + i < params.num_counts) {
                params.counts[own + i] = sum;
            }
            sum += counts[i];
        }
        before += total;
        __syncthreads();  // the next round writes `totals`
    }
}

// Four CTAs a multiprocessor: with eight, registers would be spilled on 8.0.
__global__ void __launch_bounds__(kTilesOfGroup, 4) list_kernel(ListParams const params) {
    __shared__ uint32_t totals[kTilesOfGroup / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    PackedGate const& gate = params.gate;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int64_t const row = blockIdx.x / static_cast<unsigned>(params.num_groups);
    int const group = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.num_groups));
    int const tile_idx = group * kTilesOfGroup + static_cast<int>(threadIdx.x);
    bool const exists = tile_idx < gate.num_tiles;
    int64_t const place = exists ? row * gate.num_tiles + tile_idx : 0;
    uint32_t const* const words = gate.packed + place * gate.words_per_tile;
    uint32_t const head = exists ? words[0] : 0;
    uint32_t const count = count_of(head);
    bool const has_entries = head < static_cast<uint32_t>(gate.words_per_tile);

    uint32_t const total = sum_of_block(count, totals);
    if (params.counts != nullptr && threadIdx.x == 0) {
        params.counts[blockIdx.x] = total;
    }
    if (params.is_first && blockIdx.x == 0 && threadIdx.x == 0) {
        params.offsets[0] = 0;
        *params.missing = 0;
    }
    if (params.indices == nullptr) {
        return;
    }
    int64_t begin = blockIdx.x * params.stride;
    if (params.before != nullptr) {
        begin = params.offsets[0] + params.before[blockIdx.x];
        if (threadIdx.x == 0 && group == params.num_groups - 1) {
            params.offsets[row + 1] = begin + total;
        }
    }
    begin += sum_up_to(count) - count;
    for (int w = 0; w < warp; ++w) {
        begin += totals[w];
    }
    bool const is_lost = !has_entries && gate.spilled == nullptr;
    int64_t const kept = is_lost ? 0 : min(max(params.capacity - begin, int64_t{0}), static_cast<int64_t>(count));
    if (kept < count) {
        atomicAdd(reinterpret_cast<unsigned long long*>(params.missing), static_cast<unsigned long long>(count - kept));
    }
    int const column = tile_idx * TWELL_TILE + params.first_neuron;
    if (has_entries) {
        for (uint32_t i = 0; i < kept; ++i) {
            uint32_t const word = words[1 + i];
            params.indices[begin + i] = column + static_cast<int>(word % TWELL_TILE);
            params.values[begin + i] = static_cast<uint16_t>(word >> 16);
        }
    }
    for (uint32_t rest = __ballot_sync(0xffffffffu, !has_entries && !is_lost); rest != 0; rest &= rest - 1) {
        int const owner = __ffs(rest) - 1;
        list_spilled(params, __shfl_sync(0xffffffffu, place, owner), __shfl_sync(0xffffffffu, begin, owner),
                     __shfl_sync(0xffffffffu, column, owner));
    }
}

}  // namespace twell::features

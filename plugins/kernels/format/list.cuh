// Non-zeros of a tile one after the other, from the packed or the spilled matrix.
#pragma once

#include "format/pack.cuh"

namespace twell {

// Where a list's entries go: its i-th.
struct AllPlaces {
    uint32_t* words;

    __device__ __forceinline__ void store(uint32_t i, uint32_t word) const { words[i] = word; }
    __device__ __forceinline__ AllPlaces operator+(uint32_t offset) const { return {words + offset}; }
};

// The same to the place begin + i, if there is such a place.
struct SomePlaces {
    uint32_t* words;
    uint32_t begin;  // may be negative: then it wraps around
    uint32_t end;

    __device__ __forceinline__ void store(uint32_t i, uint32_t word) const {
        if (begin + i < end) {
            words[begin + i] = word;
        }
    }
    __device__ __forceinline__ SomePlaces operator+(uint32_t offset) const { return {words, begin + offset, end}; }
};

// The entries of a tile that lie in one sector of memory with the count.
constexpr uint32_t kFrontEntries = 7;

// That sector.
struct TileFront {
    uint4 first;
    uint4 second;

    __device__ __forceinline__ uint32_t head() const { return first.x; }

    // Stores up to `count` entries.
    template <class Places>
    __device__ __forceinline__ void list(Places places, uint32_t count) const {
        uint32_t const entries[kFrontEntries] = {first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (uint32_t i = 0; i < kFrontEntries; ++i) {
            if (i < count) {
                places.store(i, entries[i]);
            }
        }
    }
};

// Stores a tile's entries; load(i) gives the i-th.
template <class Places, class Load>
__device__ __forceinline__ void list_tile(Places places, uint32_t count, Load load) {
    constexpr uint32_t kAtOnce = 4;
    for (uint32_t begin = 0; begin < count; begin += kAtOnce) {
        uint32_t more[kAtOnce];
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            more[i] = load(min(begin + i, count - 1));
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (begin + i < count) {
                places.store(begin + i, more[i]);
            }
        }
    }
}

// The same, by one warp, from a tile that has been spilled.
template <class Places>
__device__ __forceinline__ void list_spilled_tile(Places places, uint16_t const* spilled, int64_t first_tile,
                                                  int tile_idx) {
    int const lane = threadIdx.x % kWarpSize;
    uint4 const vector = __ldcg(reinterpret_cast<uint4 const*>(spilled + (first_tile + tile_idx) * TWELL_TILE) + lane);
    uint32_t const pairs[kVector / 2] = {vector.x, vector.y, vector.z, vector.w};
    uint32_t const mask = find_nonzeros(vector);
    uint32_t const count = __popc(mask);
    uint32_t slot = sum_up_to(count) - count;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if ((mask >> i & 1) != 0) {
            uint32_t const bits = i % 2 != 0 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16;
            places.store(slot, static_cast<uint32_t>(tile_idx * TWELL_TILE + lane * kVector + i) | bits);
            ++slot;
        }
    }
}

}  // namespace twell

// Sums that several CTAs compute a part of, where there are too few tiles for all multiprocessors (sm_90a). Parts are
// added in pairs, then the sums of pairs: the first one leaves what it has in memory, the second adds that to its own.
// As a + b = b + a, it does not matter which one is first: results are repeatable.
#pragma once

#include <stdint.h>

#include "device/load.cuh"
#include "device/vector.cuh"

namespace twell {

// Shares are the warps' of a product. The fewest sums of a warp:
constexpr int kFewestPartSums = 512;

// Two parts, or sums of two or more, meet at a place: there are parts - 1 of them for each share.
struct Parts {
    float4* sums;      // [places, sums of a lane / 4, kWarpSize]
    uint32_t* states;  // [places], 0 at first; no more than sums / kFewestPartSums
};

// Adds the other sums that come to a place to a warp's; or, if they are not there yet, leaves these for them. Returns
// whether they were added.
template <int kSums>
__device__ __forceinline__ bool meet(Parts const& parts, int place, float (&sums)[kSums]) {
    static_assert(kSums % 4 == 0 && kSums * kWarpSize >= kFewestPartSums, "what there is memory for");
    constexpr uint32_t kCame = 1;
    constexpr uint32_t kLeft = 2;  // sums in memory; after kCame, by both
    constexpr int kAtOnce = 4;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t* const state = parts.states + place;
    float4* const left = parts.sums + static_cast<int64_t>(place) * (kSums / 4 * kWarpSize) + lane;
    uint32_t before = 0;
    if (lane == 0) {
        before = atomicAdd(state, kCame);
    }
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before == 0) {
#pragma unroll
        for (int i = 0; i < kSums / 4; ++i) {
            __stcg(left + i * kWarpSize, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
        }
        __threadfence();
        __syncwarp();
        if (lane == 0) {
            atomicAdd(state, kLeft);
        }
        return false;
    }
    // The other warp is about to leave its sums, and waits for nothing.
    if (lane == 0) {
        while (load_acquire(state) < 2 * kCame + kLeft) {
        }
    }
    __syncwarp();
#pragma unroll
    for (int begin = 0; begin < kSums / 4; begin += kAtOnce) {
        float4 others[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            others[i] = __ldcg(left + min(begin + i, kSums / 4 - 1) * kWarpSize);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (begin + i < kSums / 4) {
                sums[4 * (begin + i)] += others[i].x;
                sums[4 * (begin + i) + 1] += others[i].y;
                sums[4 * (begin + i) + 2] += others[i].z;
                sums[4 * (begin + i) + 3] += others[i].w;
            }
        }
    }
    return true;
}

// Adds the other parts to a warp's sums of a share, as far as they are there; returns whether the sums are whole.
template <int kSums>
__device__ __forceinline__ bool add_parts(Parts const& parts, int num_parts, int part, int share,
                                          float (&sums)[kSums]) {
    int first_place = share * (num_parts - 1);
#pragma unroll 1
    for (int num_places = num_parts / 2; num_places != 0; num_places /= 2) {
        part /= 2;
        if (!meet(parts, first_place + part, sums)) {
            return false;
        }
        first_place += num_places;
    }
    return true;
}

}  // namespace twell

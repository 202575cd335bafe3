// Tokens sorted to experts. A pair is a token and an expert that it uses; a slot, a place in the order of experts. A
// group is neighbouring slots of one expert.
#pragma once

#include <stdint.h>

#include "device/dependent_launch.cuh"
#include "device/vector.cuh"

namespace twell::experts {

constexpr uint32_t kAllLanes = 0xffffffffu;

struct Ids {
    void const* values;  // [pairs] of 4 or 8 bytes
    int bytes;
    int num_experts;
};

// The expert of a pair, or -1: it takes no part.
__device__ __forceinline__ int expert_of(Ids const& ids, int pair) {
    int64_t const id = ids.bytes == 8 ? __ldcg(static_cast<long long const*>(ids.values) + pair)
                                      : __ldcg(static_cast<int const*>(ids.values) + pair);
    return id >= 0 && id < ids.num_experts ? static_cast<int>(id) : -1;
}

struct Group {
    int expert;
    int begin;  // its first slot
    int count;  // of slots; 0: the group does not exist
    int reserved;
};

struct Groups {
    Ids ids;
    Group* groups;  // [most_groups]; null: pair, slot and group are the same, as of one token
    int* order;     // [pairs]: the pair of a slot
    int* counts;    // [experts]
    int num_pairs;
    int most_groups;
    int width;  // slots of a group
};

__device__ __forceinline__ Group group_of(Groups const& all, int number) {
    if (all.groups == nullptr) {
        int const expert = expert_of(all.ids, number);
        return {expert, number, expert >= 0 ? 1 : 0, 0};
    }
    int4 const group = __ldcg(reinterpret_cast<int4 const*>(all.groups + number));
    return {group.x, group.y, group.z, 0};
}

__device__ __forceinline__ int pair_of(Groups const& all, int slot) {
    return all.groups == nullptr ? slot : __ldcg(all.order + slot);
}

// By all threads of a CTA: the sum of the values of the threads before this one, and of all.
template <int kThreads>
__device__ __forceinline__ uint2 sum_before(uint32_t value, uint32_t* of_warps) {
    static_assert(kThreads % kWarpSize == 0 && kThreads <= kWarpSize * kWarpSize, "one warp sums the warps' sums");
    int const warp = threadIdx.x / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const up_to = sum_up_to(value);
    __syncthreads();  // of_warps may still be read from the last time
    if (lane == kWarpSize - 1) {
        of_warps[warp] = up_to;
    }
    __syncthreads();
    uint32_t before = 0;
    uint32_t all = 0;
#pragma unroll 8  // all 32 at once would spill registers on 12.0
    for (int i = 0; i < kThreads / kWarpSize; ++i) {
        before += i < warp ? of_warps[i] : 0;
        all += of_warps[i];
    }
    return make_uint2(before + up_to - value, all);
}

}  // namespace twell::experts

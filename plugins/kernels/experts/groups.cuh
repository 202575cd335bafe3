// Tokens sorted to experts. A pair is a token and one of its experts; a slot, a place in the order of experts. A group
// is neighbouring slots of one expert.
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
    int count;  // of slots; 0: there is no such group
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
    for (int i = 0; i < kThreads / kWarpSize; ++i) {
        before += i < warp ? of_warps[i] : 0;
        all += of_warps[i];
    }
    return make_uint2(before + up_to - value, all);
}

__device__ __forceinline__ void write_groups(Groups const& all, int expert, int first_group, int begin, int count) {
    for (int i = 0; i * all.width < count; ++i) {
        all.groups[first_group + i] = {expert, begin + i * all.width, min(all.width, count - i * all.width), 0};
    }
}

// Bit i: the i-th of eight experts of 16 bits is this one.
__device__ __forceinline__ uint32_t find_expert(uint4 const& experts, int expert) {
    uint32_t const twice = static_cast<uint32_t>(expert) * 0x10001u;
    uint32_t const words[4] = {experts.x, experts.y, experts.z, experts.w};
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t const equal = __vcmpeq2(words[i], twice);
        found |= ((equal & 1u) | (equal >> 15 & 2u)) << (2 * i);
    }
    return found;
}

constexpr int kSortThreads = 1024;
constexpr int kMostSortedAtOnce = 4096;  // counts of pairs and groups share a word, and ids lie in shared memory
constexpr int kIdsOfVector = 8;

// Few pairs, by one CTA, a thread an expert.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(Groups const all) {
    __shared__ __align__(16) uint16_t experts[kMostSortedAtOnce];
    __shared__ uint32_t of_warps[kSortThreads / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const thread = threadIdx.x;
    int const rounded = (all.num_pairs + kIdsOfVector - 1) / kIdsOfVector * kIdsOfVector;
    for (int i = thread; i < rounded; i += kSortThreads) {
        experts[i] = static_cast<uint16_t>(i < all.num_pairs ? expert_of(all.ids, i) : -1);
    }
    __syncthreads();
    auto const* const vectors = reinterpret_cast<uint4 const*>(experts);
    uint32_t count = 0;
    if (thread < all.ids.num_experts) {
#pragma unroll 4
        for (int i = 0; i < rounded / kIdsOfVector; ++i) {
            count += __popc(find_expert(vectors[i], thread));
        }
    }
    uint32_t const num_groups = (count + all.width - 1) / all.width;
    uint2 const before = sum_before<kSortThreads>(count << 16 | num_groups, of_warps);
    int const begin = static_cast<int>(before.x >> 16);
    if (count != 0) {
        write_groups(all, thread, static_cast<int>(before.x & 0xffffu), begin, static_cast<int>(count));
        int slot = begin;
#pragma unroll 4
        for (int i = 0; i < rounded / kIdsOfVector; ++i) {
            for (uint32_t found = find_expert(vectors[i], thread); found != 0; found &= found - 1) {
                all.order[slot++] = i * kIdsOfVector + __ffs(static_cast<int>(found)) - 1;
            }
        }
    }
    for (int i = static_cast<int>(before.y & 0xffffu) + thread; i < all.most_groups; i += kSortThreads) {
        all.groups[i] = {0, 0, 0, 0};
    }
}

constexpr int kExpertThreads = 256;

// Many pairs: a CTA an expert counts its pairs,
__global__ void __launch_bounds__(kExpertThreads) count_kernel(Groups const all) {
    __shared__ uint32_t of_warps[kExpertThreads / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    uint32_t count = 0;
    for (int i = threadIdx.x; i < all.num_pairs; i += kExpertThreads) {
        count += expert_of(all.ids, i) == static_cast<int>(blockIdx.x) ? 1 : 0;
    }
    uint32_t const sum = sum_before<kExpertThreads>(count, of_warps).y;
    if (threadIdx.x == 0) {
        all.counts[blockIdx.x] = static_cast<int>(sum);
    }
}

// and then puts them in order.
__global__ void __launch_bounds__(kExpertThreads) place_kernel(Groups const all) {
    __shared__ uint32_t of_warps[kExpertThreads / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const expert = static_cast<int>(blockIdx.x);
    uint32_t slots_before = 0;
    uint32_t groups_before = 0;
    uint32_t num_groups = 0;
    for (int i = threadIdx.x; i < all.ids.num_experts; i += kExpertThreads) {
        uint32_t const count = static_cast<uint32_t>(__ldcg(all.counts + i));
        uint32_t const groups = (count + all.width - 1) / all.width;
        slots_before += i < expert ? count : 0;
        groups_before += i < expert ? groups : 0;
        num_groups += groups;
    }
    int const begin = static_cast<int>(sum_before<kExpertThreads>(slots_before, of_warps).y);
    int const first_group = static_cast<int>(sum_before<kExpertThreads>(groups_before, of_warps).y);
    int const groups_of_all = static_cast<int>(sum_before<kExpertThreads>(num_groups, of_warps).y);
    int slot = begin;
    for (int first = 0; first < all.num_pairs; first += kExpertThreads) {
        int const pair = first + static_cast<int>(threadIdx.x);
        bool const is_mine = pair < all.num_pairs && expert_of(all.ids, pair) == expert;
        uint2 const before = sum_before<kExpertThreads>(is_mine ? 1 : 0, of_warps);
        if (is_mine) {
            all.order[slot + static_cast<int>(before.x)] = pair;
        }
        slot += static_cast<int>(before.y);
    }
    if (threadIdx.x == 0) {
        write_groups(all, expert, first_group, begin, slot - begin);
    }
    for (int i = groups_of_all + expert * kExpertThreads + static_cast<int>(threadIdx.x); i < all.most_groups;
         i += all.ids.num_experts * kExpertThreads) {
        all.groups[i] = {0, 0, 0, 0};
    }
}

}  // namespace twell::experts

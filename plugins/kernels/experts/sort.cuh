// The kernels that sort tokens to experts: in one launch if there are few, else in two.
#pragma once

#include "experts/groups.cuh"

namespace twell::experts {

__device__ __forceinline__ void write_groups(Groups const& all, int expert, int first_group, int begin, int count) {
    for (int i = 0; i * all.width < count; ++i) {
        all.groups[first_group + i] = {expert, begin + i * all.width, min(all.width, count - i * all.width), 0};
    }
}

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / kWarpSize;
constexpr int kMostSortedAtOnce = 4096;
constexpr int kRounds = kMostSortedAtOnce / kSortThreads;

// Shared memory of sort_kernel: pairs of an expert before each warp's.
inline int sort_bytes(int num_experts) { return kSortWarps * num_experts * static_cast<int>(sizeof(uint16_t)); }

// Few pairs, by one CTA: warps count pairs of one expert among their 32, and a thread of each expert adds up.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(Groups const all) {
    extern __shared__ __align__(16) uint16_t counts[];  // [kSortWarps, experts], then the sums of those before
    __shared__ uint32_t of_warps[kSortWarps];
    __shared__ int begins[kSortThreads];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const thread = static_cast<int>(threadIdx.x);
    int const lane = thread % kWarpSize;
    int const num_experts = all.ids.num_experts;
    uint16_t* const own = counts + thread / kWarpSize * num_experts;
    int experts[kRounds];
    int places[kRounds];  // of a pair, among the expert's pairs
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        int const pair = round * kSortThreads + thread;
        experts[round] = pair < all.num_pairs ? expert_of(all.ids, pair) : -1;
    }
    uint32_t count = 0;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (round * kSortThreads >= all.num_pairs) {
            break;
        }
        int const num_warps = min(kSortWarps, (all.num_pairs - round * kSortThreads + kWarpSize - 1) / kWarpSize);
        for (int i = thread; i < num_warps * num_experts; i += kSortThreads) {
            counts[i] = 0;
        }
        __syncthreads();
        uint32_t const same = __match_any_sync(kAllLanes, experts[round]);
        places[round] = __popc(same & ((1u << lane) - 1));
        if (experts[round] >= 0 && places[round] == 0) {
            own[experts[round]] = static_cast<uint16_t>(__popc(same));
        }
        __syncthreads();
        if (thread < num_experts) {
#pragma unroll 8
            for (int warp = 0; warp < num_warps; ++warp) {
                uint32_t const here = counts[warp * num_experts + thread];
                counts[warp * num_experts + thread] = static_cast<uint16_t>(count);
                count += here;
            }
        }
        __syncthreads();
        if (experts[round] >= 0) {
            places[round] += own[experts[round]];
        }
        __syncthreads();
    }
    uint32_t const num_groups = (count + all.width - 1) / all.width;
    uint2 const before = sum_before<kSortThreads>(count << 16 | num_groups, of_warps);
    int const begin = static_cast<int>(before.x >> 16);
    begins[thread] = begin;
    write_groups(all, thread, static_cast<int>(before.x & 0xffffu), begin, static_cast<int>(count));
    for (int i = static_cast<int>(before.y & 0xffffu) + thread; i < all.most_groups; i += kSortThreads) {
        all.groups[i] = {0, 0, 0, 0};
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        int const pair = round * kSortThreads + thread;
        if (pair < all.num_pairs && experts[round] >= 0) {
            all.order[begins[experts[round]] + places[round]] = pair;
        }
    }
}

constexpr int kExpertThreads = 1024;

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

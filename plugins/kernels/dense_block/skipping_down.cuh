// The down projection of a dense block on Hopper (sm_90a) if few of its neurons are active: that of down_few.cuh. Both
// it and the dense one (dense_sm90.cuh) read what the kernel of the hidden activations has counted, and one of them
// leaves.
#pragma once

#include "dense_block/active.h"
#include "device/dependent_launch.cuh"
#include "device/sum_again.cuh"
#include "device/vector.cuh"
#include "few_tokens/down_few.cuh"

namespace twell::skipping_down {

// Up to where it takes less time than the dense one.
struct Decision {
    Active active;
    uint32_t most_pairs;   // active, of a row and a neuron
    uint32_t most_of_row;  // by the bound that is counted
};

// Whether it is to be taken, by each warp for itself, once the hidden activations are there. NOTE: the counts do not
// come by way of L1, which may hold what was there when this kernel started.
__device__ __forceinline__ bool decide(Decision const& decision) {
    int const lane = threadIdx.x % kWarpSize;
    Active const& active = decision.active;
    uint32_t pairs = 0;
    uint32_t most = 0;
    for (int group = 0; group < active.num_groups; ++group) {
        uint32_t most_of_group = 0;
        uint32_t const* const counted = active.counted + group * active.counts_of_group;
#pragma unroll 4
        for (int i = lane; i < active.counts_of_group; i += kWarpSize) {
            uint32_t const count = __ldcg(counted + i);
            pairs += count / kMostCountedOfRow;
            most_of_group += count % kMostCountedOfRow;
        }
        most = max(most, __reduce_add_sync(0xffffffffu, most_of_group));
    }
    return __reduce_add_sync(0xffffffffu, pairs) <= decision.most_pairs && most <= decision.most_of_row;
}

struct Params {
    Decision decision;
    down_few::Params down;
};

constexpr int kThreads = 256;
constexpr int kCtasPerMultiprocessor = 4;  // at once

// A CTA for each row and slab of columns.
template <class Element, class Cfg>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) down_kernel(Params const params) {
    __shared__ down_few::Shared<Cfg> shared;
    __shared__ down_few::WordTotals totals;
    allow_dependent_launch();
    bool const is_first = blockIdx.x == 0 && blockIdx.y == 0;
    // The launch before, the dense one, lets this one start when the hidden activations are there.
    if (!decide(params.decision)) {
        if (is_first) {
            wait_for_previous_launch();
        }
        return;
    }
    int const row = static_cast<int>(blockIdx.x);
    int const slab = static_cast<int>(blockIdx.y);
    int const thread = threadIdx.x;
    uint32_t const mask = down_few::load_mask(params.down, row, 0, thread);
    int const end = down_few::scan_words(totals, mask, thread);
    __syncthreads();
    bool const failed =
        down_few::compute<Element, Cfg, false, uint16_t>(params.down, shared, totals, slab, row, mask, end);
    // A vector was stored by kLanes threads.
    constexpr int kLanes = kVector / 2;
    uint32_t const lanes = __ballot_sync(0xffffffffu, failed);
    __syncwarp();  // what is stored again has been stored
    for (int first = 0; lanes != 0 && first < kWarpSize; first += kLanes) {
        if ((lanes >> first & ((1u << kLanes) - 1)) != 0) {
            int const first_thread = thread / kWarpSize * kWarpSize + first;
            sum_again<Element>(params.down,
                               params.down.h_rounded + row * params.down.num_mask_words * down_few::kMaskBits, row,
                               slab * Cfg::kColumns + first_thread * 2);
        }
    }
    // Who waits for the end of this launch takes it for the end of those before.
    if (is_first) {
        wait_for_previous_launch();
    }
}

}  // namespace twell::skipping_down

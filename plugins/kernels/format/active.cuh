// Masks of active neurons, which kernels leave for a down projection.
#pragma once

#include <stdint.h>

#include "device/vector.cuh"

namespace twell {

// Tokens' mask words: bit n % 32 of word n / 32 tells whether neuron n is active.
constexpr int kMaskBits = 32;

// The most tokens of a dense block that leaves its active neurons.
constexpr int64_t kMostTokensSkipping = 64;

// More than a row can have of the neurons of one count.
constexpr uint32_t kMostCountedOfRow = 256;

// The result of the kernel of the hidden activations of a dense block.
struct Active {
    uint32_t* masks;  // [rows, num_words]: a bit for each neuron, 0 from d_ff on
    int num_words;    // for whole tiles of TWELL_TILE
    // [num_groups of rows, counts_of_group], a count for each CTA's part of a tile: active pairs of a row and a neuron,
    // times kMostCountedOfRow, plus the most that a row has. The latter, added up over a group, bounds the pairs of a
    // row.
    uint32_t* counted;
    int num_groups;
    int counts_of_group;
};

// Up to where a down projection that skips inactive neurons takes less time than the dense one.
struct SkippingLimits {
    Active active;
    uint32_t most_pairs;   // active, of a row and a neuron
    uint32_t most_of_row;  // by the bound that is counted
};

// Whether it is to be taken, by each warp for itself, once the hidden activations are there. NOTE: the counts do not
// come by way of L1, which may hold what was there when this kernel started.
__device__ __forceinline__ bool is_sparse_enough(SkippingLimits const& limits) {
    int const lane = threadIdx.x % kWarpSize;
    Active const& active = limits.active;
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
    return __reduce_add_sync(0xffffffffu, pairs) <= limits.most_pairs && most <= limits.most_of_row;
}

}  // namespace twell

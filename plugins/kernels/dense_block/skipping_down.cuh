// The down projection of a dense block on Hopper (sm_90a) if few neurons are active: that of masked_down.cuh. Both it
// and the dense one (dense_sm90.cuh) read the counts of the kernel of the hidden activations, and one of them leaves.
#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/sum_again.cuh"
#include "device/vector.cuh"
#include "format/active.cuh"
#include "matmul/masked_down.cuh"

namespace twell::skipping_down {

template <class Stored>
struct ParamsOf {
    SkippingLimits limits;
    masked_down::ParamsOf<Stored> down;
};

constexpr int kThreads = 256;
constexpr int kCtasPerMultiprocessor = 4;  // at once

// A CTA for each row and slab of columns.
template <class Element, class Stored, class Cfg>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) down_kernel(ParamsOf<Stored> const params) {
    constexpr bool kBytes = sizeof(Stored) == 1;
    using Hidden = std::conditional_t<kBytes, E4m3, uint16_t>;
    __shared__ masked_down::Shared<Cfg> shared;
    __shared__ masked_down::WordTotals totals;
    allow_dependent_launch();
    bool const is_first = blockIdx.x == 0 && blockIdx.y == 0;
    // The launch before, the dense one, lets this one start when the hidden activations are there.
    if (!is_sparse_enough(params.limits)) {
        if (is_first) {
            wait_for_previous_launch();
        }
        return;
    }
    int const row = static_cast<int>(blockIdx.x);
    int const slab = static_cast<int>(blockIdx.y);
    int const thread = threadIdx.x;
    uint32_t const mask = masked_down::load_mask(params.down, row, 0, thread);
    int const end = masked_down::scan_words(totals, mask, thread);
    __syncthreads();
    bool const failed =
        masked_down::compute<Element, Cfg, false, Hidden>(params.down, shared, totals, slab, row, mask, end);
    if constexpr (!kBytes) {  // in FP8 h does not overflow
        // A vector was stored by kLanes threads.
        constexpr int kLanes = kVector / 2;
        uint32_t const lanes = __ballot_sync(0xffffffffu, failed);
        __syncwarp();  // after the first store of these values
#pragma unroll 1
        for (int first = 0; lanes != 0 && first < kWarpSize; first += kLanes) {
            if ((lanes >> first & ((1u << kLanes) - 1)) != 0) {
                int const first_thread = thread / kWarpSize * kWarpSize + first;
                sum_again<Element>(params.down, masked_down::h_of<uint16_t>(params.down, row), row,
                                   slab * Cfg::kColumns + first_thread * 2);
            }
        }
    }
    // A launch that waits for the end of this one takes it for the end of those before.
    if (is_first) {
        wait_for_previous_launch();
    }
}

}  // namespace twell::skipping_down

// The down projection of few tokens, for every GPU from sm_80 on: see masked_down.cuh.
#pragma once

#include "device/dependent_launch.cuh"
#include "matmul/masked_down.cuh"

namespace twell::down_few {

using namespace masked_down;

template <class Element, class Stored, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1024 / Cfg::kThreads) down_kernel(ParamsOf<Stored> const params) {
    __shared__ Shared<Cfg> shared;
    __shared__ WordTotals totals;
    allow_dependent_launch();
    wait_for_previous_launch();
    int64_t const token = blockIdx.y;
    int const thread = threadIdx.x;
    uint32_t const mask = load_mask(params, token, 0, thread);
    int const end = scan_words(totals, mask, thread);
    __syncthreads();
    // The first shares come first, for they may be all that is needed.
    int const share = static_cast<int>(blockIdx.x) / params.num_slabs;
    int const slab = static_cast<int>(blockIdx.x) - share * params.num_slabs;
    if (Cfg::kMostShares == 1 || params.num_shares == 1 || count_active(totals) <= Cfg::kMostAlone) {
        if (share == 0) {
            compute<Element, Cfg>(params, shared, totals, slab, token, mask, end);
        }
        return;
    }
    if constexpr (Cfg::kMostShares > 1) {
        compute<Element, Cfg, true>(params, shared, totals, slab, token, mask, end, share);
    }
}

}  // namespace twell::down_few

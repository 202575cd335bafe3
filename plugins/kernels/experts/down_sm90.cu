#include "experts/down_sm90.h"

#include <algorithm>

#include "experts/down_sm90.cuh"
#include "host/problem.h"

namespace twell {

namespace {

using namespace experts;

// Columns of a warp, of which a CTA has eight: pieces of 768 bytes of a row, seven of one of 2688 columns.
#ifndef X_OF_WARP
#define X_OF_WARP 48
#endif
constexpr int kOfWarp = X_OF_WARP;

template <class Element, int kTiles>
cudaError_t launch(ExpertsCall const& call, DownParams const& params) {
    using Shape = Stream<kTiles, kOfWarp>;
    int64_t const work = params.groups.most_groups * ceil_div(params.d_out, Shape::kColumns);
    auto const ctas = static_cast<unsigned>(std::min<int64_t>(work, call.device.num_multiprocessors));
    return launch_dependent({"experts_down_sm90", {{"tokens", kTiles * kTile}, {"columns", Shape::kColumns}}},
                            down_sm90_kernel<Element, kTiles, kOfWarp>, params, dim3(ctas), kStreamThreads,
                            Shape::shared_bytes(params.d_ff), call.device, call.stream, {},
                            Shape::shared_bytes(TWELL_MAX_EXPERT_D_FF));
}

template <class Element>
cudaError_t launch(ExpertsCall const& call, DownParams const& params, int tiles) {
    switch (tiles) {
        case 1:
            return launch<Element, 1>(call, params);
        case 2:
            return launch<Element, 2>(call, params);
        default:
            return launch<Element, 4>(call, params);
    }
}

}  // namespace

void list_experts_down_sm90(Text& text) {
    for (int const tiles : {1, 2, 4}) {
        text.add("experts_down_sm90 tokens=%d columns=%d\n", tiles * kTile, kStreamWarps * kOfWarp);
    }
}

cudaError_t launch_experts_down_sm90(ExpertsCall const& call, DownParams const& params, int tiles) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, params, tiles) : launch<Fp16>(call, params, tiles);
}

}  // namespace twell

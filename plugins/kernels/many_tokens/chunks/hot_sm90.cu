#include "host/problem.h"
#include "many_tokens/chunks/hot_sm90.cuh"
#include "many_tokens/chunks/hot_sm90.h"
#include "matmul/matmul_sm90.h"

namespace twell {
namespace {

namespace sm90 = hot_sm90;

// Tokens of a CTA: few where a call has so few that each CTA takes one block.
using HotTilings = sm90::Tilings<sm90::Choices<>, sm90::Choices<32, 48, 64, 96, 128, 192, 256>>;

template <class Element>
cudaError_t launch(Call const& call, HotNeurons const& hot, Schedule const& schedule) {
    twell_problem const& problem = call.problem;
    Device const& device = call.device;
    int const clusters = sm90::num_clusters(device);
    sm90::Product const product = {problem.tokens, kMostHot, problem.d_model / sm90::BLOCK_K, 1, 0, 0};
    sm90::Tiling const tiling = sm90::choose(product, clusters, HotTilings());
    auto const kernel = sm90::find_kernel<sm90::Params>(tiling, HotTilings(), [](auto tokens, auto layout) {
        using Cfg = sm90::Config<decltype(tokens)::value, false, 1, decltype(layout)::value>;
        return sm90::Kernel<sm90::Params>::of<Cfg>(sm90::hot_kernel<Element, Cfg>);
    });
    sm90::Params params = {};
    params.u = hot.u;
    params.count = hot.count;
    params.header = schedule.header;
    params.tokens = problem.tokens;
    params.num_slices = product.num_slices;
    params.num_blocks = static_cast<int>(tiling.num_blocks);
    TWELL_TRY(first_error({
        sm90::encode(device, params.x, call.tensors.x, problem.tokens, problem.d_model, kernel.rows_loaded,
                     problem.dtype),
        sm90::encode(device, params.w_up, hot.w_up, kMostHot, problem.d_model, kernel.weight_rows_loaded,
                     problem.dtype),
    }));
    return launch_dependent(sm90::label_of("hot_sm90", tiling.block, tiling.layout), kernel.function, params,
                            sm90::grid_of(tiling, clusters), sm90::kThreads, kernel.shared_bytes, device, call.stream);
}

}  // namespace

void list_hot_sm90(Text& text) { sm90::list(text, "hot_sm90", HotTilings()); }

cudaError_t launch_hot_sm90(Call const& call, HotNeurons const& hot, Schedule const& schedule) {
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, hot, schedule) : launch<Fp16>(call, hot, schedule);
}

}  // namespace twell

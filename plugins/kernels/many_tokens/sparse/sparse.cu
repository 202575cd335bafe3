#include <algorithm>

#include "host/problem.h"
#include "many_tokens/sparse/sparse.h"
#include "many_tokens/sparse/sparse_down.cuh"
#include "many_tokens/sparse/sparse_up.cuh"

namespace twell {
namespace {

// Columns of Wu for one launch of the sparse up projection: weights that the L2 cache holds. Beyond, a row of Wu that
// another token needs has been evicted.
int up_slab_columns(twell_problem const& problem, Device const& device) {
    int64_t const bytes = static_cast<int64_t>(problem.d_ff) * problem.d_model * weight_bytes(problem);
    int64_t const slabs = problem.variant == TWELL_GATED ? ceil_div(bytes, std::max(device.l2_bytes, 1)) : 1;
    return static_cast<int>(ceil_div(ceil_div(problem.d_model, slabs), sparse_up::kLeastColumns) *
                            sparse_up::kLeastColumns);
}

// Warps of a CTA of the sparse down projection, whose columns of Wd are a slab: the rows of y follow one another in one
// slab, then in the next. Other memory passes through L2 at the same time; of 4, 2 and 1 warps this is the fastest or
// within 2 % of it on an H200, from d_ff 5632 to 28 672.
int down_slab_warps(twell_problem const& problem, Device const& device) {
    constexpr int64_t kPartOfL2 = 4;
    int64_t const warp_bytes = static_cast<int64_t>(problem.d_ff) * kWarpColumns * weight_bytes(problem);
    int warps = sparse_down::kMaxWarps;
    while (warps > 1 && warps * warp_bytes * kPartOfL2 > device.l2_bytes) {
        warps /= 2;
    }
    return warps;
}

int down_warps_per_row(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_out, kWarpColumns)); }

template <class Element, class Stored>
cudaError_t launch_up(Call const& call, SparseInput const& input, SparseConfig const& config) {
    twell_problem const& problem = call.problem;
    sparse_up::ParamsOf<Stored> params = {};
    set_block(params, problem, call.tensors);
    params.packed = input.packed;
    params.spilled = input.spilled;
    params.schedule = input.schedule;
    params.count = input.count;
    params.gather = input.gather;
    params.rows = input.rows;
    params.chunks = input.chunks;
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    params.tokens = static_cast<uint32_t>(problem.tokens);
    if constexpr (sparse_up::ParamsOf<Stored>::kHasScales) {
        params.x_rounded = reinterpret_cast<E4m3 const*>(input.rounded.x);
        params.x_scale = input.rounded.scale;
    } else {
        if (input.chunks.counts != nullptr) {
            params.column_end = problem.d_model;
            return launch_dependent({"sparse_up_chunks"}, sparse_up::up_with_chunks_kernel<Element, Stored>, params,
                                    dim3(static_cast<unsigned>(ceil_div(problem.tokens, sparse_up::kWarps))),
                                    sparse_up::kThreads, 0, call.device, call.stream);
        }
    }
    // CTAs for units stay if rows may be direct; else every unit has one if rows have one unit each.
    bool const direct = input.schedule.direct_below != 0;
    params.num_direct = direct ? static_cast<uint32_t>(problem.tokens) : 0;
    unsigned const grid =
        static_cast<unsigned>(problem.tokens) +
        (direct ? static_cast<unsigned>(sparse_up::kMinBlocksDirect * call.device.num_multiprocessors) : 0);
    auto const kernel = direct ? sparse_up::up_direct_kernel<Element, Stored> : sparse_up::up_kernel<Element, Stored>;
    for (int begin = 0; begin < problem.d_model; begin += config.up_columns) {
        params.column_begin = begin;
        params.column_end = std::min(begin + config.up_columns, problem.d_model);
        TWELL_TRY(launch_dependent({direct ? "sparse_up_direct" : "sparse_up"}, kernel, params, dim3(grid),
                                   sparse_up::kThreads, 0, call.device, call.stream,
                                   {{"columns", params.column_end - begin}}));
    }
    return cudaSuccess;
}

template <class Element, class Stored>
cudaError_t launch_down(Call const& call, SparseInput const& input, SparseConfig const& config, bool overlaps) {
    twell_problem const& problem = call.problem;
    sparse_down::ParamsOf<Stored> params = {};
    set_block(params, problem, call.tensors);
    params.schedule = input.schedule;
    params.rows = input.rows;
    params.num_tiles = num_tiles(problem);
    params.tokens = static_cast<uint32_t>(problem.tokens);
    params.warps_per_row = static_cast<uint32_t>(down_warps_per_row(problem));
    params.ctas_per_row = static_cast<uint32_t>(ceil_div(params.warps_per_row, config.down_warps));
    params.overlaps = overlaps;
    constexpr uint32_t kMaxGrid = 1u << 30;
    uint32_t const grid = std::min((params.tokens + 1) / 2 * params.ctas_per_row, kMaxGrid);
    return launch_dependent({"sparse_down"}, sparse_down::down_kernel<Element, Stored>, params, dim3(grid),
                            config.down_warps * kWarpSize, 0, call.device, call.stream);
}

}  // namespace

SparseConfig choose_sparse(twell_problem const& problem, Device const& device) {
    return {up_slab_columns(problem, device), std::min(down_warps_per_row(problem), down_slab_warps(problem, device))};
}

cudaError_t launch_sparse_up(Call const& call, SparseInput const& input, SparseConfig const& config) {
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (has_scales(call.problem)) {
        return is_bf16 ? launch_up<Bf16, E4m3>(call, input, config) : launch_up<Fp16, E4m3>(call, input, config);
    }
    return is_bf16 ? launch_up<Bf16, uint16_t>(call, input, config) : launch_up<Fp16, uint16_t>(call, input, config);
}

cudaError_t launch_sparse_down(Call const& call, SparseInput const& input, SparseConfig const& config, bool overlaps) {
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (has_scales(call.problem)) {
        return is_bf16 ? launch_down<Bf16, E4m3>(call, input, config, overlaps)
                       : launch_down<Fp16, E4m3>(call, input, config, overlaps);
    }
    return is_bf16 ? launch_down<Bf16, uint16_t>(call, input, config, overlaps)
                   : launch_down<Fp16, uint16_t>(call, input, config, overlaps);
}

void list_sparse(Text& text) {
    for (char const* name : {"sparse_up", "sparse_up_chunks", "sparse_up_direct", "sparse_down"}) {
        add_line(text, {name});
    }
}

}  // namespace twell

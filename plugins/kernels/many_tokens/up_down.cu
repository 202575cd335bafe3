#include <cuda_runtime.h>

#include <algorithm>

#include "host/launch.h"
#include "host/problem.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/chunks/chunk_up.cuh"
#include "many_tokens/dense.h"
#include "many_tokens/schedule.h"
#include "many_tokens/sparse_down.cuh"
#include "many_tokens/sparse_rows.h"
#include "many_tokens/sparse_up.cuh"
#include "many_tokens/up_down.h"
#include "sm90.h"

namespace twell {
namespace {

// What all of step 2 is launched with.
struct Launch {
    twell_problem const& problem;
    twell_tensors const& tensors;
    uint32_t const* packed;
    Schedule const& schedule;
    Chunks chunks;
    SparseRows rows;
    GateCount count;
    Gather gather;
    uint16_t const* spilled;
    Device const& device;
    cudaStream_t stream;
};

// Columns of Wu for one launch of the sparse up projection: weights that the L2 cache holds. Beyond, a row of Wu that
// another token needs has been evicted.
int up_slab_columns(twell_problem const& problem, Device const& device) {
    int64_t const bytes = static_cast<int64_t>(problem.d_ff) * problem.d_model * static_cast<int64_t>(sizeof(uint16_t));
    int64_t const slabs = problem.variant == TWELL_GATED ? ceil_div(bytes, std::max(device.l2_bytes, 1)) : 1;
    return static_cast<int>(ceil_div(ceil_div(problem.d_model, slabs), sparse_up::kLeastColumns) *
                            sparse_up::kLeastColumns);
}

// Warps of a CTA of the sparse down projection, whose columns of Wd are a slab: the rows of y follow one another in one
// slab, then in the next. Other memory passes through L2 at the same time; of 4, 2 and 1 warps this is the fastest or
// within 2 % of it on an H200, from d_ff 5632 to 28 672.
uint32_t down_slab_warps(twell_problem const& problem, Device const& device) {
    constexpr int64_t kPartOfL2 = 4;
    int64_t const warp_bytes =
        static_cast<int64_t>(problem.d_ff) * kWarpColumns * static_cast<int64_t>(sizeof(uint16_t));
    uint32_t warps = sparse_down::kMaxWarps;
    while (warps > 1 && warps * warp_bytes * kPartOfL2 > device.l2_bytes) {
        warps /= 2;
    }
    return warps;
}

// In how many parts each block's chunks are shared out: the number that takes the least time, if a part takes as long
// as loading its Wu and multiplying its tokens' chunks.
int chunk_parts(twell_problem const& problem, Chunks const& chunks, Device const& device) {
    // How many tokens' chunks take as long as loading their part of Wu.
    constexpr double kLoadTokens = 1000.0;
    constexpr int kMostParts = 8;
    int const units = chunks.num_blocks * chunks.num_slabs;
    int best = 1;
    double best_cost = 0.0;
    for (int parts = 1; parts <= kMostParts; ++parts) {
        double const rounds = static_cast<double>(ceil_div(int64_t{units} * parts, device.num_multiprocessors));
        double const cost = rounds * (kLoadTokens + static_cast<double>(problem.tokens) / parts);
        if (parts == 1 || cost < best_cost) {
            best = parts;
            best_cost = cost;
        }
    }
    return best;
}

template <class Element>
cudaError_t launch_chunk_up(Launch const& launch) {
    twell_problem const& problem = launch.problem;
    Chunks const& chunks = launch.chunks;
    chunk_up::Params params = {};
    set_block(params, problem, launch.tensors);
    params.schedule = launch.schedule;
    params.chunks = chunks;
    params.num_parts = chunk_parts(problem, chunks, launch.device);
    int const units = chunks.num_blocks * chunks.num_slabs * params.num_parts;
    int const grid = std::min(units, launch.device.num_multiprocessors);
    return launch_dependent({"chunk_up"}, chunk_up::up_kernel<Element>, params, dim3(static_cast<unsigned>(grid)),
                            chunk_up::kThreads, chunk_up::shared_bytes_for(chunks.block_neurons), launch.device,
                            launch.stream, {{"parts", params.num_parts}}, chunk_up::kMostSharedBytes);
}

// u of hot neurons.
cudaError_t launch_hot(Launch const& launch) {
    if constexpr (kHasSm90) {
        if (launch.chunks.hot.sampled != nullptr) {
            return launch_hot_sm90(launch.problem, launch.tensors, launch.chunks.hot, launch.schedule, launch.device,
                                   launch.stream);
        }
    }
    return cudaSuccess;
}

template <class Element>
cudaError_t launch_sparse_up(Launch const& launch) {
    twell_problem const& problem = launch.problem;
    sparse_up::Params params = {};
    set_block(params, problem, launch.tensors);
    params.packed = launch.packed;
    params.spilled = launch.spilled;
    params.schedule = launch.schedule;
    params.count = launch.count;
    params.gather = launch.gather;
    params.rows = launch.rows;
    params.chunks = launch.chunks;
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    params.tokens = static_cast<uint32_t>(problem.tokens);
    if (launch.chunks.counts != nullptr) {
        params.column_end = problem.d_model;
        return launch_dependent({"sparse_up_chunks"}, sparse_up::up_with_chunks_kernel<Element>, params,
                                dim3(static_cast<unsigned>(ceil_div(problem.tokens, sparse_up::kWarps))),
                                sparse_up::kThreads, 0, launch.device, launch.stream);
    }
    // CTAs for units stay where rows may be direct; else every unit has one where rows have one unit each.
    bool const direct = launch.schedule.direct_below != 0;
    params.num_direct = direct ? static_cast<uint32_t>(problem.tokens) : 0;
    unsigned const grid =
        static_cast<unsigned>(problem.tokens) +
        (direct ? static_cast<unsigned>(sparse_up::kMinBlocksDirect * launch.device.num_multiprocessors) : 0);
    auto const kernel = direct ? sparse_up::up_direct_kernel<Element> : sparse_up::up_kernel<Element>;
    int const columns = up_slab_columns(problem, launch.device);
    for (int begin = 0; begin < problem.d_model; begin += columns) {
        params.column_begin = begin;
        params.column_end = std::min(begin + columns, problem.d_model);
        TWELL_TRY(launch_dependent({direct ? "sparse_up_direct" : "sparse_up"}, kernel, params, dim3(grid),
                                   sparse_up::kThreads, 0, launch.device, launch.stream,
                                   {{"columns", params.column_end - begin}}));
    }
    return cudaSuccess;
}

// overlaps: the launch before, see launch_dense.
template <class Element>
cudaError_t launch_sparse_down(Launch const& launch, bool overlaps) {
    twell_problem const& problem = launch.problem;
    uint32_t const warps_per_row = static_cast<uint32_t>(ceil_div(problem.d_out, kWarpColumns));
    uint32_t const warps = std::min(warps_per_row, down_slab_warps(problem, launch.device));
    sparse_down::Params params = {};
    set_block(params, problem, launch.tensors);
    params.schedule = launch.schedule;
    params.rows = launch.rows;
    params.num_tiles = num_tiles(problem);
    params.tokens = static_cast<uint32_t>(problem.tokens);
    params.warps_per_row = warps_per_row;
    params.ctas_per_row = static_cast<uint32_t>(ceil_div(warps_per_row, warps));
    params.overlaps = overlaps;
    constexpr uint32_t kMaxGrid = 1u << 30;
    uint32_t const grid = std::min((params.tokens + 1) / 2 * params.ctas_per_row, kMaxGrid);
    return launch_dependent({"sparse_down"}, sparse_down::down_kernel<Element>, params, dim3(grid),
                            static_cast<int>(warps) * kWarpSize, 0, launch.device, launch.stream);
}

// All of step 2 behind the schedule.
template <class Element>
cudaError_t launch_projections(Launch const& launch, Kernels choice) {
    bool const dense_first = dense_comes_first(launch.problem, launch.device, choice);
    if (launch.chunks.counts != nullptr) {
        TWELL_TRY(launch_chunk_up<Element>(launch));
        TWELL_TRY(launch_hot(launch));
    }
    TWELL_TRY(launch_sparse_up<Element>(launch));
    for (bool const dense : {dense_first, !dense_first}) {
        TWELL_TRY(dense ? launch_dense(launch.problem, launch.tensors, launch.gather, launch.schedule, launch.device,
                                       launch.stream, choice)
                        : launch_sparse_down<Element>(launch, dense_first));
    }
    return cudaSuccess;
}

// Where launch_gate spills: see pack.cuh.
uint16_t* spilled_in(twell_problem const& problem, void* scratch) {
    return reinterpret_cast<uint16_t*>(static_cast<unsigned char*>(scratch) + schedule_bytes(problem));
}

// The dense path's scratch memory, behind the spilled matrix.
void* dense_scratch_in(twell_problem const& problem, void* scratch) {
    return reinterpret_cast<unsigned char*>(spilled_in(problem, scratch)) + spilled_bytes(problem);
}

// None without memory.
Chunks chunks_in_scratch(twell_problem const& problem, void* scratch, Device const& device, Kernels choice) {
    return has_chunks(problem, device, choice)
               ? chunks_at(problem, choice, chunks_in(problem, dense_scratch_in(problem, scratch)))
               : Chunks{};
}

}  // namespace

HotNeurons hot_neurons_in(twell_problem const& problem, void* scratch, Device const& device, Kernels choice) {
    return chunks_in_scratch(problem, scratch, device, choice).hot;
}

void list_up_down(Text& text) {
    list_schedule(text);
    for (char const* name : {"chunk_up", "sparse_up", "sparse_up_chunks", "sparse_up_direct", "sparse_down"}) {
        add_line(text, {name});
    }
    if constexpr (kHasSm90) {
        list_hot_sm90(text);
    }
    list_dense(text);
}

size_t up_down_scratch_bytes(twell_problem const& problem) {
    return schedule_bytes(problem) + spilled_bytes(problem) + dense_scratch_bytes(problem);
}

GateOutput gate_output_in(twell_problem const& problem, uint32_t* packed, void* scratch, Device const& device,
                          Kernels choice) {
    Schedule const schedule = schedule_at(problem, scratch);
    GateOutput output;
    output.packed = packed;
    output.spilled = spilled_in(problem, scratch);
    output.counted = schedule.counted;
    if (has_direct_rows(problem, device, choice)) {
        output.tile_counts = schedule.tile_counts;
    }
    if (HotNeurons const hot = hot_neurons_in(problem, scratch, device, choice); hot.sampled != nullptr) {
        output.cleared = hot.sampled;
        output.num_cleared = problem.d_ff;
    }
    return output;
}

cudaError_t launch_up_down(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                           void* scratch, int64_t dense_rows, Device const& device, cudaStream_t stream,
                           Kernels choice) {
    uint16_t* const spilled = spilled_in(problem, scratch);
    Schedule schedule = schedule_at(problem, scratch);
    void* const dense_scratch = dense_scratch_in(problem, scratch);
    GuardModel guard = guard_model(problem, device, choice);
    guard.forced = dense_rows;
    guard.count.parts = schedule.counted;
    if (dense_rows == kGuardEarly) {
        guard.count.all_dense_from = 0;
        guard.count.some_sparse_to = 0;
    } else if (guard.forced >= 0) {
        guard.count.all_dense_from = UINT32_MAX;
        guard.count.some_sparse_to = guard.forced == 0 ? UINT32_MAX : 0;
    }
    Gather const gather = gather_for(problem, tensors, packed, spilled, dense_scratch);
    SparseRows const rows = {reinterpret_cast<unsigned char*>(spilled),
                             spilled_stride(problem) * static_cast<int64_t>(sizeof(uint16_t))};
    Chunks const chunks = chunks_in_scratch(problem, scratch, device, choice);
    if (guard.count.num_parts != 0 && has_direct_rows(problem, device, choice)) {
        set_direct(schedule, problem);
    }
    TWELL_TRY(
        launch_schedule(problem, packed, spilled, schedule, guard, gather, chunks, tensors.w_up, rows, device, stream));
    Launch const launch = {problem,     tensors, packed,  schedule, chunks, rows,
                           guard.count, gather,  spilled, device,   stream};
    return problem.dtype == TWELL_BF16 ? launch_projections<Bf16>(launch, choice)
                                       : launch_projections<Fp16>(launch, choice);
}

cudaError_t launch_dense_rows(twell_problem const& problem, twell_tensors const& tensors, void* scratch, bool skips,
                              Device const& device, cudaStream_t stream) {
    if constexpr (kHasSm90) {
        return launch_dense_block(problem, tensors, spilled_in(problem, scratch),
                                  block_scratch_in(problem, dense_scratch_in(problem, scratch)), skips, device, stream);
    }
    return cudaErrorNotSupported;
}

}  // namespace twell

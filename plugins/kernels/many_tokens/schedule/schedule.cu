#include <algorithm>

#include "host/problem.h"
#include "many_tokens/schedule/schedule.cuh"
#include "many_tokens/schedule/schedule.h"

namespace twell {
namespace {

// A warp of a block then has a row, up to the most blocks.
constexpr int64_t kRowsPerBlock = schedule::kWarps;

Schedule take_schedule(twell_problem const& problem, unsigned char*& memory) {
    int const tiles = num_tiles(problem);
    Schedule schedule = {};
    schedule.header = take<ScheduleHeader>(memory, 1);
    schedule.row_order = take<RowWork>(memory, problem.tokens);
    schedule.place = take<uint32_t>(memory, problem.tokens);
    schedule.block_buckets = take<uint32_t>(memory, schedule::kMaxBlocks * schedule::kBuckets);
    schedule.counts = take<uint32_t>(memory, problem.tokens);
    schedule.words = take<uint32_t>(memory, problem.tokens * max_listed(tiles));
    schedule.units = take<Unit>(memory, problem.tokens * max_units(tiles));
    schedule.tile_counts = reinterpret_cast<uint16_t*>(schedule.units);
    schedule.counted = take<uint32_t>(memory, kMostCountParts);
    return schedule;
}

// Lets rows be direct.
void set_direct(Schedule& schedule, twell_problem const& problem) {
    // As many as find a place for their list of h.
    int64_t const most = max_listed(num_tiles(problem)) * sizeof(uint32_t) / sizeof(SparseEntry);
    schedule.listed_from = schedule::kExactLevels;
    while (2 * schedule.listed_from <= most) {
        schedule.listed_from *= 2;
    }
    // More than twice the non-zeros of a row at 0.5 %, but so few that one CTA does not take long.
    schedule.direct_below = 2 * static_cast<int>(kUnitNonzeros);
    while (schedule.direct_below < 2 * num_tiles(problem)) {
        schedule.direct_below *= 2;
    }
    schedule.direct_below = std::min(schedule.direct_below, schedule.listed_from);
}
static_assert(kMostDirectBelow >= 2 * TWELL_MAX_PACKED_D_FF / TWELL_TILE, "of the widest layer");

}  // namespace

size_t schedule_bytes(twell_problem const& problem) {
    return bytes_taken([&](unsigned char*& memory) { take_schedule(problem, memory); });
}

void list_schedule(Text& text) {
    for (char const* name : {"schedule_cluster", "schedule_count", "schedule_order"}) {
        add_line(text, {name});
    }
}

bool may_have_direct_rows(twell_problem const& problem) {
    return problem.variant == TWELL_GATED && problem.tokens <= schedule::kMostTokensOfCluster;
}

Schedule schedule_at(twell_problem const& problem, bool has_direct, void* memory) {
    unsigned char* next = static_cast<unsigned char*>(memory);
    Schedule schedule = take_schedule(problem, next);
    if (has_direct) {
        set_direct(schedule, problem);
    }
    return schedule;
}

cudaError_t launch_schedule(Call const& call, uint32_t const* packed, uint16_t const* spilled, Schedule const& schedule,
                            GuardModel const& guard, Gather const& gather, Chunks const& chunks,
                            SparseRows const& rows) {
    twell_problem const& problem = call.problem;
    bool const by_cluster = schedule.direct_below != 0;
    int64_t const most_blocks = by_cluster
                                    ? schedule::kClusterBlocks
                                    : std::min<int64_t>(ceil_div(problem.tokens, kRowsPerBlock), schedule::kMaxBlocks);
    int64_t rows_per_block = ceil_div(problem.tokens, most_blocks);
    if (chunks.counts != nullptr) {
        rows_per_block = ceil_div(rows_per_block, kRunRows) * kRunRows;  // rows that share chunks are in one block
    }
    int64_t const blocks = by_cluster ? schedule::kClusterBlocks : ceil_div(problem.tokens, rows_per_block);
    schedule::Params params = {};
    params.packed = packed;
    params.spilled = spilled;
    params.schedule = schedule;
    params.guard = guard;
    params.gather = gather;
    params.chunks = chunks;
    params.w_up = static_cast<uint16_t const*>(call.tensors.w_up);
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.rows = rows;
    params.tokens = problem.tokens;
    params.num_blocks = static_cast<int>(blocks);
    params.rows_per_block = static_cast<int>(rows_per_block);
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    unsigned const grid = static_cast<unsigned>(blocks);
    if (by_cluster) {
        return launch_dependent({"schedule_cluster"}, schedule::cluster_kernel, params, dim3(grid), schedule::kThreads,
                                0, call.device, call.stream, {}, 0, grid);
    }
    TWELL_TRY(launch_dependent({"schedule_count"}, schedule::count_kernel, params, dim3(grid + 1), schedule::kThreads,
                               0, call.device, call.stream));
    return launch_dependent({"schedule_order"}, schedule::order_kernel, params, dim3(grid), schedule::kThreads, 0,
                            call.device, call.stream);
}

}  // namespace twell

#include <algorithm>

#include "launch.cuh"
#include "problem.cuh"
#include "schedule.cuh"
#include "schedule.h"

namespace twell {
namespace {

// A warp of a block then has a row, up to the most blocks.
constexpr int64_t kRowsPerBlock = schedule::kWarps;

// Cuts memory into pieces of kWorkspaceAlignment.
template <class T>
T* take(unsigned char*& memory, int64_t count) {
    T* const piece = reinterpret_cast<T*>(memory);
    memory += aligned(static_cast<size_t>(count) * sizeof(T));
    return piece;
}

int64_t num_entries(twell_problem const& problem) { return problem.tokens * max_listed(num_tiles(problem)); }

int64_t num_interleaved(twell_problem const& problem) {
    return ceil_div(problem.tokens, kInterleavedRows) * kInterleavedRows * kLongNonzeros;
}

}  // namespace

size_t schedule_bytes(twell_problem const& problem) {
    size_t const tokens = static_cast<size_t>(problem.tokens);
    return aligned(sizeof(ScheduleHeader)) + aligned(tokens * sizeof(RowWork)) +
           5 * aligned(tokens * sizeof(uint32_t)) +
           aligned(static_cast<size_t>(num_entries(problem)) * sizeof(SparseEntry)) +
           aligned(static_cast<size_t>(num_interleaved(problem)) * sizeof(SparseEntry)) +
           aligned(tokens * max_units(num_tiles(problem)) * sizeof(Unit)) +
           aligned(schedule::kMaxBlocks * schedule::kBuckets * sizeof(uint32_t));
}

Schedule schedule_at(twell_problem const& problem, void* memory, bool interleaves) {
    unsigned char* next = static_cast<unsigned char*>(memory);
    Schedule schedule;
    schedule.header = take<ScheduleHeader>(next, 1);
    schedule.row_order = take<RowWork>(next, problem.tokens);
    schedule.place = take<uint32_t>(next, problem.tokens);
    schedule.block_buckets = take<uint32_t>(next, schedule::kMaxBlocks * schedule::kBuckets);
    schedule.counts = take<uint32_t>(next, problem.tokens);
    schedule.entries = take<SparseEntry>(next, num_entries(problem));
    schedule.interleaved = take<SparseEntry>(next, num_interleaved(problem));
    schedule.remaining = take<uint32_t>(next, problem.tokens);
    schedule.units = take<Unit>(next, problem.tokens * max_units(num_tiles(problem)));
    schedule.rest_rows = take<uint32_t>(next, problem.tokens);
    schedule.has_failed = take<uint32_t>(next, problem.tokens);
    if (!interleaves) {
        schedule.interleaved = nullptr;
    }
    return schedule;
}

cudaError_t launch_schedule(twell_problem const& problem, uint32_t const* packed, uint16_t const* spilled,
                            Schedule const& schedule, GuardModel const& guard, Gather const& gather,
                            Device const& device, cudaStream_t stream) {
    int64_t const blocks = std::min<int64_t>(ceil_div(problem.tokens, kRowsPerBlock), schedule::kMaxBlocks);
    schedule::Params params = {};
    params.packed = packed;
    params.spilled = spilled;
    params.schedule = schedule;
    params.guard = guard;
    params.gather = gather;
    params.tokens = problem.tokens;
    params.rows_per_block = static_cast<int>(ceil_div(problem.tokens, blocks));
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    dim3 const grid(static_cast<unsigned>(blocks));
    if (cudaError_t const error =
            launch_dependent(schedule::count_kernel, params, grid, schedule::kThreads, 0, device, stream);
        error != cudaSuccess) {
        return error;
    }
    return launch_dependent(schedule::order_kernel, params, grid, schedule::kThreads, 0, device, stream);
}

}  // namespace twell

// The order in which step 2 takes rows: the most non-zeros first.
#ifndef TWELL_KERNELS_SCHEDULE_H_
#define TWELL_KERNELS_SCHEDULE_H_

#include <stddef.h>

#include "gather.cuh"
#include "guard.h"
#include "twell/twell.h"

namespace twell {

// Written by launch_schedule, in device memory.
struct ScheduleHeader {
    uint32_t heavy_count;   // so many rows at the front of the order take the dense path, not the sparse kernels
    uint32_t failed_count;  // of these; the sparse kernels compute them after all
};

// Where a schedule lies in a piece of device memory of schedule_bytes(problem), 256-byte aligned.
struct Schedule {
    ScheduleHeader* header;
    uint32_t* row_order;      // [tokens]: every row once, heaviest bucket first; in no order within a bucket
    uint32_t* place;          // [tokens]: bucket and rank of a row, see schedule.cuh
    uint32_t* block_buckets;  // [blocks, kBuckets]: rows of each bucket in each block of rows
    uint32_t* failed_rows;    // [tokens]: the first failed_count count, in any order
    uint32_t* has_failed;     // [tokens]: 1 for these
};

// Never shrinks when `tokens` grows.
size_t schedule_bytes(twell_problem const& problem);

Schedule schedule_at(twell_problem const& problem, void* memory);

// Enqueues the schedule of a packed matrix, from its counts alone. With a guard, tiles that overflow have been spilled
// and are no reason to be heavy, and what the dense path needs of the heavy ones is gathered. Same preconditions as
// launch_gate.
cudaError_t launch_schedule(twell_problem const& problem, uint32_t const* packed, Schedule const& schedule,
                            GuardModel const& guard, Gather const& gather, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_SCHEDULE_H_

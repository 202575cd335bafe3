// The order of step 2: rows with the most non-zeros first, and the kernel that takes each row.
#pragma once

#include <stddef.h>

#include "format/schedule.cuh"
#include "format/sparse_rows.cuh"
#include "host/launch.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.h"
#include "twell/twell.h"

namespace twell {

// Never shrinks when `tokens` grows.
size_t schedule_bytes(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_schedule(Text& text);

// Whether rows may be direct, if there are no chunks and the gate counts: only in a gated block.
bool may_have_direct_rows(twell_problem const& problem);

// has_direct: rows may be direct.
Schedule schedule_at(twell_problem const& problem, bool has_direct, void* memory);

// Enqueues the schedule of a packed matrix and the spilled one. Data of heavy rows are gathered for the dense path,
// unless the up projection does that: with chunks, or if rows may be direct. Chunks are built unless they have no
// memory: `rows` says where the lists of h will be, in which rows are marked that are in no chunk, see chunk.cuh; the
// hot neurons' rows of w_up are copied.
cudaError_t launch_schedule(Call const& call, uint32_t const* packed, uint16_t const* spilled, Schedule const& schedule,
                            GuardModel const& guard, Gather const& gather, Chunks const& chunks,
                            SparseRows const& rows);

}  // namespace twell

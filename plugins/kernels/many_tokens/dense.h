// The dense path: up and down projections of rows that are too dense for the sparse kernels.
#pragma once

#include <stddef.h>

#include "dense_block/active.h"
#include "host/launch.h"
#include "many_tokens/guard.h"
#include "many_tokens/schedule.h"
#include "twell/twell.h"

namespace twell {

// Unless all rows are dense, so many may be.
int64_t max_dense_part(twell_problem const& problem);

// Bytes of scratch memory that gather_for, chunks_in and block_scratch_in need; never shrinks when `tokens` grows.
size_t dense_scratch_bytes(twell_problem const& problem);

// What a device does on either path, for the guard.
struct PathCosts {
    float gathered_bytes_per_ns;  // of weights, sparse
    float copied_bytes_per_ns;    // of rows that the dense path wants to be neighbours
    DenseRounds up;               // of a gated block
    DenseRounds down;
};

// What the guard has to know.
GuardModel guard_model(twell_problem const& problem, Device const& device, Kernels choice);

// What the schedule or the sparse up projection has to gather, see launch_schedule; `scratch` is 256-byte aligned.
Gather gather_for(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed, uint16_t* spilled,
                  void* scratch);

// Memory for chunks_at (chunk.h), where the dense path leaves h after them.
void* chunks_in(twell_problem const& problem, void* scratch);

// Whether the dense path comes before the sparse down projection, which then fills the multiprocessors that the dense
// one leaves idle in its last round; else after it.
bool dense_comes_first(twell_problem const& problem, Device const& device, Kernels choice);

// Enqueues kernels that compute y of the heavy rows; they do nothing where there are none. Where all rows are heavy,
// the spilled matrix is overwritten. If the dense path comes first, the next launch may overlap these: where there are
// heavy rows, it starts only after all launches before these have ended.
cudaError_t launch_dense(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                         Schedule const& schedule, Device const& device, cudaStream_t stream, Kernels choice);

// Scratch memory for a down projection of whose sums several clusters compute a part: see parts_sm90.cuh.
struct PartSums {
    float4* sums;      // [most_sums / 4]
    uint32_t* states;  // [num_states]
    int64_t most_sums;
    int num_states;
};

// Scratch memory of a dense block, beside h.
struct BlockScratch {
    PartSums parts;
    Active active;
    int64_t most_counts;  // that there is room for in `active`
};

// `scratch` is what gather_for needs, too.
BlockScratch block_scratch_in(twell_problem const& problem, void* scratch);

// Dense blocks have at most so many columns of x: sums of more products have not been tested there.
constexpr int kMostDModelDenseBlock = 16384;

// Whether there are kernels for a dense block: on compute capability 9.0 alone, whatever the density.
inline bool has_dense_block(twell_problem const& problem, Device const& device) {
    return is_sm90(device) && problem.d_model <= kMostDModelDenseBlock;
}

// The rows of all configurations, a line each.
void list_dense(Text& text);

// Both for every GPU from sm_80 on.
PathCosts dense_generic_costs(twell_problem const& problem, Device const& device);
void list_dense_generic(Text& text);
cudaError_t launch_dense_generic(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                                 Schedule const& schedule, Device const& device, cudaStream_t stream);

// Enqueues kernels of compute capability 9.0 that compute y of all rows as a dense block does: no packed matrix. If few
// neurons are active, the down projection skips the others, unless it must not. `h` is [tokens, d_ff], rows
// spilled_stride(problem) elements apart.
cudaError_t launch_dense_block(twell_problem const& problem, twell_tensors const& tensors, uint16_t* h,
                               BlockScratch const& scratch, bool skips, Device const& device, cudaStream_t stream);

}  // namespace twell

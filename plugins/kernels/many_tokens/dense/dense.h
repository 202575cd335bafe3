// The dense path: up and down projections of rows that are too dense for the sparse kernels.
#pragma once

#include "format/schedule.cuh"
#include "fp8/fp8.h"
#include "host/launch.h"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.h"
#include "matmul/dense_sm90.h"
#include "twell/twell.h"

namespace twell {

// Which kernels run, and how, chosen once.
struct DenseConfig {
    // The kernels of compute capability 9.0. Then the dense path comes before the sparse down projection, which fills
    // the multiprocessors that the dense one leaves idle in its last round; else after it.
    bool is_sm90;
    DenseShape up;  // then
    DenseShape down;
};

DenseConfig choose_dense(twell_problem const& problem, Device const& device, Kernels kernels);

// The costs of either path, for the guard. with_chunks: the sparse up projection has chunks.
PathCosts path_costs(twell_problem const& problem, DenseConfig const& config, Device const& device, bool with_chunks);

// Enqueues kernels that compute y of the heavy rows; they do nothing if there are none. If all rows are heavy, the
// spilled matrix is overwritten. If the dense path comes first, the next launch may overlap these: if there are heavy
// rows, it starts only after all launches before these have ended.
cudaError_t launch_dense(Call const& call, Gather const& gather, Schedule const& schedule, DenseConfig const& config);

// The same with FP8 weights, of a gated block on compute capability 9.0; gather.x is x in FP8, of
// which two count as one.
cudaError_t launch_dense_bytes(Call const& call, Gather const& gather, Schedule const& schedule,
                               DenseConfig const& config, Quantised const& rounded, HiddenBytes const& h);

// The rows of all configurations, a line each.
void list_dense(Text& text);

}  // namespace twell

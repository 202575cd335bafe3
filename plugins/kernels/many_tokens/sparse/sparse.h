// Sparse up and down projections: y = sum over active neurons n of h[n] Wd[n, :] + bd.
#pragma once

#include "format/schedule.cuh"
#include "format/sparse_rows.cuh"
#include "fp8/fp8.h"
#include "host/launch.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.h"
#include "twell/twell.h"

namespace twell {

// How the launches are cut, chosen once.
struct SparseConfig {
    int up_columns;  // of Wu, for one launch of the up projection
    int down_warps;  // of a CTA of the down projection
};

SparseConfig choose_sparse(twell_problem const& problem, Device const& device);

// Results of the kernels before, and where h goes.
struct SparseInput {
    uint32_t const* packed;
    uint16_t const* spilled;
    Schedule schedule;
    GateCount count;
    Gather gather;
    SparseRows rows;
    Chunks chunks;
    Quantised rounded;  // of FP8 weights
};

cudaError_t launch_sparse_up(Call const& call, SparseInput const& input, SparseConfig const& config);

// overlaps: if there are dense rows, the launch before, which begins after all others.
cudaError_t launch_sparse_down(Call const& call, SparseInput const& input, SparseConfig const& config, bool overlaps);

// The rows of the configurations, a line each.
void list_sparse(Text& text);

}  // namespace twell

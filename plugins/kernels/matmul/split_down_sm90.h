// Host side of split_down_sm90.cuh: the down projection of all rows of a dense block with FP8 weights, on compute
// capability 9.0.
#pragma once

#include "host/launch.h"
#include "host/problem.h"
#include "matmul/dense_sm90.h"

namespace twell {

// How the sums are cut: into blocks of tokens, and among the CTAs of a cluster. No CTAs: matmul/dense_sm90.h is faster.
struct SplitDown {
    int block;
    int ctas;
    int64_t num_blocks;
    int num_tiles;
};

SplitDown choose_split_down_sm90(twell_problem const& problem, Device const& device, DenseShape const& other);

// Enqueues it, for rows that are all dense.
cudaError_t launch_split_down_sm90(Call const& call, DenseRows const& rows, SplitDown const& split);

// The rows of the configurations, a line each.
void list_split_down_sm90(Text& text);

}  // namespace twell

// The whole block as a dense one, on compute capability 9.0: all neurons, whatever is active. If few neurons are
// active, the down projection may skip the others.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "matmul/dense_sm90.h"
#include "matmul/tiling_sm90.h"
#include "twell/twell.h"

namespace twell {

// The most columns of x: sums of more products have not been tested here.
constexpr int kMostDModelDenseBlock = 16384;

// Whether there are kernels for the problem.
inline bool has_dense_block(twell_problem const& problem, Device const& device) {
    return is_sm90(device) && problem.d_model <= kMostDModelDenseBlock;
}

// Whether there are kernels for weights of the problem's that have scales: rows of bytes whose begins TMA can take.
inline bool dense_block_takes_scales(twell_problem const& problem, Device const& device) {
    constexpr int kMultiple = 16;
    return has_dense_block(problem, device) && problem.d_model % kMultiple == 0 && problem.d_out % kMultiple == 0;
}

// The configuration of a call, chosen once.
struct DenseBlockConfig {
    matmul_sm90::Tiling hidden;
    DenseShape down;
    bool skips;            // a launch behind the down projection computes y if few neurons are active
    int skipping_columns;  // of a CTA of that launch
};

// Bytes of workspace that launch_dense_block needs, behind those of take_quantised, also where it is
// not for the problem; never shrinks when `tokens` grows.
size_t dense_block_bytes(twell_problem const& problem);

// The rows of all configurations, a line each.
void list_dense_block(Text& text);

// Enqueues the whole block; cudaErrorNotSupported unless has_dense_block(problem, device), or, of weights with scales,
// dense_block_takes_scales. The problem has been validated, has at least one row, and the pointers have been checked;
// `workspace` is 256-byte aligned. `may_skip`: whether inactive neurons may be skipped.
cudaError_t launch_dense_block(Call const& call, void* workspace, bool may_skip);

}  // namespace twell

// Gate projection with packing: packed = TwELL(act(x Wg^T + bg)).
#pragma once

#include "fp8/fp8.h"
#include "host/launch.h"
#include "matmul/tiling_sm90.h"
#include "twell/twell.h"

namespace twell {

// Where the gate's results go. Null: not written.
struct GateOutput {
    uint32_t* packed = nullptr;
    uint16_t* spilled = nullptr;      // see pack.cuh
    uint16_t* tile_counts = nullptr;  // [tokens, num_tiles]: non-zeros of each tile; from the Hopper kernel alone
    // [num_count_parts]: together the non-zeros of all tiles of all rows, of each kMostCounted.
    uint32_t* counted = nullptr;
    uint32_t* cleared = nullptr;  // [num_cleared]: becomes 0, for the next kernels; from the Hopper kernel alone
    int num_cleared = 0;
};

// Which kernel runs, and how, chosen once.
struct GateConfig {
    bool exists;                 // false: no kernel can compute the problem
    bool is_sm90;                // the kernel of compute capability 9.0
    matmul_sm90::Tiling tiling;  // then
    int num_count_parts;         // of the count that the kernel leaves, kMostCountParts at most; 0: it does not count
    int64_t large_rows;          // else: the first rows, which are cut into large blocks,
    int rest_block;              // and the rows of a block of the others
};

GateConfig choose_gate(twell_problem const& problem, Device const& device, Kernels kernels);

// Enqueues the gate kernel; cudaErrorNotSupported if there is none. The problem has been validated, has at least one
// row, and the pointers have been checked.
// rounded: x, if weights have scales.
cudaError_t launch_gate(Call const& call, GateOutput const& output, GateConfig const& config,
                        Quantised const& rounded = {});

// The rows of all configurations, a line each.
void list_gate(Text& text);

}  // namespace twell

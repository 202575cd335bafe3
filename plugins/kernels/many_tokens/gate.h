// Gate projection with packing: packed = TwELL(act(x Wg^T + bg)).
#pragma once

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Where the gate's results go. What is null is not written.
struct GateOutput {
    uint32_t* packed = nullptr;
    uint16_t* spilled = nullptr;      // see pack.cuh
    uint16_t* tile_counts = nullptr;  // [tokens, num_tiles]: non-zeros of each tile; from the Hopper kernel alone
    // [num_count_parts]: together the non-zeros of all tiles of all rows, of each kMostCounted.
    uint32_t* counted = nullptr;
    uint32_t* cleared = nullptr;  // [num_cleared]: becomes 0, for the next kernels; from the Hopper kernel alone
    int num_cleared = 0;
};

// Enqueues the gate kernel. The problem has been validated, has at least one row, and the pointers have been checked.
cudaError_t launch_gate(twell_problem const& problem, twell_tensors const& tensors, GateOutput const& output,
                        Device const& device, cudaStream_t stream, Kernels choice = Kernels::kBest);

// The rows of all configurations, a line each.
void list_gate(Text& text);

// Parts of the count that the kernel leaves, kMostCountParts at most; 0: it does not count.
int num_count_parts(twell_problem const& problem, Device const& device, Kernels choice);
constexpr int kMostCountParts = 160;

}  // namespace twell

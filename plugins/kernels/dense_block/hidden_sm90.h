// Host side of hidden_sm90.cuh: h of all rows and neurons, by one kernel.
#pragma once

#include <stdint.h>

#include "format/active.cuh"
#include "fp8/fp8.h"
#include "host/launch.h"
#include "matmul/dense_sm90.h"
#include "matmul/tiling_sm90.h"
#include "twell/twell.h"

namespace twell {

matmul_sm90::Tiling choose_hidden_sm90(twell_problem const& problem, Device const& device);

// Whether the kernel can leave which neurons are active.
bool hidden_sm90_leaves_active(matmul_sm90::Tiling const& tiling);

// Sets how the counts in active.counted are arranged.
void set_groups_sm90(Active& active, matmul_sm90::Tiling const& tiling);

// Enqueues the kernel, which also clears parts.states. `active` has been arranged; its masks may be null, and else it
// has room for most_counts counts.
cudaError_t launch_hidden_sm90(Call const& call, matmul_sm90::Tiling const& tiling, uint16_t* h, PartSums const& parts,
                               Active const& active, int64_t most_counts);

// The same with FP8 weights, of x rounded to these.
matmul_sm90::Tiling choose_hidden_bytes_sm90(twell_problem const& problem, Device const& device);
cudaError_t launch_hidden_bytes_sm90(Call const& call, matmul_sm90::Tiling const& tiling, Quantised const& rounded,
                                     HiddenBytes const& h, PartSums const& parts, Active const& active,
                                     int64_t most_counts);

// The rows of the configurations, a line each.
void list_hidden_sm90(Text& text);
void list_hidden_bytes_sm90(Text& text);

}  // namespace twell

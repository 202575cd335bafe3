// Host side of skipping_down.cuh.
#pragma once

#include <stdint.h>

#include "format/active.cuh"
#include "host/launch.h"
#include "matmul/dense_sm90.h"
#include "twell/twell.h"

namespace twell {

// Columns of y that a CTA computes.
int choose_skipping_columns_sm90(twell_problem const& problem, Device const& device);

// Enqueues the down projection of h, [tokens, d_ff] in rows of limits.active.num_words * kMaskBits, or with FP8 weights
// of `bytes`. It leaves if more neurons are active than the limits say.
cudaError_t launch_skipping_down_sm90(Call const& call, SkippingLimits const& limits, uint16_t const* h,
                                      HiddenBytes const& bytes, int columns);

// The rows of the configurations, a line each.
void list_skipping_down_sm90(Text& text);

}  // namespace twell

// The product of hot neurons.
#pragma once

#include "format/schedule.cuh"
#include "host/launch.h"
#include "many_tokens/chunks/hot.h"

namespace twell {

// Enqueues hot.u = x hot.w_up^T, unless no neuron is hot or all rows are dense. Behind chunk_up: order_kernel has ended
// when a CTA starts.
cudaError_t launch_hot_sm90(Call const& call, HotNeurons const& hot, Schedule const& schedule);

// The rows of the configurations, a line each.
void list_hot_sm90(Text& text);

}  // namespace twell

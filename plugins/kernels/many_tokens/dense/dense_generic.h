// The dense path for every GPU from sm_80 on.
#pragma once

#include "format/schedule.cuh"
#include "host/launch.h"
#include "many_tokens/dense/gather.cuh"
#include "many_tokens/guard/guard.h"
#include "twell/twell.h"

namespace twell {

PathCosts dense_generic_costs(twell_problem const& problem, Device const& device);
cudaError_t launch_dense_generic(Call const& call, Gather const& gather, Schedule const& schedule);

// The rows of the configurations, a line each.
void list_dense_generic(Text& text);

}  // namespace twell

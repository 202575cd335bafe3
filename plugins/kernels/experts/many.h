// Experts with many tokens: dense products of groups.
#pragma once

#include "experts/experts.h"

namespace twell {

namespace experts {
struct UpParams;
struct DownParams;
}  // namespace experts

// Elements that h takes for each pair of a token and an expert of it.
int experts_many_pitch(int d_ff);

// width: tokens of a group, 64 or 128.
cudaError_t launch_experts_many(ExpertsCall const& call, experts::UpParams const& up, experts::DownParams const& down,
                                int width);

void list_experts_many(Text& text);

// The same on compute capability 9.0. sorted: memory for [pairs of a token and an expert, d_model].
bool experts_many_sm90_supports(twell_experts_problem const& problem);
cudaError_t launch_experts_many_sm90(ExpertsCall const& call, experts::UpParams const& up,
                                     experts::DownParams const& down, uint16_t* sorted, int width);
void list_experts_many_sm90(Text& text);

}  // namespace twell

// The down projection of sorted tokens by CTAs that stay, of weights of 16 bits.
#pragma once

#include "experts/experts.h"

namespace twell {

namespace experts {
struct DownParams;
}

// tiles: of eight tokens, of a group.
cudaError_t launch_experts_down_sm90(ExpertsCall const& call, experts::DownParams const& params, int tiles);

void list_experts_down_sm90(Text& text);

}  // namespace twell

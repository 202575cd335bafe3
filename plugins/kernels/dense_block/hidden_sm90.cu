#include "dense_block/hidden_launch_sm90.cuh"

namespace twell {

namespace sm90 = hidden_sm90;

sm90::Tiling choose_hidden_sm90(twell_problem const& problem, Device const& device) {
    return sm90::choose_tiling<uint16_t>(problem, device);
}

bool hidden_sm90_leaves_active(sm90::Tiling const& tiling) { return sm90::leaves_active(tiling.layout, tiling.block); }

void set_groups_sm90(Active& active, sm90::Tiling const& tiling) {
    bool const shares_weights = tiling.layout == sm90::Layout::kSharesWeights;
    active.num_groups = static_cast<int>(tiling.num_blocks) * (shares_weights ? kClusterSize : 1);
    active.counts_of_group = tiling.num_tiles * (shares_weights ? 1 : kClusterSize);
}

void list_hidden_sm90(Text& text) {
    sm90::list(text, sm90::kGatedName<uint16_t>, sm90::TilingsOf<uint16_t, true>::Type());
    sm90::list(text, sm90::kPlainName<uint16_t>, sm90::TilingsOf<uint16_t, false>::Type());
}

cudaError_t launch_hidden_sm90(Call const& call, sm90::Tiling const& tiling, uint16_t* h, PartSums const& parts,
                               Active const& active, int64_t most_counts) {
    Choice const choice = sm90::choice_of(active, most_counts);
    return sm90::launch<uint16_t>(call, tiling, call.tensors.x, parts, choice, [&](sm90::Params& params) {
        params.h = h;
        params.active = active;
    });
}

}  // namespace twell

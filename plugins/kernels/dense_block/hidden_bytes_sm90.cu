// The kernels of hidden_sm90.cuh with FP8 weights: x and h are rounded to FP8, too.
#include "dense_block/hidden_launch_sm90.cuh"

namespace twell {

hidden_sm90::Tiling choose_hidden_bytes_sm90(twell_problem const& problem, Device const& device) {
    return hidden_sm90::choose_tiling<E4m3>(problem, device);
}

cudaError_t launch_hidden_bytes_sm90(Call const& call, hidden_sm90::Tiling const& tiling, Quantised const& rounded,
                                     HiddenBytes const& h, PartSums const& parts, Active const& active,
                                     int64_t most_counts) {
    Choice const choice = hidden_sm90::choice_of(active, most_counts);
    return hidden_sm90::launch<E4m3>(call, tiling, rounded.x, parts, choice, [&](hidden_sm90::ParamsOf<E4m3>& params) {
        set_scales(params, call.problem, call.tensors);
        params.active = active;
        params.x_scale = rounded.scale;
        params.h_bytes = h.values;
        params.h_scale = h.scales;
        params.h_scale_stride = h.scale_stride;
    });
}

void list_hidden_bytes_sm90(Text& text) {
    hidden_sm90::list(text, hidden_sm90::kGatedName<E4m3>, hidden_sm90::TilingsOf<E4m3, true>::Type());
    hidden_sm90::list(text, hidden_sm90::kPlainName<E4m3>, hidden_sm90::TilingsOf<E4m3, false>::Type());
}

}  // namespace twell

#include "dense_block/skipping_down.cuh"
#include "dense_block/skipping_down_sm90.h"
#include "host/problem.h"

namespace twell {
namespace {

using Narrow = masked_down::Config<32, skipping_down::kThreads>;
using Wide = masked_down::Config<64, skipping_down::kThreads>;

template <class Cfg>
constexpr Label label_of() {
    return {"skipping_down", {{"columns", Cfg::kColumns}}};
}

template <class Cfg>
int num_slabs(twell_problem const& problem) {
    return static_cast<int>(ceil_div(problem.d_out, Cfg::kColumns));
}

template <class Element, class Cfg, class Stored>
cudaError_t launch(Call const& call, skipping_down::ParamsOf<Stored> const& params) {
    return launch_dependent(
        label_of<Cfg>(), skipping_down::down_kernel<Element, Stored, Cfg>, params,
        dim3(static_cast<unsigned>(call.problem.tokens), static_cast<unsigned>(num_slabs<Cfg>(call.problem))),
        Cfg::kThreads, 0, call.device, call.stream);
}

template <class Stored>
cudaError_t launch(Call const& call, SkippingLimits const& limits, uint16_t const* h, HiddenBytes const& bytes,
                   int columns) {
    skipping_down::ParamsOf<Stored> params = {};
    params.limits = limits;
    set_block(params.down, call.problem, call.tensors);
    params.down.h_rounded = h;
    params.down.h_bytes = {bytes.values, bytes.scales, bytes.scale_stride};
    params.down.masks = limits.active.masks;
    params.down.num_mask_words = limits.active.num_words;
    bool const is_narrow = columns == Narrow::kColumns;
    if (call.problem.dtype == TWELL_BF16) {
        return is_narrow ? launch<Bf16, Narrow>(call, params) : launch<Bf16, Wide>(call, params);
    }
    return is_narrow ? launch<Fp16, Narrow>(call, params) : launch<Fp16, Wide>(call, params);
}

}  // namespace

int choose_skipping_columns_sm90(twell_problem const& problem, Device const& device) {
    // The fewer columns a CTA has, the more loads are in flight, but not in a second round of CTAs.
    bool const is_one_round = problem.tokens * num_slabs<Narrow>(problem) <=
                              device.num_multiprocessors * skipping_down::kCtasPerMultiprocessor;
    return is_one_round ? Narrow::kColumns : Wide::kColumns;
}

cudaError_t launch_skipping_down_sm90(Call const& call, SkippingLimits const& limits, uint16_t const* h,
                                      HiddenBytes const& bytes, int columns) {
    return has_scales(call.problem) ? launch<E4m3>(call, limits, h, bytes, columns)
                                    : launch<uint16_t>(call, limits, h, bytes, columns);
}

void list_skipping_down_sm90(Text& text) {
    add_line(text, label_of<Narrow>());
    add_line(text, label_of<Wide>());
}

}  // namespace twell

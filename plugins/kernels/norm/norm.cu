#include "norm/norm.h"
#include "norm/norm_rows.cuh"

namespace twell {
namespace {

constexpr Label kLabel = {"norm"};

}  // namespace

void list_norm(Text& text) { add_line(text, kLabel); }

cudaError_t launch_norm(NormCall const& call, Device const& device, cudaStream_t stream) {
    norm_rows::Params const params = {static_cast<uint16_t const*>(call.x), static_cast<uint16_t*>(call.normalised),
                                      call.norm(), call.columns};
    auto const kernel = call.dtype == TWELL_BF16 ? norm_rows::norm_kernel<Bf16> : norm_rows::norm_kernel<Fp16>;
    return launch_dependent(kLabel, kernel, params, dim3(static_cast<unsigned>(call.tokens)), norm_rows::kThreads, 0,
                            device, stream);
}

}  // namespace twell

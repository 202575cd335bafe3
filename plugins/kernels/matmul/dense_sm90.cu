#include "matmul/dense_launch_sm90.cuh"

namespace twell {
namespace {

namespace sm90 = dense_sm90;
using sm90::Projection;

template <Projection kProjection>
cudaError_t launch(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return call.problem.dtype == TWELL_BF16 ? sm90::launch<Bf16, uint16_t, kProjection>(call, rows, shape)
                                            : sm90::launch<Fp16, uint16_t, kProjection>(call, rows, shape);
}

}  // namespace

DenseShape choose_dense_up_sm90(twell_problem const& problem, Device const& device) {
    return sm90::choose_shape<uint16_t, Projection::kUp>(problem, 0, device);
}

DenseShape choose_dense_down_sm90(twell_problem const& problem, int64_t most_part_sums, Device const& device) {
    return sm90::choose_shape<uint16_t, Projection::kDown>(problem, most_part_sums, device);
}

bool dense_sm90_supports(twell_problem const& problem) {
    return problem.variant == TWELL_PLAIN || problem.d_model % sm90::BLOCK_K == 0;
}

cudaError_t launch_dense_up_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return launch<Projection::kUp>(call, rows, shape);
}

cudaError_t launch_dense_down_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return launch<Projection::kDown>(call, rows, shape);
}

void list_dense_sm90(Text& text) {
    sm90::list(text, sm90::kName<uint16_t, Projection::kUp>, sm90::TilingsOf<uint16_t, Projection::kUp>::Type());
    sm90::list(text, sm90::kName<uint16_t, Projection::kDown>, sm90::TilingsOf<uint16_t, Projection::kDown>::Type());
}

}  // namespace twell

// The kernels of dense_sm90.cuh with FP8 weights.
#include "matmul/dense_launch_sm90.cuh"

namespace twell {
namespace {

using dense_sm90::Projection;

template <Projection kProjection>
void list(Text& text) {
    dense_sm90::list(text, dense_sm90::kName<E4m3, kProjection>,
                     typename dense_sm90::TilingsOf<E4m3, kProjection>::Type());
}

}  // namespace

DenseShape choose_dense_up_bytes_sm90(twell_problem const& problem, Device const& device) {
    return dense_sm90::choose_shape<E4m3, Projection::kUp>(problem, 0, device);
}

DenseShape choose_dense_down_bytes_sm90(twell_problem const& problem, int64_t most_part_sums, Device const& device) {
    return dense_sm90::choose_shape<E4m3, Projection::kDown>(problem, most_part_sums, device);
}

cudaError_t launch_dense_up_bytes_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return dense_sm90::launch<E4m3, E4m3, Projection::kUp>(call, rows, shape);
}

cudaError_t launch_dense_down_bytes_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape) {
    return dense_sm90::launch<E4m3, E4m3, Projection::kDown>(call, rows, shape);
}

void list_dense_bytes_sm90(Text& text) {
    list<Projection::kUp>(text);
    list<Projection::kDown>(text);
}

}  // namespace twell

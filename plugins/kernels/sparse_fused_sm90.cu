#include <algorithm>

#include "problem.cuh"
#include "sparse_fused_sm90.cuh"
#include "sparse_fused_sm90.h"

namespace twell {
namespace {

namespace fused = sparse_fused_sm90;

// A slab of Wd is kColumns columns; where there are fewer than multiprocessors, several CTAs share out its rows of y.
struct Grid {
    int64_t num_slabs;
    int64_t num_parts;

    Grid(twell_problem const& problem, Device const& device)
        : num_slabs(ceil_div(problem.d_out, fused::kColumns)),
          num_parts(std::max<int64_t>(device.num_multiprocessors / num_slabs, 1)) {}
};

template <class Element>
cudaError_t launch(twell_problem const& problem, twell_tensors const& tensors, Schedule const& schedule,
                   Device const& device, cudaStream_t stream) {
    Grid const grid(problem, device);
    fused::Params params = {};
    params.up = sparse_up::params_for(problem, tensors, schedule);
    params.w_down = static_cast<uint16_t const*>(tensors.w_down);
    params.b_down = static_cast<uint16_t const*>(tensors.b_down);
    params.y = static_cast<uint16_t*>(tensors.y);
    params.d_ff = problem.d_ff;
    params.d_out = problem.d_out;
    params.tokens = static_cast<uint32_t>(problem.tokens);
    params.num_slabs = static_cast<uint32_t>(grid.num_slabs);
    params.num_parts = static_cast<uint32_t>(grid.num_parts);
    return launch_dependent(fused::up_down_kernel<Element>, params,
                            dim3(static_cast<unsigned>(grid.num_slabs * grid.num_parts)), fused::kThreads,
                            fused::shared_bytes(problem.d_ff), device, stream);
}

}  // namespace

bool sparse_fused_sm90_supports(twell_problem const& problem, Device const& device) {
    if (fused::shared_bytes(problem.d_ff) > device.max_shared_bytes) {
        return false;
    }
    Grid const grid(problem, device);
    int64_t const ctas = grid.num_slabs * grid.num_parts;
    int64_t const places = ceil_div(ctas, device.num_multiprocessors) * device.num_multiprocessors;
    constexpr int64_t kMostIdle = 4;  // a quarter of the places
    return (places - ctas) * kMostIdle <= places;
}

cudaError_t launch_sparse_fused_sm90(twell_problem const& problem, twell_tensors const& tensors,
                                     Schedule const& schedule, Device const& device, cudaStream_t stream) {
    return problem.dtype == TWELL_BF16 ? launch<Bf16>(problem, tensors, schedule, device, stream)
                                       : launch<Fp16>(problem, tensors, schedule, device, stream);
}

}  // namespace twell

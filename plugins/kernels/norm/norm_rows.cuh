// The norm of all rows, each by a CTA. It never reads its result: so no cache has an older value of that.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/norm.cuh"

namespace twell::norm_rows {

constexpr int kThreads = 256;

struct Params {
    uint16_t const* x;     // [tokens, columns]
    uint16_t* normalised;  // the same
    norm::Norm norm;
    int columns;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) norm_kernel(Params const params) {
    __shared__ float sums[2][kThreads / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    int64_t const row = int64_t{blockIdx.x} * params.columns;
    int const vectors = params.columns / kVector;
    int const first = static_cast<int>(threadIdx.x);
    auto const load = [&](int v) { return load_written_vector_if(params.x + row + int64_t{v} * kVector, v < vectors); };
    norm::SumOfRow<kThreads> sum_of_row = {sums};
    norm::Moments const moments = norm::find_moments<Element, 4>(
        params.norm, vectors, first, kThreads, load, [](int, uint4) {}, load, sum_of_row);
#pragma unroll 2
    for (int v = first; v < vectors; v += kThreads) {
        *reinterpret_cast<uint4*>(params.normalised + row + int64_t{v} * kVector) =
            norm::normalise<Element>(load(v), params.norm, norm::load_norm(params.norm, v, vectors), moments);
    }
}

}  // namespace twell::norm_rows

// The norm of all rows, each by a CTA. What is written is never read: so no cache has an older value of it.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/norm.cuh"

namespace twell::norm_rows {

constexpr int kThreads = 256;
// A thread's first vectors of a row, which stay in registers, as do those of weight and bias: these are read before the
// launch before has ended.
constexpr int kHeld = 2;

struct Params {
    uint16_t const* x;     // [tokens, columns]
    uint16_t* normalised;  // the same
    norm::Norm norm;
    int columns;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) norm_kernel(Params const params) {
    __shared__ float sums[2][kThreads / kWarpSize];
    int64_t const row = int64_t{blockIdx.x} * params.columns;
    int const vectors = params.columns / kVector;
    int const first = static_cast<int>(threadIdx.x);
    uint4 held[kHeld] = {};
    norm::NormVector of_columns[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        of_columns[i] = norm::load_norm(params.norm, first + i * kThreads, vectors);
    }
    wait_for_previous_launch();
    allow_dependent_launch();
    auto const load = [&](int v) { return load_written_vector_if(params.x + row + int64_t{v} * kVector, v < vectors); };
    auto const keep = [&](int v, uint4 vector) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            held[i] = v == first + i * kThreads ? vector : held[i];
        }
    };
    norm::SumOfRow<kThreads> sum_of_row = {sums};
    norm::Moments const moments =
        norm::find_moments<Element, 4>(params.norm, vectors, first, kThreads, load, keep, load, sum_of_row);
    auto const write = [&](int v, uint4 vector, norm::NormVector const& own) {
        *reinterpret_cast<uint4*>(params.normalised + row + int64_t{v} * kVector) =
            norm::normalise<Element>(vector, params.norm, own, moments);
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        if (int const v = first + i * kThreads; v < vectors) {
            write(v, held[i], of_columns[i]);
        }
    }
    for (int v = first + kHeld * kThreads; v < vectors; v += kThreads) {
        write(v, load(v), norm::load_norm(params.norm, v, vectors));
    }
}

}  // namespace twell::norm_rows

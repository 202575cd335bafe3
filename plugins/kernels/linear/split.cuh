// Copies the columns of a product to the outputs of the layers that it is of.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/vector.cuh"
#include "linear/layer.cuh"

namespace twell::linear_split {

constexpr int kThreads = 256;

struct Params {
    uint16_t const* y;  // [tokens, out]
    linear::Outputs outputs;
    int64_t tokens;
    int out;
};

__global__ void __launch_bounds__(kThreads) split_kernel(Params const params) {
    wait_for_previous_launch();
    allow_dependent_launch();
    int const vectors = params.out / kVector;
    int64_t const step = int64_t{gridDim.x} * kThreads;
    for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < params.tokens * vectors; i += step) {
        int const column = static_cast<int>(i % vectors) * kVector;
        *reinterpret_cast<uint4*>(params.outputs.place(i / vectors, column)) =
            load_written_vector(params.y + i * kVector);
    }
}

}  // namespace twell::linear_split

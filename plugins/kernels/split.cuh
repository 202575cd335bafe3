// Rows of y whose sums over the hot neurons were out of fp16's range, computed again as a whole: see split.h.
#ifndef TWELL_KERNELS_SPLIT_CUH_
#define TWELL_KERNELS_SPLIT_CUH_

#include "sum_again.cuh"
#include "up_down_generic.cuh"

namespace twell::split {

struct Params {
    up_down_generic::Params block;  // without a packed matrix
    uint16_t const* sums;           // [tokens, d_out]
    int64_t tokens;
};

// Whether a sum of a row is infinite, by one warp. Then y is not finite, and y has just been written: it is in L2.
__device__ __forceinline__ bool has_overflowed(Params const& params, int64_t row) {
    int const d_out = params.block.d_out;
    bool found = false;
#pragma unroll 4
    for (int column = static_cast<int>(threadIdx.x) % kWarpSize * kVector; column < d_out; column += kWarpColumns) {
        int64_t const place = row * d_out + column;
        if (is_finite<Fp16>(load_written_vector(params.block.y + place))) {
            continue;
        }
        float values[kVector];
        unpack<Fp16>(values, load_written_vector(params.sums + place));
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            found |= isinf(values[k]);
        }
    }
    return __any_sync(0xffffffffu, found);
}

// A CTA looks at as many rows as it has warps at once.
template <class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kMinBlocks) overflowed_kernel(Params const params) {
    __shared__ up_down_generic::SharedStorage shared;
    __shared__ bool overflowed[Cfg::kWarps];
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;

    allow_dependent_launch();
    wait_for_previous_launch();
    for (int64_t begin = int64_t{blockIdx.x} * Cfg::kWarps; begin < params.tokens;
         begin += int64_t{gridDim.x} * Cfg::kWarps) {
        bool const found = begin + warp < params.tokens && has_overflowed(params, begin + warp);
        if (threadIdx.x % kWarpSize == 0) {
            overflowed[warp] = found;
        }
        __syncthreads();
        for (int w = 0; w < Cfg::kWarps; ++w) {
            if (overflowed[w]) {
                up_down_generic::compute_row<Fp16, Cfg>(shared, params.block, begin + w);
            }
        }
        __syncthreads();
    }
}

}  // namespace twell::split

#endif  // TWELL_KERNELS_SPLIT_CUH_

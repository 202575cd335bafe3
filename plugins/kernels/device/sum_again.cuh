// Values of y that a matrix product cannot tell, summed again over the active neurons.
//
// A product with h rounded to the element type, and 0 for inactive neurons, is not finite in more cases than the
// contract allows: u or h may be out of the element type's range, and 0 times an inactive neuron's weight that is
// infinite or NaN is NaN.
#pragma once

#include "device/block.cuh"
#include "device/dot_rows.cuh"
#include "device/element.cuh"
#include "device/epilogue.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell {

template <class Element>
__device__ __forceinline__ bool is_finite(uint4 vector) {
    return (Element::is_not_finite2(vector.x) | Element::is_not_finite2(vector.y) | Element::is_not_finite2(vector.z) |
            Element::is_not_finite2(vector.w)) == 0;
}

// Bit i: element i is not finite.
template <class Element>
__device__ __forceinline__ uint32_t find_not_finite(uint4 vector) {
    uint32_t const words[4] = {vector.x, vector.y, vector.z, vector.w};
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t const found = Element::is_not_finite2(words[i]);
        bits |= ((found & 1) | (found >> 31 << 1)) << (2 * i);
    }
    return bits;
}

// The sum over a warp of each column's; a lane gets its own column's, the others 0.
__device__ __forceinline__ float sum_of_column(float (&sums)[kVector]) {
#pragma unroll 1
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], distance);
        }
    }
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        sum = static_cast<int>(threadIdx.x) % kWarpSize == k ? sums[k] : sum;
    }
    return sum;
}

// h of one neuron of a row of a gated block, where only z and g are rounded, by one warp; false if it is inactive.
template <class Element>
__device__ __forceinline__ bool compute_h(float& h, BlockTensors const& block, int64_t row, int neuron) {
    float g = 0.0f;
#pragma unroll 1
    for (int product = 0; product < 2; ++product) {
        bool const is_up = product != 0;
        uint16_t const* const bias = is_up ? block.b_up : block.b_gate;
        float sum = dot_row<Element, 1>(
            block.x + row * block.d_model,
            (is_up ? block.w_up : block.w_gate) + static_cast<int64_t>(neuron) * block.d_model, block.d_model);
        if (bias != nullptr) {
            sum += Element::to_float(bias[neuron]);
        }
        if (is_up) {
            h = g * (block.relu_on_up && sum <= 0.0f ? 0.0f : sum);  // NaN is kept
        } else {
            uint16_t const rounded = activate<Element>(
                sum, block.act.square, cut_of<Element>(block.act.cut, block.act.cuts, neuron, block.d_ff));
            if (!is_nonzero(rounded)) {
                return false;
            }
            g = Element::to_float(rounded);
        }
    }
    return true;
}

// y of a row in kVector columns, by one warp. h_row is the row's h, rounded: where that is finite and not 0, it is
// used. An inactive neuron's is 0, but so may be an active one's.
template <class Element>
__device__ __forceinline__ void sum_again(BlockTensors const& block, uint16_t const* h_row, int64_t row,
                                          int first_column) {
    constexpr uint32_t kAllColumns = (1u << kVector) - 1;
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sums[kVector] = {};  // over this lane's neurons
    float sum = 0.0f;          // of this lane's column, over neurons that the warp takes one by one
    uint32_t nans = 0;         // columns whose sum is a NaN by now, whatever else is added
    for (int begin = 0; begin < block.d_ff && nans != kAllColumns; begin += kWarpSize) {
        int const neuron = begin + lane;
        bool const exists = neuron < block.d_ff;
        float const h = Element::to_float(exists ? __ldcg(h_row + neuron) : uint16_t{0});
        uint4 const weights =
            exists ? load_vector(block.w_down + static_cast<int64_t>(neuron) * block.d_out + first_column)
                   : make_uint4(0, 0, 0, 0);
        uint32_t const bad_weights = find_not_finite<Element>(weights);
        bool const is_simple = fabsf(h) < INFINITY && (bad_weights & ~nans) == 0;
        if (is_simple && h != 0.0f) {
            float values[kVector];
            unpack<Element>(values, weights);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sums[k] = fmaf(h, values[k], sums[k]);
            }
        }
        uint32_t rest = __ballot_sync(0xffffffffu, !is_simple);
        for (; rest != 0 && nans != kAllColumns; rest &= rest - 1) {
            int const owner = __ffs(rest) - 1;
            float one_h = __shfl_sync(0xffffffffu, h, owner);
            if (one_h == 0.0f && (__shfl_sync(0xffffffffu, bad_weights, owner) & ~nans) == 0) {
                continue;  // it would change nothing
            }
            // Of a plain block h is g: exact, and 0 only if inactive.
            bool is_active = one_h != 0.0f;
            if (block.w_up != nullptr && !(is_active && fabsf(one_h) < INFINITY)) {
                is_active = compute_h<Element>(one_h, block, row, begin + owner);
            }
            if (is_active && lane < kVector) {
                int64_t const place = static_cast<int64_t>(begin + owner) * block.d_out + first_column + lane;
                sum = fmaf(one_h, Element::to_float(block.w_down[place]), sum);
            }
            nans = __ballot_sync(0xffffffffu, isnan(sum));
        }
    }
    sum += sum_of_column(sums);
    if (lane < kVector) {
        int const column = first_column + lane;
        float value[1] = {sum};
        add_bias_and_residual<Element>(value, block, row, column);
        block.y[row * block.d_out + column] = Element::from_float(value[0]);
    }
}

// The same with FP8 weights. h_row: h in FP8, -0 where an active neuron's is 0, 16 neurons in the order 0, 8, 1, 9,
// ...; worth h_scale[n / 128 * scale_stride] each, times the neuron's scale of w_down included, if it has one. No h
// overflows, so a NaN has to stay one.
__device__ __forceinline__ void sum_again(BlockTensorsOf<E4m3> const& block, bool is_bf16, uint8_t const* h_row,
                                          float const* h_scale, int64_t scale_stride, int64_t row, int first_column) {
    constexpr int kScaled = 128;  // neurons
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    float sums[kVector] = {};  // over this lane's neurons
    for (int neuron = lane; neuron < block.d_ff; neuron += kWarpSize) {
        int const within = neuron % 16;
        uint32_t const bits = __ldcg(h_row + (neuron - within + within % 8 * 2 + within / 8));
        if (bits != 0) {
            float h = Fp16::to_float2(e4m3_to_fp16_pair(bits)).x * __ldcg(h_scale + neuron / kScaled * scale_stride);
            if (block.down_blocks != 0) {
                h *=
                    block_scales_of(block.down_scale, block.down_blocks, neuron)[first_column / TWELL_SCALE_BLOCK_SIZE];
            }
            float values[kVector];
            unpack<Fp16>(values, load_vector(block.w_down + static_cast<int64_t>(neuron) * block.d_out + first_column));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sums[k] = fmaf(h, values[k], sums[k]);
            }
        }
    }
    float const sum = sum_of_column(sums);
    if (lane < kVector) {
        int const column = first_column + lane;
        with_element(is_bf16, [&](auto element) {
            using Element = decltype(element);
            float value[1] = {sum};
            add_bias_and_residual<Element>(value, block, row, column);
            block.y[row * block.d_out + column] = Element::from_float(value[0]);
        });
    }
}

}  // namespace twell

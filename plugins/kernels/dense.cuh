// Device code of the dense path that does not depend on how products are computed.
//
// Between its up and down projections there is h [dense rows, num_tiles * TWELL_TILE], in the element type. Which rows
// are dense is known on the device alone: grids are fixed, and CTAs that find nothing to do leave.
//   all rows   h takes the place of g in the spilled matrix, x is read where it is
//   a part     gather.cuh has copied x of the dense rows to where they are neighbours, and so is h
#ifndef TWELL_KERNELS_DENSE_CUH_
#define TWELL_KERNELS_DENSE_CUH_

#include "element.cuh"
#include "problem.cuh"
#include "schedule.h"
#include "vector.cuh"

namespace twell::dense {

enum class Projection { kUp, kDown };

// The rows, on the device. NOTE: the kernels before have let this one start when the schedule was there, so the count
// may be read before wait_for_previous_launch(). What L1 holds may be older.
struct View {
    int count;  // of dense rows
    bool all;

    __device__ __forceinline__ View(Schedule const& schedule, int64_t tokens, bool all_rows)
        : count(static_cast<int>(all_rows ? tokens : __ldcg(&schedule.header->heavy_count))), all(count == tokens) {}

    __device__ __forceinline__ int row_of(Schedule const& schedule, int position) const {
        return all ? position : static_cast<int>(schedule.row_order[position].row);
    }
};

// h of two neurons; where g is 0, so is h, whatever u is.
template <class Element>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t g_pair, uint32_t u_pair, bool relu_on_up) {
    float2 const g = Element::to_float2(g_pair);
    float2 u = Element::to_float2(u_pair);
    if (relu_on_up) {
        u.x = u.x <= 0.0f ? 0.0f : u.x;  // NaN is kept
        u.y = u.y <= 0.0f ? 0.0f : u.y;
    }
    return Element::from_float2(g.x == 0.0f ? 0.0f : g.x * u.x, g.y == 0.0f ? 0.0f : g.y * u.y);
}

// The same for eight.
template <class Element>
__device__ __forceinline__ uint4 multiply_chunk(uint4 g, uint4 u, bool relu_on_up) {
    return make_uint4(multiply_pair<Element>(g.x, u.x, relu_on_up), multiply_pair<Element>(g.y, u.y, relu_on_up),
                      multiply_pair<Element>(g.z, u.z, relu_on_up), multiply_pair<Element>(g.w, u.w, relu_on_up));
}

// Values of y that are not finite are summed again, over the active neurons. One reason is u or h out of the element
// type's range, another an inactive neuron's weight that is not finite: the contract has no such limit and ignores such
// a weight.

// What y is computed from.
struct Block {
    uint16_t const* x;       // [tokens, d_model]
    uint16_t const* w_gate;  // [d_ff, d_model]
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* w_up;    // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;    // [d_ff] or null
    uint16_t const* w_down;  // [d_ff, d_out]
    uint16_t const* b_down;  // [d_out] or null
    uint16_t* y;             // [tokens, d_out]
    int d_model;
    int d_ff;
    int d_out;
    bool relu_on_up;  // dReLU
    Activation act;
};

inline Block block_of(twell_problem const& problem, twell_tensors const& tensors) {
    auto const elements = [](void const* pointer) { return static_cast<uint16_t const*>(pointer); };
    return {elements(tensors.x),
            elements(tensors.w_gate),
            elements(tensors.b_gate),
            elements(tensors.w_up),
            elements(tensors.b_up),
            elements(tensors.w_down),
            elements(tensors.b_down),
            static_cast<uint16_t*>(tensors.y),
            problem.d_model,
            problem.d_ff,
            problem.d_out,
            problem.activation == TWELL_DRELU,
            activation_of(problem)};
}

// Columns that are summed together.
constexpr int kColumnsAgain = 2 * kVector;

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

// z or u of one neuron of a row, in fp32, by one warp.
template <class Element>
__device__ __forceinline__ float project(Block const& block, int64_t row, uint16_t const* weights, uint16_t const* bias,
                                         int neuron) {
    float sums[1];
    int const neurons[1] = {neuron};
    dot_rows<Element, 1>(sums, block.x + row * block.d_model, weights, neurons, block.d_model);
    return bias == nullptr ? sums[0] : sums[0] + Element::to_float(bias[neuron]);
}

// h of one neuron of a row of a gated block, where only z and g are rounded, by one warp; false if it is inactive.
template <class Element>
__device__ __forceinline__ bool compute_h(float& h, Block const& block, int64_t row, int neuron) {
    uint16_t const g = activate<Element>(project<Element>(block, row, block.w_gate, block.b_gate, neuron), block.act);
    if (!is_nonzero(g)) {
        return false;
    }
    float const u = project<Element>(block, row, block.w_up, block.b_up, neuron);
    h = Element::to_float(g) * (block.relu_on_up && u <= 0.0f ? 0.0f : u);  // NaN is kept
    return true;
}

// y of a row in kColumnsAgain columns, or up to d_out, by one warp. h_row is the row's h, rounded: where that is finite
// and not 0, it is used. An inactive neuron's is 0, but so may be an active one's.
template <class Element>
__device__ __forceinline__ void sum_again(Block const& block, uint16_t const* h_row, int64_t row, int first_column) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const num_columns = min(block.d_out - first_column, kColumnsAgain);
    uint32_t const all_columns = (1u << num_columns) - 1;
    float sums[kColumnsAgain] = {};  // over this lane's neurons
    float sum = 0.0f;                // of this lane's column, over neurons that the warp takes one by one
    uint32_t nans = 0;               // columns whose sum is a NaN by now, whatever else is added
    for (int begin = 0; begin < block.d_ff && nans != all_columns; begin += kWarpSize) {
        int const neuron = begin + lane;
        bool const exists = neuron < block.d_ff;
        uint16_t const bits = exists ? __ldcg(h_row + neuron) : uint16_t{0};
        float const h = Element::to_float(bits);
        uint16_t const* const weights = block.w_down + static_cast<int64_t>(neuron) * block.d_out + first_column;
        uint4 const zeros = make_uint4(0, 0, 0, 0);
        uint4 const vectors[2] = {exists ? load_vector(weights) : zeros,
                                  exists && num_columns > kVector ? load_vector(weights + kVector) : zeros};
        uint32_t bad_weights = find_not_finite<Element>(vectors[0]);
        bad_weights |= find_not_finite<Element>(vectors[1]) << kVector;
        bool const is_simple = fabsf(h) < INFINITY && (bad_weights & ~nans) == 0;
        if (is_simple && h != 0.0f) {
#pragma unroll
            for (int v = 0; v < 2; ++v) {
                float values[kVector];
                unpack<Element>(values, vectors[v]);
#pragma unroll
                for (int k = 0; k < kVector; ++k) {
                    sums[v * kVector + k] = fmaf(h, values[k], sums[v * kVector + k]);
                }
            }
        }
        uint32_t rest = __ballot_sync(0xffffffffu, !is_simple);
        for (; rest != 0 && nans != all_columns; rest &= rest - 1) {
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
            if (is_active && lane < num_columns) {
                int64_t const place = static_cast<int64_t>(begin + owner) * block.d_out + first_column + lane;
                sum = fmaf(one_h, Element::to_float(block.w_down[place]), sum);
            }
            nans = __ballot_sync(0xffffffffu, isnan(sum));
        }
    }
    // A lane keeps its column's.
#pragma unroll
    for (int k = 0; k < kColumnsAgain; ++k) {
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], distance);
        }
        sum += lane == k ? sums[k] : 0.0f;
    }
    if (lane < num_columns) {
        int const column = first_column + lane;
        sum += block.b_down == nullptr ? 0.0f : Element::to_float(block.b_down[column]);
        block.y[row * block.d_out + column] = Element::from_float(sum);
    }
}

}  // namespace twell::dense

#endif  // TWELL_KERNELS_DENSE_CUH_

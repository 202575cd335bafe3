// A block, as kernels see it.
#pragma once

#include <stdint.h>

#include "device/element.cuh"
#include "twell/twell.h"

namespace twell {

// The scales of weights that are stored as Stored: those of 16 bits have none.
template <class Stored>
struct ScalesOf {
    static constexpr bool kHasScales = false;
    static constexpr float const* gate_scale = nullptr;
    static constexpr float const* up_scale = nullptr;
    static constexpr float const* down_scale = nullptr;
    static constexpr int gate_up_blocks = 0;
    static constexpr int down_blocks = 0;
};
template <>
struct ScalesOf<E4m3> {
    static constexpr bool kHasScales = true;
    float const* gate_scale;  // of neuron n at n * gate_up_step, or of blocks
    float const* up_scale;
    float const* down_scale;  // of neuron n at n * down_step, or, if by_output, of column c at c, or of blocks
    int gate_up_step;         // 0: one for all
    int down_step;
    int gate_up_blocks;  // not 0: blocks of TWELL_SCALE_BLOCK_SIZE rows and columns have one each, in rows of that many
    int down_blocks;
    bool by_output;
};

// The scales of the blocks that a row has a part of; null where blocks have none. Of rows in one block it is the same.
__device__ __forceinline__ float const* block_scales_of(float const* scales, int blocks, int64_t row) {
    return blocks == 0 ? nullptr : scales + row / TWELL_SCALE_BLOCK_SIZE * blocks;
}

// The tensors and options of a block: the beginning of most kernels' parameters, which may use a part of them only.
// Stored: of weights, uint16_t for those of the element type, or E4m3.
template <class Stored>
struct BlockTensorsOf : ScalesOf<Stored> {
    uint16_t const* x;         // [tokens, d_model]
    Stored const* w_gate;      // [d_ff, d_model]
    uint16_t const* b_gate;    // [d_ff] or null
    Stored const* w_up;        // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;      // [d_ff] or null
    Stored const* w_down;      // [d_ff, d_out]
    uint16_t const* b_down;    // [d_out] or null
    uint16_t const* residual;  // [tokens, d_out] or null
    uint16_t* y;               // [tokens, d_out]
    int d_model;
    int d_ff;
    int d_out;
    bool relu_on_up;  // dReLU
    Activation act;
};
using BlockTensors = BlockTensorsOf<uint16_t>;

// A sum of products with a neuron's row of w_gate or w_up, times the row's scale: one of params.gate_scale or up_scale.
// Where blocks have scales, sums have been multiplied by them before.
template <class Params>
__device__ __forceinline__ float scale_sum(Params const& params, float const* scales, float sum, int neuron) {
    if constexpr (Params::kHasScales) {
        return params.gate_up_blocks != 0 ? sum : sum * scales[static_cast<int64_t>(neuron) * params.gate_up_step];
    } else {
        return sum;
    }
}

// h of a neuron, for products with its row of w_down: times the row's scale, unless columns or blocks have theirs.
template <class Params>
__device__ __forceinline__ float scale_h(Params const& params, float h, int neuron) {
    if constexpr (Params::kHasScales) {
        bool const has_one = !params.by_output && params.down_blocks == 0;
        return has_one ? h * params.down_scale[static_cast<int64_t>(neuron) * params.down_step] : h;
    } else {
        return h;
    }
}

// Sums of neighbouring columns of a row of y, times the columns' scales.
template <int kCount, class Params>
__device__ __forceinline__ void scale_outputs(float (&sums)[kCount], Params const& params, int column) {
    if constexpr (Params::kHasScales) {
        if (params.by_output) {
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                sums[k] *= params.down_scale[column + k];
            }
        }
    }
}

}  // namespace twell

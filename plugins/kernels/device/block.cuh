// What kernels know of a block.
#pragma once

#include <stdint.h>

#include "device/element.cuh"

namespace twell {

// The tensors and options of a block: the beginning of most kernels' parameters, which may use a part of them only.
struct BlockTensors {
    uint16_t const* x;         // [tokens, d_model]
    uint16_t const* w_gate;    // [d_ff, d_model]
    uint16_t const* b_gate;    // [d_ff] or null
    uint16_t const* w_up;      // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;      // [d_ff] or null
    uint16_t const* w_down;    // [d_ff, d_out]
    uint16_t const* b_down;    // [d_out] or null
    uint16_t const* residual;  // [tokens, d_out] or null
    uint16_t* y;               // [tokens, d_out]
    int d_model;
    int d_ff;
    int d_out;
    bool relu_on_up;  // dReLU
    Activation act;
};

}  // namespace twell

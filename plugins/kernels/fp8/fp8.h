// Steps of calls with FP8 weights beside the kernels of 16 bits: weights are widened for kernels that read 16 bits
// alone, and x is rounded for FP8 products.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "host/launch.h"
#include "norm/norm.h"
#include "twell/twell.h"

namespace twell {

// Weights in 16 bits.
struct Widened {
    uint16_t* w_gate;  // [d_ff, d_model]
    uint16_t* w_up;    // [d_ff, d_model], of a gated block
    uint16_t* w_down;  // [d_ff, d_out]
};

// A piece of the workspace for them.
Widened take_widened(twell_problem const& problem, unsigned char*& memory);

// The problem and the tensors with these in the place of the weights.
twell_problem widened_problem(twell_problem const& problem);
twell_tensors widened_tensors(twell_tensors const& tensors, Widened const& widened);

// Enqueues a kernel that writes them: each weight times its scale, rounded once. It does nothing where `needed`, a word
// in device memory that is final when the launch before lets this one start, is 0; null: it is needed.
cudaError_t launch_widen(Call const& call, Widened const& widened, uint32_t const* needed = nullptr);

// The same of one matrix [rows, columns], `kind` being the twell_scale of the scales, in the element type `dtype`.
cudaError_t launch_widen(void const* from, uint16_t* to, void const* scale, int32_t kind, int rows, int columns,
                         int32_t dtype, Device const& device, cudaStream_t stream);

// x in FP8, a scale a row: a row's largest magnitude becomes E4M3's largest number. If by_group, so does that of each
// TWELL_SCALE_BLOCK_SIZE neighbours.
struct Quantised {
    uint8_t* x;    // [tokens, d_model]
    float* scale;  // [tokens], by_group [d_model / TWELL_SCALE_BLOCK_SIZE, tokens]: x is about its number times that
    bool by_group;
};

Quantised take_quantised(twell_problem const& problem, unsigned char*& memory);

// Scales of weights as products take them: [rows, stride], of which `columns` are used. Where all rows have the same,
// `step` is 0.
struct CopiedScales {
    float const* from;  // row r at r * step
    float* to;
    int rows;
    int columns;
    int stride;
    int step;
};

// Enqueues a kernel that normalises and rounds rows.
cudaError_t launch_quantise(NormCall const& rows, Quantised const& quantised, Device const& device, cudaStream_t stream,
                            CopiedScales const& copied = {});

// The same for the x of a block.
cudaError_t launch_quantise(Call const& call, Quantised const& quantised);

// The rows of the configurations, a line each.
void list_fp8(Text& text);

}  // namespace twell

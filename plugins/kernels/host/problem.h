// Values that the launchers derive from a twell_problem.
#pragma once

#include <stddef.h>

#include "device/block.cuh"
#include "device/element.cuh"
#include "twell/twell.h"

namespace twell {

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Whether weights are in FP8, with scales.
inline bool has_scales(twell_problem const& problem) { return problem.weight_dtype == TWELL_E4M3; }

// Whether blocks of one of them have scales.
inline bool has_block_scales(twell_problem const& problem) {
    return problem.gate_up_scale == TWELL_SCALE_BLOCK || problem.down_scale == TWELL_SCALE_BLOCK;
}

// Blocks of TWELL_SCALE_BLOCK that rows or columns of a matrix make.
inline int64_t scale_blocks(int64_t count) { return ceil_div(count, TWELL_SCALE_BLOCK_SIZE); }

// Bytes of an element of them.
inline int64_t weight_bytes(twell_problem const& problem) { return has_scales(problem) ? 1 : 2; }

// Whether x is normalised first.
inline bool has_norm(twell_problem const& problem) { return problem.norm != TWELL_NORM_NONE; }

// Products of the gate projection.
inline float gate_products(twell_problem const& problem) {
    return static_cast<float>(problem.tokens) * static_cast<float>(problem.d_model) * static_cast<float>(problem.d_ff);
}

inline int num_tiles(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, TWELL_TILE)); }

// 32-bit words of one tile of one row: the count, then the slots.
inline int words_per_tile(twell_problem const& problem) { return TWELL_TILE / problem.compression; }

// Elements in a row of the spilled matrix, see pack.cuh.
inline int64_t spilled_stride(twell_problem const& problem) {
    return static_cast<int64_t>(num_tiles(problem)) * TWELL_TILE;
}

// Pieces of the workspace start at multiples of this.
constexpr size_t kWorkspaceAlignment = 256;

inline size_t aligned(size_t bytes) {
    return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// Cuts memory into pieces of kWorkspaceAlignment.
template <class T>
T* take(unsigned char*& memory, int64_t count) {
    T* const piece = reinterpret_cast<T*>(memory);
    memory += aligned(static_cast<size_t>(count) * sizeof(T));
    return piece;
}

// The bytes that take_all(memory) takes in all.
template <class TakeAll>
size_t bytes_taken(TakeAll take_all) {
    unsigned char* end = nullptr;
    take_all(end);
    return reinterpret_cast<size_t>(end);
}

inline size_t spilled_bytes(twell_problem const& problem) {
    return aligned(static_cast<size_t>(problem.tokens) * spilled_stride(problem) * sizeof(uint16_t));
}

inline Activation activation_of(twell_problem const& problem, twell_tensors const& tensors) {
    float const cut = problem.activation == TWELL_FATRELU ? problem.threshold : 0.0f;
    uint32_t const bits = problem.dtype == TWELL_BF16 ? Bf16::round_down(cut) : Fp16::round_down(cut);
    return {bits << 16 | bits, problem.activation == TWELL_RELU2, static_cast<float const*>(tensors.thresholds)};
}

inline void set_scales(ScalesOf<uint16_t>&, twell_problem const&, twell_tensors const&) {}
inline void set_scales(ScalesOf<E4m3>& scales, twell_problem const& problem, twell_tensors const& tensors) {
    scales.gate_scale = static_cast<float const*>(tensors.w_gate_scale);
    scales.up_scale = static_cast<float const*>(tensors.w_up_scale);
    scales.down_scale = static_cast<float const*>(tensors.w_down_scale);
    scales.gate_up_step = problem.gate_up_scale == TWELL_SCALE_NEURON ? 1 : 0;
    scales.down_step = problem.down_scale == TWELL_SCALE_NEURON ? 1 : 0;
    scales.gate_up_blocks =
        problem.gate_up_scale == TWELL_SCALE_BLOCK ? static_cast<int>(scale_blocks(problem.d_model)) : 0;
    scales.down_blocks = problem.down_scale == TWELL_SCALE_BLOCK ? static_cast<int>(scale_blocks(problem.d_out)) : 0;
    scales.by_output = problem.down_scale == TWELL_SCALE_OUTPUT;
}

template <class Stored>
void set_block(BlockTensorsOf<Stored>& block, twell_problem const& problem, twell_tensors const& tensors) {
    set_scales(block, problem, tensors);
    block.x = static_cast<uint16_t const*>(tensors.x);
    block.w_gate = static_cast<Stored const*>(tensors.w_gate);
    block.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    block.w_up = static_cast<Stored const*>(tensors.w_up);
    block.b_up = static_cast<uint16_t const*>(tensors.b_up);
    block.w_down = static_cast<Stored const*>(tensors.w_down);
    block.b_down = static_cast<uint16_t const*>(tensors.b_down);
    block.residual = static_cast<uint16_t const*>(tensors.residual);
    block.y = static_cast<uint16_t*>(tensors.y);
    block.d_model = problem.d_model;
    block.d_ff = problem.d_ff;
    block.d_out = problem.d_out;
    block.relu_on_up = problem.activation == TWELL_DRELU;
    block.act = activation_of(problem, tensors);
}

}  // namespace twell

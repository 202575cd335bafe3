// C API of experts: feed-forward blocks. Each token uses a few of them, and in these only active neurons. See twell.h
// for the conventions.
//
//   y[t] = sum over i of weights[t, i] * down_e(h), e = ids[t, i],  h = act(gate_e x[t]) * up_e x[t], or act(up_e x[t])
//
// Results are bitwise repeatable: sums have a fixed order.
#ifndef TWELL_TWELL_EXPERTS_H_
#define TWELL_TWELL_EXPERTS_H_

#include "twell/twell.h"

#if defined(__cplusplus)
extern "C" {
#endif

#define TWELL_MAX_EXPERTS 1024
#define TWELL_MAX_EXPERTS_OF_TOKEN 64
// Pairs of a token and an expert of it, in one call.
#define TWELL_MAX_EXPERT_PAIRS 1048576
#define TWELL_MAX_EXPERT_D_FF 32768
#define TWELL_MAX_EXPERT_WIDTH 65536

// Beside those of twell_scale: one scale for each expert.
#define TWELL_SCALE_EXPERT 3

// A matrix of each expert: rows of neighbouring elements. Strides are in elements, and multiples of 16 bytes.
typedef struct {
    int64_t expert;  // from an expert to the next one
    int64_t row;     // from a row to the next one: at least a row's elements
} twell_expert_strides;

typedef struct {
    uint32_t struct_bytes;      // sizeof(twell_experts_problem)
    int32_t d_model;            // columns of x: a positive multiple of 8, or with TWELL_E4M3 of 16
    int64_t tokens;             // rows of x and y; 0 does nothing
    int32_t experts;            // 1 to TWELL_MAX_EXPERTS
    int32_t top;                // experts of a token: 1 to TWELL_MAX_EXPERTS_OF_TOKEN
    int32_t d_ff;               // neurons of an expert: 1 to TWELL_MAX_EXPERT_D_FF
    int32_t d_out;              // columns of y: as d_model
    int32_t dtype;              // twell_dtype of x and y
    int32_t weight_dtype;       // twell_dtype of gate, up and down: that of dtype, or TWELL_E4M3
    int32_t variant;            // twell_variant
    int32_t activation;         // twell_activation
    float threshold;            // TWELL_FATRELU only, >= 0
    int32_t id_bytes;           // of an element of ids: 4 or 8
    int32_t gate_up_scale;      // twell_scale of gate_scale and up_scale, not TWELL_SCALE_OUTPUT, or TWELL_SCALE_EXPERT
    int32_t down_scale;         // twell_scale of down_scale, or TWELL_SCALE_EXPERT
    twell_expert_strides gate;  // 0 for TWELL_PLAIN
    twell_expert_strides up;
    twell_expert_strides down;
} twell_experts_problem;

// Device pointers, 16-byte aligned. Inputs may overlap each other, and none may overlap y.
typedef struct {
    uint32_t struct_bytes;  // sizeof(twell_experts_tensors)
    uint32_t reserved;      // 0
    void const* x;          // [tokens, d_model]
    void const* gate;       // [experts, d_ff, d_model], null for TWELL_PLAIN
    void const* up;         // [experts, d_ff, d_model]
    void const* down;       // [experts, d_ff, d_out]
    void const* ids;        // [tokens, top]: a number outside of 0 to experts - 1 takes no part
    void const* weights;    // [tokens, top], fp32
    void* y;                // [tokens, d_out]
    // Of weights of TWELL_E4M3, in fp32: [], [experts], [experts, d_ff] or, of down alone, [experts, d_out]; else null.
    void const* gate_scale;  // null for TWELL_PLAIN
    void const* up_scale;
    void const* down_scale;
    void const* thresholds;  // of TWELL_FATRELU with threshold 0, [experts, d_ff] in fp32, or null; see twell_tensors
} twell_experts_tensors;

// As twell_validate, twell_workspace_bytes, twell_mlp and twell_describe, for experts.
TWELL_API char const* twell_experts_validate(twell_experts_problem const* problem);
TWELL_API size_t twell_experts_workspace_bytes(twell_experts_problem const* problem);
TWELL_API cudaError_t twell_experts(twell_experts_problem const* problem, twell_experts_tensors const* tensors,
                                    void* workspace, size_t workspace_bytes, cudaStream_t stream);
TWELL_API size_t twell_experts_describe(twell_experts_problem const* problem, twell_device const* device, char* text,
                                        size_t size);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_TWELL_EXPERTS_H_

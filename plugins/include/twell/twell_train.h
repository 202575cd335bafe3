// C API of a training step: the forward that keeps what the backward needs, and the backward. See twell.h for the
// conventions; docs/format.md says how the pairs are laid out, docs/training.md what the parts are for.
//
// A block's neurons are in two parts. The hot ones are computed densely: their products are the caller's, between them
// twell_train_hot runs. The others are sparse: twell_train_forward and _backward compute all of
// them. `d_ff` of a problem is the number of neurons of the part; `neurons` says which rows of the weights they have.
//
// All results are bitwise repeatable. Nothing is dropped: rows whose pairs find no place are computed again, slowly.
#ifndef TWELL_TWELL_TRAIN_H_
#define TWELL_TWELL_TRAIN_H_

#include "twell/twell.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Columns of x and y in training; more are refused.
#define TWELL_TRAIN_MAX_WIDTH 65536

// Data that a forward keeps, in device memory.
typedef struct {
    int64_t* row_begin;  // [tokens + 2]
    uint32_t* words;     // [capacity]
    uint16_t* ups;       // [capacity]; null in a plain block
    int64_t capacity;    // up to 2^31 - 1
} twell_train_pairs;

typedef struct {
    uint32_t struct_bytes;   // sizeof(twell_train_forward_tensors)
    uint32_t reserved;       // 0
    int32_t const* neurons;  // [d_ff]: neuron j has row neurons[j] of w_up, b_up and w_down; null: row j. Of w_gate and
                             // b_gate it has row j
    twell_train_pairs pairs;
    void const* hot;  // [tokens, d_out] or null: what the hot neurons add to y
    float* row_l1;    // [tokens]: the sum of |h|
    int32_t* counts;  // by row of the weights: the number of tokens for which the neuron is active is added to it
} twell_train_forward_tensors;

typedef struct {
    uint32_t struct_bytes;   // sizeof(twell_train_backward_tensors)
    uint32_t reserved;       // 0
    int32_t const* neurons;  // as above, but of all weights
    twell_train_pairs pairs;
    void const* dy;    // [tokens, d_out]
    float const* dl1;  // the gradient of the mean over tokens of the sums of |h|, on the device; null: 0
    void const* hot;   // [tokens, d_model] or null: what the hot neurons add to dx
    void* dx;          // [tokens, d_model], or null: not wanted
    // Rows of the part's neurons are written; null, all of them: not wanted. Biases may be null alone.
    void* w_gate;
    void* b_gate;
    void* w_up;
    void* b_up;
    void* w_down;
} twell_train_backward_tensors;

// Rows to copy: from row from_rows[i] of a matrix of 16-bit elements to row to_rows[i] of another one. Null: row i.
typedef struct {
    void const* from;
    void* to;
    int32_t const* from_rows;  // [rows]
    int32_t const* to_rows;    // [rows]
    int32_t rows;
    int32_t width;  // elements of a row, a multiple of 8
} twell_train_copy;
#define TWELL_TRAIN_MAX_COPIES 4

// Of the hot neurons, d_ff of the problem. z is rounded and includes the bias.
typedef struct {
    uint32_t struct_bytes;   // sizeof(twell_train_hot_tensors)
    uint32_t reserved;       // 0
    int64_t stride;          // elements from a row to the next one of z and u, and of dz and du: d_ff or 2 d_ff
    void const* z;           // [tokens, d_ff]
    void const* u;           // [tokens, d_ff] in a gated block, else null
    void* h;                 // [tokens, d_ff], its rows one behind the other, as those of dh
    int32_t const* neurons;  // [d_ff] or null, as above: of counts
    int32_t* counts;         // forward: as above
    float* l1_parts;         // forward: [twell_train_hot_parts]: their sum is that of |h| of all tokens and neurons
    void const* dh;          // backward: [tokens, d_ff]: dy . w_down
    void* dz;                // backward: the gradients of z,
    void* du;                // and of u
    float const* dl1;        // backward: as above
} twell_train_hot_tensors;

// Bytes of device workspace.
TWELL_API size_t twell_train_forward_bytes(twell_problem const* problem, int64_t capacity);
TWELL_API size_t twell_train_backward_bytes(twell_problem const* problem, int64_t capacity);

// y = residual + hot + the sum of the part's neurons + b_down, rounded once. Reads x, weights, biases and residual of
// `tensors`, and writes y.
TWELL_API cudaError_t twell_train_forward(twell_problem const* problem, twell_tensors const* tensors,
                                          twell_train_forward_tensors const* forward, void* workspace,
                                          size_t workspace_bytes, cudaStream_t stream);

// The gradients of x and weights. Reads x, weights and biases of `tensors`; residual and y may be null.
TWELL_API cudaError_t twell_train_backward(twell_problem const* problem, twell_tensors const* tensors,
                                           twell_train_backward_tensors const* backward, void* workspace,
                                           size_t workspace_bytes, cudaStream_t stream);

TWELL_API int64_t twell_train_hot_parts(twell_problem const* problem);
// A forward if dh is null, else a backward.
TWELL_API cudaError_t twell_train_hot(twell_problem const* problem, twell_train_hot_tensors const* hot,
                                      cudaStream_t stream);

// Copies rows that the caller multiplies: up to TWELL_TRAIN_MAX_COPIES copies, and none reads rows that another one
// writes.
TWELL_API cudaError_t twell_train_copy_rows(twell_train_copy const* copies, int32_t count, cudaStream_t stream);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_TWELL_TRAIN_H_

// C API of the TwELL kernels: raw device pointers, dimensions and a stream. No torch, no TensorRT.
//
// One feed-forward block over `tokens` rows:
//   gated:  y = residual + (act(x Wg^T + bg) * (x Wu^T + bu)) Wd + bd
//   plain:  y = residual +  act(x Wg^T + bg)                  Wd + bd
// With a norm, x on the right is norm(x).
// All matrices are row-major and contiguous. `w_down` is stored neuron-major, [d_ff, d_out]: the transpose of
// torch.nn.Linear.weight. For a plain block `w_gate`/`b_gate` are the up projection, whose output is activated.
//
// Every function only enqueues work on the given stream: no allocation, no synchronisation, no host read-back, so it
// is safe under CUDA-graph capture. Results are bitwise repeatable from run to run.
#ifndef TWELL_TWELL_H_
#define TWELL_TWELL_H_

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define TWELL_API __attribute__((visibility("default")))

// Columns in one TwELL tile. The most neurons: of a plain block with 16-bit weights, and of all other blocks, where 16
// bits count them.
#define TWELL_TILE 256
#define TWELL_MAX_D_FF 1048576
#define TWELL_MAX_PACKED_D_FF 65536
// Rows in one call: the grid of (row block, tile) pairs has to fit CUDA's launch limits.
#define TWELL_MAX_TOKENS 536870912
// Columns of x, and of y: they are counted, and rounded up, in 31 bits.
#define TWELL_MAX_WIDTH 1073741824

// The version of this header: of structs, enums and promises. Within it the library only grows; see docs/c-api.md.
#define TWELL_API_VERSION 2

// TWELL_E4M3, OCP's FP8 (a NaN, no infinity, at most 448), is for weights alone.
typedef enum { TWELL_BF16 = 0, TWELL_FP16 = 1, TWELL_E4M3 = 2 } twell_dtype;

// How many scales a weight matrix of TWELL_E4M3 has: its values times their scales are the weights. One for all, one
// for each neuron (row of the matrix as it is stored), one for each output (column; of w_down alone), or one for each
// block of TWELL_SCALE_BLOCK_SIZE rows and as many columns, the last ones of which may be cut off:
// [ceil(rows / TWELL_SCALE_BLOCK_SIZE), ceil(columns / TWELL_SCALE_BLOCK_SIZE)], not of twell_encode.
typedef enum {
    TWELL_SCALE_TENSOR = 0,
    TWELL_SCALE_NEURON = 1,
    TWELL_SCALE_OUTPUT = 2,
    TWELL_SCALE_BLOCK = 4  // 3 is TWELL_SCALE_EXPERT
} twell_scale;
#define TWELL_SCALE_BLOCK_SIZE 128

typedef enum { TWELL_GATED = 0, TWELL_PLAIN = 1 } twell_variant;

// z is the pre-activation rounded to the element type, as the dense block would store it. NaN is kept.
typedef enum {
    TWELL_RELU = 0,     // max(z, 0)
    TWELL_RELU2 = 1,    // max(z, 0)^2, rounded to the element type
    TWELL_FATRELU = 2,  // z where z > threshold, or the neuron's of thresholds (compared in fp32), else 0
    TWELL_DRELU = 3     // gated only: max(gate, 0) * max(up, 0)
} twell_activation;

// The norm of each row of x, over its columns, in fp32; the result is rounded once to the element type.
typedef enum {
    TWELL_NORM_NONE = 0,
    TWELL_NORM_RMS = 1,   // x / sqrt(mean(x^2) + eps) * norm_weight
    TWELL_NORM_LAYER = 2  // (x - mean(x)) / sqrt(var(x) + eps) * norm_weight + norm_bias
} twell_norm;

// Both structs below begin with their size in the caller's header. So library and caller may be of different versions
// within this second version of the API: of a shorter struct the missing fields count as 0, and of a longer one the
// bytes that this library does not know must be 0. docs/c-api.md says what else is promised.
typedef struct {
    uint32_t struct_bytes;  // sizeof(twell_problem)
    int32_t d_model;        // columns of x: a positive multiple of 8, up to TWELL_MAX_WIDTH
    int64_t tokens;         // rows of x and y: 0 to TWELL_MAX_TOKENS; 0 does nothing
    int32_t d_ff;           // neurons: 1 to TWELL_MAX_D_FF, or TWELL_MAX_PACKED_D_FF
    int32_t d_out;          // columns of y: a positive multiple of 8, up to TWELL_MAX_WIDTH
    int32_t compression;    // 1, 2, 4 or 8: a tile of a row owns TWELL_TILE / compression words
    int32_t dtype;          // twell_dtype of x, residual, y and biases
    int32_t weight_dtype;   // twell_dtype of w_gate, w_up and w_down: that of dtype, or TWELL_E4M3
    int32_t variant;        // twell_variant
    int32_t activation;     // twell_activation
    float threshold;        // TWELL_FATRELU only, >= 0
    int32_t hot;            // 0 to d_ff: compute the first `hot` neurons densely if that gains; see twell_mlp
    int32_t reserved;       // 0
    // twell_scale of w_gate_scale and w_up_scale, and of w_down_scale; 0 if weights have the type of x.
    int32_t gate_up_scale;
    int32_t down_scale;
    int32_t norm;  // twell_norm of x, for twell_mlp alone
    float eps;     // of the norm, >= 0
} twell_problem;

// A GPU, in the words of cudaDeviceGetAttribute.
typedef struct {
    int32_t major;            // cudaDevAttrComputeCapabilityMajor
    int32_t minor;            // cudaDevAttrComputeCapabilityMinor
    int32_t multiprocessors;  // cudaDevAttrMultiProcessorCount
    int32_t shared_bytes;     // cudaDevAttrMaxSharedMemoryPerBlockOptin
    int32_t l2_bytes;         // cudaDevAttrL2CacheSize
} twell_device;

// Device pointers, 16-byte aligned. Biases and residual may be null. `w_up` and `b_up` are null for TWELL_PLAIN.
// Inputs may overlap each other; the residual may be x. None may overlap y.
typedef struct {
    uint32_t struct_bytes;  // sizeof(twell_tensors)
    uint32_t reserved;      // 0
    void const* x;          // [tokens, d_model]
    void const* w_gate;     // [d_ff, d_model]
    void const* b_gate;     // [d_ff]
    void const* w_up;       // [d_ff, d_model]
    void const* b_up;       // [d_ff]
    void const* w_down;     // [d_ff, d_out]
    void const* b_down;     // [d_out]
    void const* residual;   // [tokens, d_out]: added to y in fp32, before y is rounded
    void* y;                // [tokens, d_out]
    // Scales of weights of TWELL_E4M3, in fp32, as many as gate_up_scale and down_scale say; else null. w_up_scale is
    // null for TWELL_PLAIN.
    void const* w_gate_scale;
    void const* w_up_scale;
    void const* w_down_scale;
    // Of TWELL_FATRELU with threshold 0, [d_ff] in fp32, or null: a threshold for each neuron, in the place of the one.
    // A value below 0, or a NaN, counts as 0.
    void const* thresholds;
    void const* norm_weight;  // [d_model] or null: ones; null without a norm
    void const* norm_bias;    // [d_model] or null: zeros; null but in a layer norm
} twell_tensors;

// Numbers of the table of routes (plugins/kernels/README.md) and of the kernels: where other kernels take over.
typedef struct {
    uint32_t struct_bytes;      // sizeof(twell_limits), set by the caller
    int32_t one_or_two_tokens;  // the most tokens of one_or_two_tokens
    // The most tokens * d_model * d_ff of a dense_block, if hot neurons are not or are computed apart (split).
    int64_t dense_block_products;
    int64_t dense_block_products_if_split;
    int32_t few_tokens;          // the most tokens of few_tokens for any layer,
    int32_t few_tokens_generic;  // without the kernels of compute capability 9.0,
    int32_t few_tokens_sm90;     // and at all
    int32_t narrow_gated;        // the most columns of x and y of blocks that are dense for any more tokens
    int32_t narrow_plain;
    int32_t dense_block_tokens;  // up to which blocks are dense with any products
    int32_t dense_block_tokens_if_split;
    int32_t fewest_hot;    // `hot` of a call that is split, in bf16
    int32_t most_hot;      // neurons that many_tokens finds to be hot by itself
    int32_t chunk_tokens;  // the fewest tokens of the up projection by chunks
    // The most tokens * d_model * d_ff, or tokens, of a dense_block with weights of TWELL_E4M3, unless all are hot.
    int32_t dense_block_tokens_scaled;
    int64_t dense_block_products_scaled;
} twell_limits;

// Returns a text about wrong dimensions or options, or null when the problem can be run.
TWELL_API char const* twell_validate(twell_problem const* problem);

// Returns a text about wrong tensors of a valid problem, which twell_mlp refuses, too, or null. Looks at the pointers,
// not at the data behind them.
TWELL_API char const* twell_validate_tensors(twell_problem const* problem, twell_tensors const* tensors);

// Fills in as many bytes of `limits` as struct_bytes says; numbers that this library does not know become 0.
TWELL_API void twell_get_limits(twell_limits* limits);

// Bytes of the packed gate activations, uint32 [tokens, ceil(d_ff / TWELL_TILE) * (TWELL_TILE / compression)].
TWELL_API size_t twell_packed_bytes(twell_problem const* problem);

// Bytes of device workspace that twell_mlp needs, also by `hot`; it never shrinks when `tokens` grows. With weights in
// FP8 it is that of the current device's compute capability; without a device, of any one.
TWELL_API size_t twell_workspace_bytes(twell_problem const* problem);

// The two functions below return cudaErrorInvalidValue for a problem that twell_validate refuses, a missing pointer,
// a residual that overlaps y, a scale of 16-bit weights, thresholds of another activation, a weight or bias of no norm
// that has one, or too small a workspace, cudaErrorMisalignedAddress for a misaligned pointer, cudaErrorNotSupported on
// a device below compute capability 8.0, and else what the launch returned. The current device must be the stream's.

// The gate projection alone, with 16-bit weights and no norm: packed = TwELL(act(x Wg^T + bg)). Reads x, w_gate, b_gate
// and thresholds.
// `packed` is 16-byte aligned. Word 0 of a (row, tile) is the true number of non-zeros, of the rounded values; a NaN
// counts. The other TWELL_TILE / compression - 1 words are slots: they hold the non-zeros in ascending column order,
// the global column index in the low 16 bits and the value's bits in the high 16 bits. Words past the last non-zero are
// not written. Of a tile with more non-zeros than slots only word 0 is meaningful.
TWELL_API cudaError_t twell_gate(twell_problem const* problem, twell_tensors const* tensors, uint32_t* packed,
                                 cudaStream_t stream);

// The whole block. `workspace` is device memory, 256-byte aligned; its contents before and after have no meaning. The
// device, `tokens` and the layer decide which kernels run; twell_describe names them. All of them promise:
//  - a neuron that does not fire adds exactly 0, whatever its rows of w_up and w_down hold;
//  - a NaN in a row of x reaches all of that row of y, a NaN in the residual its place of y;
//  - of finite inputs, only z and y can overflow, where they leave the range of the element type; u and h cannot;
//  - the same call on the same device gives the same bits.
// With weights of TWELL_E4M3 they compute with these dequantized. Some kernels round x, for the gate alone, to E4M3
// with a scale for each row; then an infinity in a row of x counts as a NaN; twell_describe says which ("quantise").
// With a norm they may begin to read all inputs but x and the residual before the launches before have ended: so the
// launch just before must not be one that writes them.
// They may differ, and so may the last bits of a row between calls with other `tokens` or other rows beside it, in
//  - the order of sums;
//  - whether u and h are rounded to the element type, as a dense block does, or kept in fp32.
// `hot` is a hint about speed, where the neurons that fire most often come first: calls with many tokens may compute
// the first `hot`, rounded down to a multiple of 8 unless it is d_ff, as a dense block, and the others as without it.
// The sum of that block is rounded to the element type once more than without the hint. Calls in which it cannot gain
// ignore it, and so does fp16, where sums over these neurons alone may be out of range.
TWELL_API cudaError_t twell_mlp(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                                size_t workspace_bytes, cudaStream_t stream);

// Says which kernels twell_mlp launches for a problem: a line "route NAME", then one for each launch, in order, "KERNEL
// [NAME=VALUE ...] | grid=XxY threads=N shared=BYTES [NAME=VALUE ...]". The part before the bar names the compiled
// kernel, the rest describes the launch; "scratch=USED/MOST" counts elements of a piece of the workspace. Without
// tokens the text is empty. `device` describes the GPU, which need not be there; null is the current one. Writes at
// most `size` bytes to `text`, the last one 0, and returns how many bytes the whole text takes; 0 for a problem that
// twell_validate refuses, or a device below compute capability 8.0 or none.
TWELL_API size_t twell_describe(twell_problem const* problem, twell_device const* device, char* text, size_t size);

// ---- a linear layer with its norm before it and its residual behind it ----
//
//   y = residual + norm(x) W^T + b
//
// for steps of few tokens, where the time is that of reading W: up to 16 tokens one kernel does all of it. Several
// weights that read the same x stand in W one below the other, and each has an output: see `splits`. With `choose` the
// result is the index of the largest element of each row of y as y would be written, rounded: of equals the first one,
// and the first NaN where there is one. Up to 16 tokens y itself is written nowhere.

// The most outputs.
#define TWELL_MAX_SPLITS 4

// The rules of struct_bytes above hold for these, too.
typedef struct {
    uint32_t struct_bytes;  // sizeof(twell_linear_problem)
    int32_t in;             // columns of x: a positive multiple of 8, up to TWELL_MAX_WIDTH
    int64_t tokens;         // rows of x and y: 0 to TWELL_MAX_TOKENS; 0 does nothing
    int32_t out;            // rows of the weight: a positive multiple of 8, up to TWELL_MAX_WIDTH
    int32_t dtype;          // twell_dtype of all else than the weight and its scale
    int32_t weight_dtype;   // twell_dtype of the weight: that of dtype, or TWELL_E4M3
    int32_t weight_scale;  // twell_scale of weight_scale: TENSOR, NEURON, which is a row, or BLOCK; 0 for other weights
    int32_t norm;          // twell_norm
    float eps;             // >= 0
    int32_t splits[TWELL_MAX_SPLITS];  // columns of each output, multiples of 8 whose sum is out; all 0: one output
    int32_t choose;    // 1: of each row of y the index of the largest element instead; 0 with several outputs
    int32_t reserved;  // 0
} twell_linear_problem;

// Device pointers, 16-byte aligned; optional ones that are missing are null. Inputs may overlap each other, none may
// overlap y.
typedef struct {
    uint32_t struct_bytes;      // sizeof(twell_linear_tensors)
    uint32_t reserved;          // 0
    void const* x;              // [tokens, in]
    void const* weight;         // [out, in]: torch.nn.Linear's
    void const* bias;           // [out] or null
    void const* norm_weight;    // [in] or null: ones; null without a norm
    void const* norm_bias;      // [in] or null: zeros; null but in a layer norm
    void const* residual;       // [tokens, out] or null: added in fp32; null with several outputs
    void const* weight_scale;   // of TWELL_E4M3, in fp32, as many as problem.weight_scale says; else null
    void* y[TWELL_MAX_SPLITS];  // [tokens, splits[i]] each; with choose int64 [tokens]
} twell_linear_tensors;

// As twell_validate, twell_workspace_bytes, twell_mlp and twell_describe, for a linear layer. twell_linear promises
// that a NaN in a row of x reaches all of that row of y, and the same bits for the same call on the same device; and it
// returns the same errors.
TWELL_API char const* twell_linear_validate(twell_linear_problem const* problem);
TWELL_API size_t twell_linear_workspace_bytes(twell_linear_problem const* problem);
TWELL_API cudaError_t twell_linear(twell_linear_problem const* problem, twell_linear_tensors const* tensors,
                                   void* workspace, size_t workspace_bytes, cudaStream_t stream);
TWELL_API size_t twell_linear_describe(twell_linear_problem const* problem, twell_device const* device, char* text,
                                       size_t size);

// Version of this library, "major.minor.patch".
TWELL_API char const* twell_version(void);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_TWELL_H_

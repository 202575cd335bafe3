// C API of libtwell_attention.so: attention by cuDNN, without TensorRT, for tests and for programs of one's own.
//
//     y[b, i, h] = sum over j of softmax over j of (scale * q[b, i, h] . k[b, j, g]) * v[b, j, g],  g = h * kv_heads /
//     heads
//
// j runs over the keys that query i sees: of the sequence's first `lengths[b]` keys (all without lengths), those up to
// i if causal. Tensors are contiguous, on the current device and start at multiples of 16 bytes. Scores and
// sums are in fp32; the weights are rounded to the element type before they meet v.
//
// And a key-value cache: `twell_append_caches` writes new keys and values into it, and attention with `cached` reads
// them there.
#ifndef TWELL_ATTENTION_H_
#define TWELL_ATTENTION_H_

#include <twell/twell.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define TWELL_MAX_HEAD_WIDTH 256

typedef struct {
    int64_t batch;     // sequences: at least 0
    int64_t tokens;    // queries of a sequence: at least 0
    int64_t keys;      // keys of a sequence: at least 1; equal to tokens if causal
    int32_t heads;     // of q: a multiple of kv_heads
    int32_t kv_heads;  // of k and v: at least 1
    int32_t width;     // of a head: a multiple of 8, up to TWELL_MAX_HEAD_WIDTH
    int32_t dtype;     // twell_dtype of q, k, v and y
    int32_t causal;    // 0 or 1: whether query i sees keys 0 to i only
    int32_t lengths;   // 0 or 1: whether there are lengths
    float scale;       // finite
    // 0 or 1: whether k and v are caches, [batch, kv_heads, keys, width], which each sequence has used in part. Then
    // causal and lengths are 0, tokens is at most keys, and sequence b has query_lengths[b] queries and lengths[b]
    // keys: its last query sees all of these keys, the one before all but the last, and so on. y is 0 behind the last
    // query.
    int32_t cached;
    // 0 or 1, only if cached: whether the queries are rotated first. Each row x becomes x * cosines + (-x2, x1) *
    // sines, rounded once, where x1 and x2 are its halves; width is a multiple of 16.
    int32_t rotated;
    // 0 or 1, only if cached: whether k and v are in FP8, E4M3, and stand for their numbers times key_scale and
    // value_scale, which are positive and finite. These are read only then.
    int32_t fp8;
    float key_scale;
    float value_scale;
} twell_attention_problem;

typedef struct {
    void const* q;                 // [batch, tokens, heads, width]
    void const* k;                 // [batch, keys, kv_heads, width]
    void const* v;                 // [batch, keys, kv_heads, width]
    int32_t const* lengths;        // [batch], each 1 to keys; read if the problem has lengths or is cached
    void* y;                       // [batch, tokens, heads, width]
    int32_t const* query_lengths;  // [batch], each 1 to tokens and to lengths[b]; read if the problem is cached
    void const* cosines;           // [batch, tokens, width]; read if the problem is rotated
    void const* sines;             // likewise
} twell_attention_tensors;

// A problem made ready for the device that was current when it was made, with a separate cuDNN handle: to be used by
// one thread at a time. It must outlive the CUDA graphs that were captured from it.
typedef struct twell_attention_plan twell_attention_plan;

// Returns null for a good problem, else a static text about the fault.
TWELL_API char const* twell_attention_validate(twell_attention_problem const* problem);

// Returns a plan, or null with the reason in message[0 .. message_bytes), cut to fit and ended by a NUL. Loads cuDNN if
// no libcudnn.so.9 is in the process: $TWELLC_CUDNN, else the one that the dynamic linker finds.
TWELL_API twell_attention_plan* twell_attention_create(twell_attention_problem const* problem, char* message,
                                                       size_t message_bytes);

// Null is allowed.
TWELL_API void twell_attention_destroy(twell_attention_plan* plan);

// Bytes of device memory that a run needs, from a multiple of 256 on.
TWELL_API size_t twell_attention_workspace_bytes(twell_attention_plan const* plan);

// Puts the work on `stream` and returns 0; else 1, with the reason in message. Allocates nothing, waits for nothing and
// may be captured into a CUDA graph.
TWELL_API int32_t twell_attention_run(twell_attention_plan* plan, twell_attention_tensors const* tensors,
                                      void* workspace, cudaStream_t stream, char* message, size_t message_bytes);

typedef struct {
    int64_t batch;        // sequences: at least 0
    int64_t tokens;       // new ones of a sequence: at least 0
    int64_t length;       // places of a cache: at least 1
    int32_t kv_heads;     // at least 1
    int32_t key_bytes;    // of one head's new key: a positive multiple of 2
    int32_t value_bytes;  // of one head's value: likewise
    // 0 or 1: whether the new keys are rotated first, as queries are. Then key_bytes is a multiple of 32, value_bytes
    // one of 16, and all tensors start at multiples of 16 bytes.
    int32_t rotated;
    int32_t dtype;  // twell_dtype of new keys and values, read if they are rotated or the caches in FP8
    // 0 or 1: whether the caches are in FP8, E4M3. Then each new number is divided by its scale, which is positive and
    // finite, and rounded; beyond the range it becomes the largest number, and NaN stays NaN. key_bytes and value_bytes
    // are multiples of 16, and all tensors start at multiples of 16 bytes.
    int32_t fp8;
    float key_scale;
    float value_scale;
} twell_append_problem;

typedef struct {
    void* keys;              // [batch, kv_heads, length, width], contiguous as all are; of bytes in FP8
    void* values;            // likewise
    void const* new_keys;    // [batch, tokens, kv_heads, width]
    void const* new_values;  // likewise
    int32_t const* starts;   // [batch]: the place of each sequence's first new token
    int32_t const* counts;   // [batch]: how many new tokens count, 0 to tokens
    void const* cosines;     // [batch, tokens, width]; read if the problem is rotated
    void const* sines;       // likewise
} twell_append_tensors;

// Writes the new keys and values of each sequence b to places starts[b] to starts[b] + counts[b] - 1 of the sequence's
// caches, on `stream`; tokens outside of a cache are left out. Returns a cudaError_t: cudaErrorInvalidValue for a
// problem out of range. Needs no cuDNN, allocates nothing, waits for nothing and may be captured into a CUDA graph.
TWELL_API int32_t twell_append_caches(twell_append_problem const* problem, twell_append_tensors const* tensors,
                                      cudaStream_t stream);

// The version of the library, such as "0.1.0".
TWELL_API char const* twell_attention_version(void);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_ATTENTION_H_

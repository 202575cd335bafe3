// C API of features: the active neurons of a row with their values, as lists, instead of a dense row; and the decoder
// of lists. See twell.h for the conventions and docs/features.md for the use.
//
// All results are bitwise repeatable.
#ifndef TWELL_TWELL_FEATURES_H_
#define TWELL_TWELL_FEATURES_H_

#include "twell/twell.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Problems are of TWELL_PLAIN. twell_encode takes w_gate of TWELL_E4M3, too, with w_gate_scale, on compute capability
// 9.0 if d_model is a multiple of 128: else it returns cudaErrorNotSupported. It rounds x to E4M3, as twell_mlp may.

// Bytes of workspace of twell_encode: the tiles of twell.h's packed format of a part of the rows, and if keeps_all is 1
// a dense matrix for those that overflow, with a fifth of the rows at once. 0 for a problem that is none.
TWELL_API size_t twell_encode_bytes(twell_problem const* problem, int32_t keeps_all);

// The non-zeros of act(x Wg^T + bg) as lists, in ascending order of neurons; a NaN counts. Reads x, w_gate, b_gate and
// thresholds. Row r has the entries from offsets[r] up to offsets[r + 1]; offsets, [tokens + 2], ends with the number
// of entries that are not there: those from `capacity` on, which is 1 at least, and unless keeps_all is 1 those of
// tiles that have overflowed. If it is not 0, encode again with a capacity of offsets[tokens], or keeps_all 1. indices
// and values, the latter of the element type, are [capacity]. The workspace is 256-byte aligned. Errors: as of
// twell_mlp.
TWELL_API cudaError_t twell_encode(twell_problem const* problem, twell_tensors const* tensors, int32_t keeps_all,
                                   int32_t* indices, void* values, int64_t* offsets, int64_t capacity, void* workspace,
                                   size_t workspace_bytes, cudaStream_t stream);

// y = residual + lists Wd + bd: the sum over a row's list of value * w_down[index], in fp32, rounded once. Row r has
// the entries from offsets[r] up to offsets[r + 1] of the `capacity` that there are; if offsets is null, each row has
// as many, one row behind the other. A value of 0 adds exactly 0. An index that is not 0 to d_ff - 1 makes its row NaN,
// unless its value is 0; so does a list that ends behind the capacity.
// Of the problem tokens, d_ff, d_out and dtype count; reads w_down, b_down and residual, which must not overlap y.
TWELL_API cudaError_t twell_decode(twell_problem const* problem, twell_tensors const* tensors, int32_t const* indices,
                                   void const* values, int64_t const* offsets, int64_t capacity, cudaStream_t stream);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_TWELL_FEATURES_H_

// C API of features: the active neurons of a row with their values, as lists, instead of a dense row; and what lists
// decode to. See twell.h for the conventions and docs/features.md for what it is for.
//
// All results are bitwise repeatable.
#ifndef TWELL_TWELL_FEATURES_H_
#define TWELL_TWELL_FEATURES_H_

#include "twell/twell.h"

#if defined(__cplusplus)
extern "C" {
#endif

// Problems are of TWELL_PLAIN with 16-bit weights. A row is listed in groups of up to TWELL_MAX_PACKED_D_FF neurons:
// so many, or 0 for a problem that is none.
TWELL_API int32_t twell_feature_groups(twell_problem const* problem);

// Bytes of workspace of twell_encode: the tiles of twell.h's packed format, and if keeps_all is 1 a dense matrix for
// those that overflow, five times as much in all. 0 for a problem that is none.
TWELL_API size_t twell_encode_bytes(twell_problem const* problem, int32_t keeps_all);

// The first step: act(x Wg^T + bg), of which it leaves the non-zeros in the workspace, 256-byte aligned; a NaN counts.
// Reads x, w_gate, b_gate and thresholds. counts, [tokens, groups]: how many a group has, -1 if one of its tiles has
// overflowed; then encode again with keeps_all 1. tokens * groups is at most 2^31 - 1. Errors: as of twell_mlp.
TWELL_API cudaError_t twell_encode(twell_problem const* problem, twell_tensors const* tensors, int32_t keeps_all,
                                   int64_t* counts, void* workspace, size_t workspace_bytes, cudaStream_t stream);

// The second step writes the lists, in ascending order of neurons. begins, [tokens, groups]: the place of each group's
// first entry. indices and values, the latter of the element type, have a place for each entry.
TWELL_API cudaError_t twell_list_features(twell_problem const* problem, int32_t keeps_all, int64_t const* begins,
                                          int32_t* indices, void* values, void* workspace, size_t workspace_bytes,
                                          cudaStream_t stream);

// y = residual + lists Wd + bd: the sum over a row's list of value * w_down[index], in fp32, rounded once. Row r has
// the entries from offsets[r] up to offsets[r + 1], int64 [tokens + 1]; if offsets is null, per_row entries from r *
// per_row on. A value of 0 adds exactly 0. An index that is not 0 to d_ff - 1 makes its row NaN, unless its value is 0.
// Of the problem tokens, d_ff, d_out and dtype count; reads w_down, b_down and residual, which must not overlap y.
TWELL_API cudaError_t twell_decode(twell_problem const* problem, twell_tensors const* tensors, int32_t const* indices,
                                   void const* values, int64_t const* offsets, int64_t per_row, cudaStream_t stream);

#if defined(__cplusplus)
}  // extern "C"
#endif

#endif  // TWELL_TWELL_FEATURES_H_

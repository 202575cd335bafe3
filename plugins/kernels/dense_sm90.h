// The dense path for rows with many active neurons, on compute capability 9.0. Built when the architectures include
// sm_90a.
#ifndef TWELL_KERNELS_DENSE_SM90_H_
#define TWELL_KERNELS_DENSE_SM90_H_

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// Which rows are dense, in device memory; 0 to max_dense_part(problem) of them, or all.
struct DenseRows {
    int32_t const* order;  // [tokens], the dense ones first; not read when all are dense
    int32_t const* count;  // [1]
    uint8_t* failed;       // [tokens], written for each dense row: 1 where the sparse path must compute it again
};

// Whether the kernels can compute this problem; on which device, the caller knows.
bool dense_sm90_supports(twell_problem const& problem);

int64_t max_dense_part(twell_problem const& problem);

// Bytes of scratch memory that launch_dense_sm90 needs; never shrinks when `tokens` grows.
size_t dense_scratch_bytes(twell_problem const& problem);

// Enqueues kernels that compute y of the dense rows from x and what launch_gate left in `packed` and `spilled`; they do
// nothing where no row is dense. `scratch` is 256-byte aligned. Overwrites `spilled` when all rows are dense.
cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                              uint16_t* spilled, DenseRows const& rows, void* scratch, int num_multiprocessors,
                              cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_DENSE_SM90_H_

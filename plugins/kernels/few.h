// The whole block for few tokens: kernels of their own, in which a token's work is spread over the device.
#ifndef TWELL_KERNELS_FEW_H_
#define TWELL_KERNELS_FEW_H_

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// Whether launch_few suits the problem.
bool is_few(twell_problem const& problem);

// Bytes of scratch memory that launch_few needs for the problem; never shrinks when `tokens` grows, also where is_few
// no longer holds.
size_t few_scratch_bytes(twell_problem const& problem);

// Enqueues the whole block. Same preconditions as launch_gate; `scratch` is 256-byte aligned. The packed matrix is not
// always written.
cudaError_t launch_few(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, void* scratch,
                       cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_FEW_H_

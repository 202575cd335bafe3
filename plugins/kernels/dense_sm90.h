// The dense path on compute capability 9.0. Built when the architectures include sm_90a.
#ifndef TWELL_KERNELS_DENSE_SM90_H_
#define TWELL_KERNELS_DENSE_SM90_H_

#include "dense.h"

namespace twell {

// Whether the kernels can compute this problem; on which device, the caller knows.
bool dense_sm90_supports(twell_problem const& problem);

GuardModel dense_sm90_model(twell_problem const& problem, Device const& device);

struct DenseMemory {
    uint32_t const* packed;
    uint16_t* spilled;
    uint16_t* h_part;  // [max_dense_part, num_tiles * TWELL_TILE]
    uint16_t* x_part;  // [max_dense_part, d_model]
};

cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, DenseMemory const& memory,
                              Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_DENSE_SM90_H_

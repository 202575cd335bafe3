// The norm of all rows of x, as a kernel: for kernels that do not normalise them themselves.
#pragma once

#include "device/norm.cuh"
#include "host/launch.h"
#include "host/trace.h"

namespace twell {

struct NormCall {
    void const* x;       // [tokens, columns]
    void* normalised;    // the same; null for other kernels that begin with the norm
    void const* weight;  // [columns] or null
    void const* bias;    // [columns] or null
    float eps;
    int32_t kind;   // twell_norm
    int32_t dtype;  // twell_dtype
    int32_t columns;
    int64_t tokens;

    norm::Norm norm() const {
        return {static_cast<uint16_t const*>(weight), static_cast<uint16_t const*>(bias), eps, kind};
    }
};

// That of a block.
inline NormCall norm_of(Call const& call, void* normalised) {
    twell_problem const& problem = call.problem;
    return {call.tensors.x, normalised,    call.tensors.norm_weight, call.tensors.norm_bias, problem.eps,
            problem.norm,   problem.dtype, problem.d_model,          problem.tokens};
}

// The row of the configuration, a line.
void list_norm(Text& text);

cudaError_t launch_norm(NormCall const& call, Device const& device, cudaStream_t stream);

}  // namespace twell

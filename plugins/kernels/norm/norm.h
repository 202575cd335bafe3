// The norm of all rows of x, as a kernel: for kernels that do not normalise them themselves.
#pragma once

#include "host/launch.h"
#include "host/trace.h"

namespace twell {

struct NormCall {
    void const* x;       // [tokens, columns]
    void* normalised;    // the same
    void const* weight;  // [columns] or null
    void const* bias;    // [columns] or null
    float eps;
    int32_t kind;   // twell_norm
    int32_t dtype;  // twell_dtype
    int32_t columns;
    int64_t tokens;
};

// The row of the configuration, a line.
void list_norm(Text& text);

cudaError_t launch_norm(NormCall const& call, Device const& device, cudaStream_t stream);

}  // namespace twell

// What the C functions demand of a caller, and how they say so.
#pragma once

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Why a call is refused: the error that it returns, and the same in words. No text: it is not.
struct Refusal {
    cudaError_t error = cudaSuccess;
    char const* text = nullptr;
};

// Copy a caller's structs, of which an older or a newer version may have fewer or more fields, and check them. Which
// pointers there have to be depends on the problem. encodes: what reads FP8 weights of any number of neurons.
Refusal read_problem(twell_problem& copy, twell_problem const* problem, bool encodes = false);
Refusal read_gate_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);
Refusal read_decode_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);
Refusal read_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);

// Memory of a call, which must be there and aligned.
Refusal check_memory(void const* memory, size_t alignment);

// The current device, or one that is described; it must have kernels.
cudaError_t find_device(Device& device);
cudaError_t find_device(twell_device const* described, Device& device);

}  // namespace twell

// Checks of a caller's arguments for the C functions, with their messages.
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

// Copy a caller's structs, which may have fewer or more fields in an older or a newer version, and check them. The
// problem decides which pointers there have to be. encodes: for kernels that read FP8 weights of any number of neurons.
Refusal read_problem(twell_problem& copy, twell_problem const* problem, bool encodes = false);
Refusal read_gate_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);
Refusal read_decode_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);
Refusal read_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem);

// Of a matrix or a vector.
constexpr size_t kPointerAlignment = 16;

inline bool is_aligned(void const* pointer, size_t alignment = kPointerAlignment) {
    return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// Memory of a call, which must be there and aligned.
Refusal check_memory(void const* memory, size_t alignment);

// The current device, or one that is described; it must have kernels.
cudaError_t find_device(Device& device);
cudaError_t find_device(twell_device const* described, Device& device);

}  // namespace twell

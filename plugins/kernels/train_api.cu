// The C API of a training step: checks what the caller gave, then launches. No device code here.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <initializer_list>

#include "check.h"
#include "host/problem.h"
#include "host/structs.h"
#include "training/training.h"
#include "twell/twell_train.h"

namespace {

using twell::Device;

constexpr int64_t kMostPairs = INT32_MAX;

// A caller's struct of this header, which begins with struct_bytes and reserved.
template <class Struct>
bool read(Struct& copy, Struct const* given) {
    return given != nullptr && twell::read_struct(copy, *given, sizeof(Struct)) == twell::StructFault::kNone &&
           copy.reserved == 0;
}

bool are_there(std::initializer_list<void const*> pointers) {
    return std::all_of(pointers.begin(), pointers.end(), [](void const* pointer) { return pointer != nullptr; });
}

bool are_vectors(std::initializer_list<void const*> pointers) {
    return std::all_of(pointers.begin(), pointers.end(),
                       [](void const* pointer) { return twell::is_aligned(pointer); });
}

cudaError_t read_trained_problem(twell_problem& copy, twell_problem const* problem) {
    TWELL_TRY(twell::read_problem(copy, problem).error);
    bool const fits = copy.d_model <= TWELL_TRAIN_MAX_WIDTH && copy.d_out <= TWELL_TRAIN_MAX_WIDTH &&
                      !twell::has_scales(copy) && !twell::has_norm(copy) && copy.d_ff <= TWELL_MAX_PACKED_D_FF;
    return fits ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t read_trained_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem) {
    TWELL_TRY(twell::read_tensors(copy, tensors, problem).error);
    return copy.thresholds == nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

bool are_pairs(twell_problem const& problem, twell_train_pairs const& pairs) {
    return pairs.capacity >= 0 && pairs.capacity <= kMostPairs && pairs.row_begin != nullptr &&
           (pairs.capacity == 0 ||
            (pairs.words != nullptr && (pairs.ups != nullptr) == (problem.variant == TWELL_GATED)));
}

}  // namespace

extern "C" {

size_t twell_train_forward_bytes(twell_problem const* problem, int64_t capacity) {
    twell_problem copy;
    return read_trained_problem(copy, problem) == cudaSuccess && copy.tokens > 0
               ? twell::train_forward_bytes(copy, capacity)
               : 0;
}

size_t twell_train_backward_bytes(twell_problem const* problem, int64_t capacity) {
    twell_problem copy;
    return read_trained_problem(copy, problem) == cudaSuccess && copy.tokens > 0
               ? twell::train_backward_bytes(copy, capacity)
               : 0;
}

cudaError_t twell_train_forward(twell_problem const* problem, twell_tensors const* tensors,
                                twell_train_forward_tensors const* forward, void* workspace, size_t workspace_bytes,
                                cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    twell_train_forward_tensors copy;
    TWELL_TRY(read_trained_problem(problem_copy, problem));
    if (!read(copy, forward) || problem_copy.tokens == 0 || !are_pairs(problem_copy, copy.pairs) ||
        !are_there({copy.row_l1, copy.counts}) ||
        workspace_bytes < twell::train_forward_bytes(problem_copy, copy.pairs.capacity)) {
        return cudaErrorInvalidValue;
    }
    TWELL_TRY(read_trained_tensors(tensors_copy, tensors, problem_copy));
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    if (!are_vectors({copy.hot})) {
        return cudaErrorMisalignedAddress;
    }
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_train_forward({problem_copy, tensors_copy, device, stream}, copy, workspace);
}

cudaError_t twell_train_backward(twell_problem const* problem, twell_tensors const* tensors,
                                 twell_train_backward_tensors const* backward, void* workspace, size_t workspace_bytes,
                                 cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    twell_train_backward_tensors copy;
    TWELL_TRY(read_trained_problem(problem_copy, problem));
    if (!read(copy, backward) || tensors == nullptr || problem_copy.tokens == 0 ||
        !are_pairs(problem_copy, copy.pairs) || copy.dy == nullptr ||
        workspace_bytes < twell::train_backward_bytes(problem_copy, copy.pairs.capacity)) {
        return cudaErrorInvalidValue;
    }
    bool const gated = problem_copy.variant == TWELL_GATED;
    if (copy.w_gate != nullptr && (copy.w_down == nullptr || (gated && copy.w_up == nullptr))) {
        return cudaErrorInvalidValue;
    }
    // The block's y is not read: dy takes its place, so that one function checks all tensors.
    twell_tensors with_y = *tensors;
    with_y.y = const_cast<void*>(copy.dy);
    with_y.residual = nullptr;
    TWELL_TRY(read_trained_tensors(tensors_copy, &with_y, problem_copy));
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    if (!are_vectors({copy.dy, copy.hot, copy.dx, copy.w_gate, copy.w_up, copy.w_down})) {
        return cudaErrorMisalignedAddress;
    }
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_train_backward({problem_copy, tensors_copy, device, stream}, copy, workspace);
}

int64_t twell_train_hot_parts(twell_problem const* problem) {
    twell_problem copy;
    return read_trained_problem(copy, problem) == cudaSuccess ? twell::train_hot_parts(copy.tokens, copy.d_ff) : 0;
}

cudaError_t twell_train_hot(twell_problem const* problem, twell_train_hot_tensors const* hot, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_train_hot_tensors copy;
    TWELL_TRY(read_trained_problem(problem_copy, problem));
    if (!read(copy, hot) || problem_copy.tokens == 0 || !are_there({copy.z, copy.h})) {
        return cudaErrorInvalidValue;
    }
    bool const gated = problem_copy.variant == TWELL_GATED;
    bool const has_outputs = copy.dh == nullptr ? are_there({copy.counts, copy.l1_parts})
                                                : copy.dz != nullptr && (copy.du != nullptr) == gated;
    if ((copy.u != nullptr) != gated || !has_outputs || copy.stride < problem_copy.d_ff) {
        return cudaErrorInvalidValue;
    }
    // Where rows begin at vectors, all of them must.
    bool const has_vectors = problem_copy.d_ff % twell::kVector == 0;
    if (has_vectors &&
        (copy.stride % twell::kVector != 0 || !are_vectors({copy.z, copy.u, copy.h, copy.dh, copy.dz, copy.du}))) {
        return cudaErrorMisalignedAddress;
    }
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell_tensors const none = {};
    return twell::launch_train_hot({problem_copy, none, device, stream}, copy);
}

cudaError_t twell_train_copy_rows(twell_train_copy const* copies, int32_t count, cudaStream_t stream) {
    if (copies == nullptr || count < 0 || count > TWELL_TRAIN_MAX_COPIES) {
        return cudaErrorInvalidValue;
    }
    for (int i = 0; i < count; ++i) {
        twell_train_copy const& copy = copies[i];
        if (!are_there({copy.from, copy.to}) || copy.rows < 0 || copy.width <= 0 || copy.width % twell::kVector != 0) {
            return cudaErrorInvalidValue;
        }
        if (!are_vectors({copy.from, copy.to})) {
            return cudaErrorMisalignedAddress;
        }
    }
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_copy_rows(copies, count, device, stream);
}

}  // extern "C"

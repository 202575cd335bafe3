// The C API of features: checks what the caller gave, then calls the launchers. No device code here.
#include <stdint.h>

#include "check.h"
#include "features/features.h"
#include "host/problem.h"
#include "twell/twell_features.h"

namespace {

using twell::Device;

cudaError_t read_encoder(twell_problem& copy, twell_problem const* problem) {
    TWELL_TRY(twell::read_problem(copy, problem, true).error);
    return copy.variant == TWELL_PLAIN && !twell::has_norm(copy) ? cudaSuccess : cudaErrorInvalidValue;
}

bool is_flag(int32_t value) { return value == 0 || value == 1; }

}  // namespace

extern "C" {

size_t twell_encode_bytes(twell_problem const* problem, int32_t keeps_all) {
    twell_problem copy;
    return read_encoder(copy, problem) == cudaSuccess ? twell::encode_bytes(copy, keeps_all == 1) : 0;
}

cudaError_t twell_encode(twell_problem const* problem, twell_tensors const* tensors, int32_t keeps_all,
                         int32_t* indices, void* values, int64_t* offsets, int64_t capacity, void* workspace,
                         size_t workspace_bytes, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(read_encoder(problem_copy, problem));
    if (!is_flag(keeps_all) || offsets == nullptr || capacity < 1 || indices == nullptr || values == nullptr ||
        workspace_bytes < twell::encode_bytes(problem_copy, keeps_all == 1)) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::read_gate_tensors(tensors_copy, tensors, problem_copy).error);
    if (twell::has_scales(problem_copy) != (tensors_copy.w_gate_scale != nullptr)) {
        return cudaErrorInvalidValue;
    }
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell::EncodedLists const lists = {indices, static_cast<uint16_t*>(values), offsets, capacity};
    return twell::launch_encode({problem_copy, tensors_copy, device, stream}, keeps_all == 1, lists, workspace);
}

cudaError_t twell_decode(twell_problem const* problem, twell_tensors const* tensors, int32_t const* indices,
                         void const* values, int64_t const* offsets, int64_t capacity, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(read_encoder(problem_copy, problem));
    if (twell::has_scales(problem_copy) || capacity < 0 ||
        (capacity > 0 && (indices == nullptr || values == nullptr))) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    if (offsets == nullptr && capacity % problem_copy.tokens != 0) {
        return cudaErrorInvalidValue;
    }
    TWELL_TRY(twell::read_decode_tensors(tensors_copy, tensors, problem_copy).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell::FeatureLists const lists = {indices, static_cast<uint16_t const*>(values), offsets, capacity};
    return twell::launch_decode({problem_copy, tensors_copy, device, stream}, lists);
}

}  // extern "C"

// The C API of features: checks what the caller gave, then calls the launchers. No device code here.
#include <stdint.h>

#include "check.h"
#include "features/features.h"
#include "host/problem.h"
#include "twell/twell_features.h"

namespace {

using twell::Device;

constexpr int64_t kMostCtas = INT32_MAX;

cudaError_t read_problem(twell_problem& copy, twell_problem const* problem) {
    TWELL_TRY(twell::read_problem(copy, problem).error);
    bool const is_known = copy.variant == TWELL_PLAIN && !twell::has_scales(copy) &&
                          copy.tokens <= kMostCtas / twell::num_feature_groups(copy);
    return is_known ? cudaSuccess : cudaErrorInvalidValue;
}

bool is_flag(int32_t value) { return value == 0 || value == 1; }

}  // namespace

extern "C" {

int32_t twell_feature_groups(twell_problem const* problem) {
    twell_problem copy;
    return read_problem(copy, problem) == cudaSuccess ? twell::num_feature_groups(copy) : 0;
}

size_t twell_encode_bytes(twell_problem const* problem, int32_t keeps_all) {
    twell_problem copy;
    return read_problem(copy, problem) == cudaSuccess ? twell::encode_bytes(copy, keeps_all == 1) : 0;
}

cudaError_t twell_encode(twell_problem const* problem, twell_tensors const* tensors, int32_t keeps_all, int64_t* counts,
                         void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(read_problem(problem_copy, problem));
    if (!is_flag(keeps_all) || counts == nullptr ||
        workspace_bytes < twell::encode_bytes(problem_copy, keeps_all == 1)) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::read_gate_tensors(tensors_copy, tensors, problem_copy).error);
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_encode({problem_copy, tensors_copy, device, stream}, keeps_all == 1, counts, workspace);
}

cudaError_t twell_list_features(twell_problem const* problem, int32_t keeps_all, int64_t const* begins,
                                int32_t* indices, void* values, void* workspace, size_t workspace_bytes,
                                cudaStream_t stream) {
    twell_problem copy;
    TWELL_TRY(read_problem(copy, problem));
    if (!is_flag(keeps_all) || begins == nullptr || indices == nullptr || values == nullptr ||
        workspace_bytes < twell::encode_bytes(copy, keeps_all == 1)) {
        return cudaErrorInvalidValue;
    }
    if (copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell_tensors const none = {};
    return twell::launch_list({copy, none, device, stream}, keeps_all == 1, begins, indices,
                              static_cast<uint16_t*>(values), workspace);
}

cudaError_t twell_decode(twell_problem const* problem, twell_tensors const* tensors, int32_t const* indices,
                         void const* values, int64_t const* offsets, int64_t per_row, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(read_problem(problem_copy, problem));
    if (per_row < 0 || (offsets != nullptr && per_row != 0)) {
        return cudaErrorInvalidValue;
    }
    bool const may_be_empty = offsets != nullptr || per_row == 0;
    if (!may_be_empty && (indices == nullptr || values == nullptr)) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::read_decode_tensors(tensors_copy, tensors, problem_copy).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell::FeatureLists const lists = {indices, static_cast<uint16_t const*>(values), offsets, per_row};
    return twell::launch_decode({problem_copy, tensors_copy, device, stream}, lists);
}

}  // extern "C"

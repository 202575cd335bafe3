// The C API: checks what the caller gave, then calls the launcher of a route. No device code here.
#include <cuda_runtime_api.h>
#include <string.h>

#include <algorithm>

#include "check.h"
#include "features/features.h"
#include "host/problem.h"
#include "many_tokens/many_tokens.h"
#include "routes.h"
#include "twell/twell.h"

#if !defined(TWELL_VERSION)
#error "TWELL_VERSION must be the project's version as a string literal"
#endif

namespace {

using twell::Call;
using twell::Device;
using twell::Refusal;

constexpr size_t kPackedAlignment = 16;

}  // namespace

extern "C" {

char const* twell_validate(twell_problem const* problem) {
    twell_problem copy;
    return twell::read_problem(copy, problem).text;
}

char const* twell_validate_tensors(twell_problem const* problem, twell_tensors const* tensors) {
    twell_problem problem_copy;
    twell_tensors copy;
    Refusal const refusal = twell::read_problem(problem_copy, problem);
    return refusal.text != nullptr ? refusal.text : twell::read_tensors(copy, tensors, problem_copy).text;
}

void twell_get_limits(twell_limits* limits) {
    uint32_t const bytes = limits->struct_bytes;
    twell_limits known = twell::limits();
    known.struct_bytes = bytes;
    memset(limits, 0, bytes);
    memcpy(limits, &known, std::min<size_t>(bytes, sizeof(known)));
}

size_t twell_packed_bytes(twell_problem const* problem) {
    twell_problem copy;
    if (twell::read_problem(copy, problem).text != nullptr || twell::is_wide(copy)) {
        return 0;
    }
    return static_cast<size_t>(copy.tokens) * twell::num_tiles(copy) * twell::words_per_tile(copy) * sizeof(uint32_t);
}

size_t twell_workspace_bytes(twell_problem const* problem) {
    twell_problem copy;
    if (twell::read_problem(copy, problem).text != nullptr || copy.tokens == 0) {
        return 0;
    }
    Device device = {};
    bool const asks = twell::has_scales(copy) && twell::find_device(device) == cudaSuccess;
    return twell::workspace_bytes(copy, asks ? &device : nullptr);
}

cudaError_t twell_gate(twell_problem const* problem, twell_tensors const* tensors, uint32_t* packed,
                       cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(twell::read_problem(problem_copy, problem).error);
    if (tensors == nullptr || twell::has_scales(problem_copy) || twell::has_norm(problem_copy) ||
        twell::is_wide(problem_copy)) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::read_gate_tensors(tensors_copy, tensors, problem_copy).error);
    TWELL_TRY(twell::check_memory(packed, kPackedAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_gate({problem_copy, tensors_copy, device, stream}, {packed},
                              twell::choose_gate(problem_copy, device, twell::Kernels::kBest));
}

cudaError_t twell_mlp(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                      size_t workspace_bytes, cudaStream_t stream) {
    twell_problem problem_copy;
    twell_tensors tensors_copy;
    TWELL_TRY(twell::read_problem(problem_copy, problem).error);
    if (tensors == nullptr || workspace_bytes < twell_workspace_bytes(problem)) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(twell::read_tensors(tensors_copy, tensors, problem_copy).error);
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_route({problem_copy, tensors_copy, device, stream}, workspace);
}

size_t twell_describe(twell_problem const* problem, twell_device const* device, char* text, size_t size) {
    return twell::describe(problem, device, text, size,
                           [](Call const& call, void* workspace) { return twell::launch_route(call, workspace); });
}

char const* twell_version(void) { return TWELL_VERSION; }

}  // extern "C"

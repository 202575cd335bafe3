// The C API of experts: checks what the caller gave, then launches. No device code here.
#include <cuda_runtime_api.h>
#include <math.h>

#include <initializer_list>

#include "check.h"
#include "experts/experts.h"
#include "host/problem.h"
#include "host/structs.h"
#include "twell/twell_experts.h"

namespace {

using twell::Device;

bool is_e4m3(twell_experts_problem const& problem) { return problem.weight_dtype == TWELL_E4M3; }

// Elements of weights in 16 bytes.
int64_t vector_of(twell_experts_problem const& problem) { return is_e4m3(problem) ? 16 : 8; }

bool is_width(twell_experts_problem const& problem, int32_t width) {
    return width > 0 && width % vector_of(problem) == 0 && width <= TWELL_MAX_EXPERT_WIDTH;
}

bool are_strides(twell_experts_problem const& problem, twell_expert_strides const& strides, int32_t columns) {
    int64_t const vector = vector_of(problem);
    return strides.row >= columns && strides.row % vector == 0 && strides.expert >= 0 && strides.expert % vector == 0 &&
           strides.row <= int64_t{1} << 40 && strides.expert <= int64_t{1} << 40;
}

char const* find_fault(twell_experts_problem const& problem) {
    if (problem.experts < 1 || problem.experts > TWELL_MAX_EXPERTS) {
        return "experts must be 1 to 1024";
    }
    if (problem.top < 1 || problem.top > TWELL_MAX_EXPERTS_OF_TOKEN) {
        return "top must be 1 to 64";
    }
    if (problem.tokens < 0 || problem.tokens > TWELL_MAX_EXPERT_PAIRS / problem.top) {
        return "tokens must be at least 0, and tokens * top at most 1048576 (2^20)";
    }
    if (problem.d_ff < 1 || problem.d_ff > TWELL_MAX_EXPERT_D_FF) {
        return "d_ff must be 1 to 32768";
    }
    if (problem.dtype != TWELL_BF16 && problem.dtype != TWELL_FP16) {
        return "dtype must be bf16 (0) or fp16 (1)";
    }
    if (problem.weight_dtype != problem.dtype && !is_e4m3(problem)) {
        return "weight_dtype must be the same as dtype, or e4m3 (2)";
    }
    if (!is_width(problem, problem.d_model)) {
        return "d_model must be a positive multiple of 8, of 16 with e4m3 weights, at most 65536";
    }
    if (!is_width(problem, problem.d_out)) {
        return "d_out must be a positive multiple of 8, of 16 with e4m3 weights, at most 65536";
    }
    if (problem.variant != TWELL_GATED && problem.variant != TWELL_PLAIN) {
        return "variant must be gated (0) or plain (1)";
    }
    bool const gated = problem.variant == TWELL_GATED;
    if (problem.activation < TWELL_RELU || problem.activation > (gated ? TWELL_DRELU : TWELL_FATRELU)) {
        return "activation must be relu (0), relu2 (1), fatrelu (2) or, of gated experts, drelu (3)";
    }
    if (!(problem.threshold >= 0.0f && isfinite(problem.threshold)) ||
        (problem.threshold != 0.0f && problem.activation != TWELL_FATRELU)) {
        return "threshold must be finite and at least 0, and 0 unless the activation is fatrelu";
    }
    if (problem.id_bytes != 4 && problem.id_bytes != 8) {
        return "id_bytes must be 4 or 8";
    }
    int32_t const most_scale = is_e4m3(problem) ? TWELL_SCALE_EXPERT : TWELL_SCALE_TENSOR;
    if (problem.gate_up_scale < 0 || problem.gate_up_scale > most_scale ||
        problem.gate_up_scale == TWELL_SCALE_OUTPUT) {
        return "gate_up_scale must be tensor (0), or of e4m3 weights neuron (1) or expert (3)";
    }
    if (problem.down_scale < 0 || problem.down_scale > most_scale) {
        return "down_scale must be tensor (0), or of e4m3 weights neuron (1), output (2) or expert (3)";
    }
    if (!are_strides(problem, problem.up, problem.d_model) || !are_strides(problem, problem.down, problem.d_out) ||
        (gated ? !are_strides(problem, problem.gate, problem.d_model)
               : problem.gate.row != 0 || problem.gate.expert != 0)) {
        return "strides must be multiples of 16 bytes, those of rows at least a row, and those of no gate 0";
    }
    return nullptr;
}

char const* read(twell_experts_problem& copy, twell_experts_problem const* problem) {
    if (problem == nullptr) {
        return "problem is null";
    }
    if (twell::read_struct(copy, *problem, sizeof(copy)) != twell::StructFault::kNone) {
        return "struct_bytes must be sizeof(twell_experts_problem), and fields that this library does not know 0";
    }
    return find_fault(copy);
}

cudaError_t read(twell_experts_tensors& copy, twell_experts_tensors const* tensors,
                 twell_experts_problem const& problem) {
    bool const gated = problem.variant == TWELL_GATED;
    bool const scaled = is_e4m3(problem);
    bool const good =
        tensors != nullptr && twell::read_struct(copy, *tensors, sizeof(copy)) == twell::StructFault::kNone &&
        copy.reserved == 0 && copy.x != nullptr && copy.up != nullptr && copy.down != nullptr && copy.ids != nullptr &&
        copy.weights != nullptr && copy.y != nullptr && (copy.gate != nullptr) == gated &&
        (copy.up_scale != nullptr) == scaled && (copy.down_scale != nullptr) == scaled &&
        (copy.gate_scale != nullptr) == (scaled && gated) &&
        (copy.thresholds == nullptr || (problem.activation == TWELL_FATRELU && problem.threshold == 0.0f));
    if (!good) {
        return cudaErrorInvalidValue;
    }
    for (void const* const pointer :
         {copy.x, copy.gate, copy.up, copy.down, copy.ids, copy.weights, static_cast<void const*>(copy.y),
          copy.gate_scale, copy.up_scale, copy.down_scale, copy.thresholds}) {
        if (!twell::is_aligned(pointer)) {
            return cudaErrorMisalignedAddress;
        }
    }
    return cudaSuccess;
}

}  // namespace

extern "C" {

char const* twell_experts_validate(twell_experts_problem const* problem) {
    twell_experts_problem copy;
    return read(copy, problem);
}

size_t twell_experts_workspace_bytes(twell_experts_problem const* problem) {
    twell_experts_problem copy;
    return read(copy, problem) != nullptr || copy.tokens == 0 ? 0 : twell::experts_bytes(copy);
}

cudaError_t twell_experts(twell_experts_problem const* problem, twell_experts_tensors const* tensors, void* workspace,
                          size_t workspace_bytes, cudaStream_t stream) {
    twell_experts_problem problem_copy;
    twell_experts_tensors tensors_copy;
    if (read(problem_copy, problem) != nullptr) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(read(tensors_copy, tensors, problem_copy));
    if (workspace_bytes < twell::experts_bytes(problem_copy)) {
        return cudaErrorInvalidValue;
    }
    TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_experts({problem_copy, tensors_copy, device, stream}, workspace);
}

size_t twell_experts_describe(twell_experts_problem const* problem, twell_device const* described, char* text,
                              size_t size) {
    Device device = {};
    twell_experts_problem copy;
    if (read(copy, problem) != nullptr || twell::find_device(described, device) != cudaSuccess) {
        return 0;
    }
    twell::Text trace(text, size);
    device.trace = &trace;
    twell_experts_tensors const tensors = {};  // no kernel is launched
    bool const good =
        copy.tokens == 0 || twell::launch_experts({copy, tensors, device, nullptr}, nullptr) == cudaSuccess;
    return good ? trace.bytes() : 0;
}

}  // extern "C"

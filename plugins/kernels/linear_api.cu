// The C API of a linear layer: checks what the caller gave, then launches. No device code here.
#include <cuda_runtime_api.h>
#include <math.h>

#include <algorithm>
#include <initializer_list>
#include <iterator>

#include "check.h"
#include "device/element.cuh"
#include "host/problem.h"
#include "host/structs.h"
#include "linear/linear.h"
#include "twell/twell.h"

namespace {

using twell::Device;
using twell::kVector;
using twell::LinearCall;

bool is_width(int32_t width) { return width > 0 && width % kVector == 0 && width <= TWELL_MAX_WIDTH; }

int32_t num_outputs(twell_linear_problem const& problem) {
    auto const* const end = std::find(std::begin(problem.splits), std::end(problem.splits), 0);
    return std::max(1, static_cast<int32_t>(end - problem.splits));
}

int32_t width_of(twell_linear_problem const& problem, int32_t output) {
    return problem.splits[0] == 0 ? problem.out : problem.splits[output];
}

bool are_splits(twell_linear_problem const& problem) {
    int32_t const count = num_outputs(problem);
    int64_t sum = 0;
    for (int32_t i = 0; i < TWELL_MAX_SPLITS; ++i) {
        if (i >= count ? problem.splits[i] != 0 : !is_width(width_of(problem, i))) {
            return false;
        }
        sum += i < count ? width_of(problem, i) : 0;
    }
    return sum == problem.out;
}

char const* find_fault(twell_linear_problem const& problem) {
    if (problem.tokens < 0 || problem.tokens > TWELL_MAX_TOKENS) {
        return "tokens must be 0 to 536870912 (2^29)";
    }
    if (!is_width(problem.in)) {
        return "in must be a positive multiple of 8, at most 1073741824 (2^30)";
    }
    if (!is_width(problem.out)) {
        return "out must be a positive multiple of 8, at most 1073741824 (2^30)";
    }
    if (problem.dtype != TWELL_BF16 && problem.dtype != TWELL_FP16) {
        return "dtype must be bf16 (0) or fp16 (1)";
    }
    bool const scaled = problem.weight_dtype == TWELL_E4M3;
    if (problem.weight_dtype != problem.dtype && !scaled) {
        return "weight_dtype must be the same as dtype, or e4m3 (2)";
    }
    bool const has_several = problem.weight_scale == TWELL_SCALE_NEURON || problem.weight_scale == TWELL_SCALE_BLOCK;
    if (problem.weight_scale != TWELL_SCALE_TENSOR && !(scaled && has_several)) {
        return "weight_scale must be tensor (0), or of e4m3 weights neuron (1) or block (4)";
    }
    if (problem.norm < TWELL_NORM_NONE || problem.norm > TWELL_NORM_LAYER) {
        return "norm must be none (0), rms (1) or layer (2)";
    }
    if (!(problem.eps >= 0.0f && isfinite(problem.eps))) {
        return "eps must be finite and at least 0";
    }
    if (problem.choose != 0 && problem.choose != 1) {
        return "choose must be 0 or 1";
    }
    if (problem.reserved != 0) {
        return "reserved must be 0";
    }
    if (problem.choose == 1 && num_outputs(problem) > 1) {
        return "choose must be 0 with several outputs";
    }
    return are_splits(problem) ? nullptr : "splits must be multiples of 8 whose sum is out, or all 0";
}

// Copies a caller's struct of a linear layer and checks it; null: it is good.
char const* read(twell_linear_problem& copy, twell_linear_problem const* problem) {
    if (problem == nullptr) {
        return "problem is null";
    }
    if (twell::read_struct(copy, *problem, sizeof(copy)) != twell::StructFault::kNone) {
        return "struct_bytes must be sizeof(twell_linear_problem), and fields that this library does not know 0";
    }
    return find_fault(copy);
}

bool overlap(void const* input, int64_t input_bytes, void const* y, int64_t y_bytes) {
    auto const first = reinterpret_cast<uintptr_t>(input);
    auto const second = reinterpret_cast<uintptr_t>(y);
    return first != 0 && first < second + static_cast<uintptr_t>(y_bytes) &&
           second < first + static_cast<uintptr_t>(input_bytes);
}

cudaError_t read(twell_linear_tensors& copy, twell_linear_tensors const* tensors, twell_linear_problem const& problem) {
    bool const good = tensors != nullptr &&
                      twell::read_struct(copy, *tensors, sizeof(copy)) == twell::StructFault::kNone &&
                      copy.reserved == 0 && copy.x != nullptr && copy.weight != nullptr &&
                      (copy.weight_scale != nullptr) == (problem.weight_dtype == TWELL_E4M3) &&
                      (copy.norm_weight == nullptr || problem.norm != TWELL_NORM_NONE) &&
                      (copy.norm_bias == nullptr || problem.norm == TWELL_NORM_LAYER) &&
                      (copy.residual == nullptr || num_outputs(problem) == 1);
    if (!good) {
        return cudaErrorInvalidValue;
    }
    for (void const* const pointer :
         {copy.x, copy.weight, copy.bias, copy.norm_weight, copy.norm_bias, copy.residual, copy.weight_scale}) {
        if (!twell::is_aligned(pointer)) {
            return cudaErrorMisalignedAddress;
        }
    }
    for (int32_t i = 0; i < TWELL_MAX_SPLITS; ++i) {
        if ((copy.y[i] != nullptr) != (i < num_outputs(problem))) {
            return cudaErrorInvalidValue;
        }
        if (!twell::is_aligned(copy.y[i])) {
            return cudaErrorMisalignedAddress;
        }
        int64_t const y_bytes = problem.tokens * (problem.choose != 0 ? 8 : int64_t{width_of(problem, i)} * 2);
        if (copy.y[i] != nullptr && (overlap(copy.x, problem.tokens * problem.in * 2, copy.y[i], y_bytes) ||
                                     overlap(copy.residual, problem.tokens * problem.out * 2, copy.y[i], y_bytes))) {
            return cudaErrorInvalidValue;
        }
    }
    return cudaSuccess;
}

}  // namespace

extern "C" {

char const* twell_linear_validate(twell_linear_problem const* problem) {
    twell_linear_problem copy;
    return read(copy, problem);
}

size_t twell_linear_workspace_bytes(twell_linear_problem const* problem) {
    twell_linear_problem copy;
    return read(copy, problem) != nullptr || copy.tokens == 0 ? 0 : twell::linear_bytes(copy);
}

cudaError_t twell_linear(twell_linear_problem const* problem, twell_linear_tensors const* tensors, void* workspace,
                         size_t workspace_bytes, cudaStream_t stream) {
    twell_linear_problem problem_copy;
    twell_linear_tensors tensors_copy;
    if (read(problem_copy, problem) != nullptr) {
        return cudaErrorInvalidValue;
    }
    if (problem_copy.tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(read(tensors_copy, tensors, problem_copy));
    size_t const needed = twell::linear_bytes(problem_copy);
    if (workspace_bytes < needed) {
        return cudaErrorInvalidValue;
    }
    if (needed != 0) {
        TWELL_TRY(twell::check_memory(workspace, twell::kWorkspaceAlignment).error);
    }
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_linear({problem_copy, tensors_copy, device, stream}, workspace);
}

size_t twell_linear_describe(twell_linear_problem const* problem, twell_device const* described, char* text,
                             size_t size) {
    Device device = {};
    twell_linear_problem copy;
    if (read(copy, problem) != nullptr || twell::find_device(described, device) != cudaSuccess) {
        return 0;
    }
    twell::Text trace(text, size);
    device.trace = &trace;
    twell_linear_tensors const tensors = {};  // no kernel is launched
    bool const good =
        copy.tokens == 0 || twell::launch_linear({copy, tensors, device, nullptr}, nullptr) == cudaSuccess;
    return good ? trace.bytes() : 0;
}

}  // extern "C"

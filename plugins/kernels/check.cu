#include <math.h>

#include <initializer_list>

#include "check.h"
#include "device/element.cuh"
#include "host/problem.h"
#include "host/structs.h"

namespace twell {
namespace {

constexpr int kMinComputeCapabilityMajor = 8;

Refusal invalid(char const* text) { return {cudaErrorInvalidValue, text}; }

char const* find_fault(twell_problem const& problem, bool encodes) {
    if (problem.tokens < 0 || problem.tokens > TWELL_MAX_TOKENS) {
        return "tokens must be 0 to 536870912 (2^29)";
    }
    if (problem.d_model <= 0 || problem.d_model % kVector != 0) {
        return "d_model must be a positive multiple of 8";
    }
    if (problem.d_model > TWELL_MAX_WIDTH) {
        return "d_model must be at most 1073741824 (2^30)";
    }
    if (problem.d_out <= 0 || problem.d_out % kVector != 0) {
        return "d_out must be a positive multiple of 8";
    }
    if (problem.d_out > TWELL_MAX_WIDTH) {
        return "d_out must be at most 1073741824 (2^30)";
    }
    if (problem.d_ff < 1 || problem.d_ff > TWELL_MAX_D_FF) {
        return "d_ff must be 1 to 1048576 (2^20)";
    }
    if (problem.compression != 1 && problem.compression != 2 && problem.compression != 4 && problem.compression != 8) {
        return "compression must be 1, 2, 4 or 8";
    }
    if (problem.dtype != TWELL_BF16 && problem.dtype != TWELL_FP16) {
        return "dtype must be bf16 (0) or fp16 (1)";
    }
    if (problem.weight_dtype != problem.dtype && problem.weight_dtype != TWELL_E4M3) {
        return "weight_dtype must be the same as dtype, or e4m3 (2)";
    }
    bool const scaled = problem.weight_dtype == TWELL_E4M3;
    bool const may_have_blocks = scaled && !encodes;
    if (problem.gate_up_scale != TWELL_SCALE_TENSOR && !(scaled && problem.gate_up_scale == TWELL_SCALE_NEURON) &&
        !(may_have_blocks && problem.gate_up_scale == TWELL_SCALE_BLOCK)) {
        return "gate_up_scale must be tensor (0), or of e4m3 weights neuron (1), or block (4) but for twell_encode";
    }
    if (problem.down_scale != TWELL_SCALE_TENSOR &&
        !(scaled && (problem.down_scale == TWELL_SCALE_NEURON || problem.down_scale == TWELL_SCALE_OUTPUT)) &&
        !(may_have_blocks && problem.down_scale == TWELL_SCALE_BLOCK)) {
        return "down_scale must be tensor (0), or of e4m3 weights neuron (1) or output (2), or block (4) but for "
               "twell_encode";
    }
    if (problem.variant != TWELL_GATED && problem.variant != TWELL_PLAIN) {
        return "variant must be gated (0) or plain (1)";
    }
    if (problem.d_ff > TWELL_MAX_PACKED_D_FF && ((scaled && !encodes) || problem.variant == TWELL_GATED)) {
        return "d_ff must be 1 to 65536 in a gated block, and with e4m3 weights";
    }
    if (problem.activation < TWELL_RELU || problem.activation > TWELL_DRELU) {
        return "activation must be relu (0), relu2 (1), fatrelu (2) or drelu (3)";
    }
    if (problem.activation == TWELL_DRELU && problem.variant != TWELL_GATED) {
        return "drelu needs the gated variant";
    }
    if (problem.activation == TWELL_FATRELU && !(problem.threshold >= 0.0f && isfinite(problem.threshold))) {
        return "threshold must be finite and at least 0";
    }
    if (problem.hot < 0 || problem.hot > problem.d_ff) {
        return "hot must be 0 to d_ff";
    }
    if (problem.norm < TWELL_NORM_NONE || problem.norm > TWELL_NORM_LAYER) {
        return "norm must be none (0), rms (1) or layer (2)";
    }
    if (!(problem.eps >= 0.0f && isfinite(problem.eps))) {
        return "eps must be finite and at least 0";
    }
    return problem.reserved == 0 ? nullptr : "reserved must be 0";
}

struct Pointer {
    void const* address;
    bool must_exist;
    char const* missing;
    char const* misaligned;
};

#define TWELL_REQUIRED(tensors, name) \
    Pointer{tensors.name, true, #name " is missing", #name " must be aligned to 16 bytes"}
#define TWELL_OPTIONAL(tensors, name) Pointer{tensors.name, false, nullptr, #name " must be aligned to 16 bytes"}

template <size_t kCount>
Refusal check_pointers(Pointer const (&pointers)[kCount]) {
    for (Pointer const& pointer : pointers) {
        if (pointer.address == nullptr && pointer.must_exist) {
            return invalid(pointer.missing);
        }
        if (!is_aligned(pointer.address)) {
            return {cudaErrorMisalignedAddress, pointer.misaligned};
        }
    }
    return {};
}

// y is stored before all of the residual has been read.
bool overlaps_y(twell_problem const& problem, twell_tensors const& tensors) {
    auto const residual = reinterpret_cast<uintptr_t>(tensors.residual);
    auto const y = reinterpret_cast<uintptr_t>(tensors.y);
    uintptr_t const bytes = static_cast<uintptr_t>(problem.tokens) * problem.d_out * sizeof(uint16_t);
    return residual != 0 && residual < y + bytes && y < residual + bytes;
}

Refusal copy_tensors(twell_tensors& copy, twell_tensors const* tensors) {
    if (tensors == nullptr) {
        return invalid("tensors is null");
    }
    switch (read_struct(copy, *tensors, kLeastBytesTensors)) {
        case StructFault::kTooShort:
            return invalid("struct_bytes must be sizeof(twell_tensors): it is shorter than that of API version 2");
        case StructFault::kTooLong:
            return invalid("struct_bytes must be sizeof(twell_tensors): it is longer than that of any version");
        case StructFault::kUnknownFields:
            return invalid("twell_tensors has fields that this library does not know, and they are not 0");
        default:
            break;
    }
    if (copy.reserved != 0) {
        return invalid("reserved must be 0");
    }
    return {};
}

Refusal check_scales(twell_problem const& problem, twell_tensors const& tensors) {
    if (!has_scales(problem)) {
        bool const none =
            tensors.w_gate_scale == nullptr && tensors.w_up_scale == nullptr && tensors.w_down_scale == nullptr;
        return none ? Refusal{} : invalid("w_gate_scale, w_up_scale and w_down_scale are for e4m3 weights alone");
    }
    if (problem.variant == TWELL_PLAIN && tensors.w_up_scale != nullptr) {
        return invalid("w_up_scale must be null in a plain block");
    }
    return check_pointers({TWELL_REQUIRED(tensors, w_gate_scale), TWELL_REQUIRED(tensors, w_down_scale),
                           Pointer{tensors.w_up_scale, problem.variant == TWELL_GATED, "w_up_scale is missing",
                                   "w_up_scale must be aligned to 16 bytes"}});
}

}  // namespace

Refusal read_problem(twell_problem& copy, twell_problem const* problem, bool encodes) {
    if (problem == nullptr) {
        return invalid("problem is null");
    }
    switch (read_struct(copy, *problem, kLeastBytesProblem)) {
        case StructFault::kTooShort:
            return invalid("struct_bytes must be sizeof(twell_problem): it is shorter than that of API version 2");
        case StructFault::kTooLong:
            return invalid("struct_bytes must be sizeof(twell_problem): it is longer than that of any version");
        case StructFault::kUnknownFields:
            return invalid("twell_problem has fields that this library does not know, and they are not 0");
        default:
            break;
    }
    char const* const fault = find_fault(copy, encodes);
    return fault == nullptr ? Refusal{} : invalid(fault);
}

Refusal read_gate_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem) {
    Refusal const refusal = copy_tensors(copy, tensors);
    if (refusal.text != nullptr) {
        return refusal;
    }
    if (copy.thresholds != nullptr && (problem.activation != TWELL_FATRELU || problem.threshold != 0.0f)) {
        return invalid("thresholds are for fatrelu with threshold 0 alone");
    }
    return check_pointers({TWELL_REQUIRED(copy, x), TWELL_REQUIRED(copy, w_gate), TWELL_OPTIONAL(copy, b_gate),
                           TWELL_OPTIONAL(copy, thresholds)});
}

namespace {

Refusal check_output(twell_problem const& problem, twell_tensors const& tensors) {
    Refusal const refusal = check_pointers({TWELL_REQUIRED(tensors, w_down), TWELL_OPTIONAL(tensors, b_down),
                                            TWELL_OPTIONAL(tensors, residual), TWELL_REQUIRED(tensors, y)});
    return refusal.text == nullptr && overlaps_y(problem, tensors) ? invalid("residual must not overlap y") : refusal;
}

Refusal check_norm(twell_problem const& problem, twell_tensors const& tensors) {
    if (tensors.norm_weight != nullptr && !has_norm(problem)) {
        return invalid("norm_weight is for a norm alone");
    }
    if (tensors.norm_bias != nullptr && problem.norm != TWELL_NORM_LAYER) {
        return invalid("norm_bias is for a layer norm alone");
    }
    return check_pointers({TWELL_OPTIONAL(tensors, norm_weight), TWELL_OPTIONAL(tensors, norm_bias)});
}

}  // namespace

Refusal read_decode_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem) {
    Refusal const refusal = copy_tensors(copy, tensors);
    return refusal.text != nullptr ? refusal : check_output(problem, copy);
}

Refusal read_tensors(twell_tensors& copy, twell_tensors const* tensors, twell_problem const& problem) {
    Refusal refusal = read_gate_tensors(copy, tensors, problem);
    for (auto const check : {check_output, check_scales, check_norm}) {
        if (refusal.text == nullptr) {
            refusal = check(problem, copy);
        }
    }
    if (refusal.text != nullptr) {
        return refusal;
    }
    if (problem.variant == TWELL_PLAIN) {
        return copy.w_up == nullptr && copy.b_up == nullptr ? Refusal{}
                                                            : invalid("w_up and b_up must be null in a plain block");
    }
    return check_pointers({TWELL_REQUIRED(copy, w_up), TWELL_OPTIONAL(copy, b_up)});
}

Refusal check_memory(void const* memory, size_t alignment) {
    if (memory == nullptr) {
        return invalid("the memory is missing");
    }
    return is_aligned(memory, alignment) ? Refusal{}
                                         : Refusal{cudaErrorMisalignedAddress, "the memory must be aligned"};
}

cudaError_t find_device(Device& device) {
    TWELL_TRY(query_device(device));
    return device.major >= kMinComputeCapabilityMajor ? cudaSuccess : cudaErrorNotSupported;
}

cudaError_t find_device(twell_device const* described, Device& device) {
    if (described == nullptr) {
        return find_device(device);
    }
    device = {described->major, described->minor, described->multiprocessors, described->shared_bytes,
              described->l2_bytes};
    bool const exists = device.major >= kMinComputeCapabilityMajor && device.minor >= 0 &&
                        device.num_multiprocessors > 0 && device.max_shared_bytes > 0 && device.l2_bytes > 0;
    return exists ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace twell

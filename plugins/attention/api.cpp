// The C API of include/twell/attention.h.
#include <twell/attention.h>

#include <cmath>
#include <cstdio>
#include <exception>
#include <memory>

#include "attention.h"

struct twell_attention_plan {
    twell::Attention attention;
    twell_attention_problem problem;
    size_t workspace_bytes;
};

namespace {

void tell(char* message, size_t message_bytes, char const* text) {
    if (message != nullptr && message_bytes > 0) {
        std::snprintf(message, message_bytes, "%s", text);
    }
}

// Runs `body`; an exception becomes a message and `failure`.
template <typename Result, typename Body>
Result guarded(char* message, size_t message_bytes, Result failure, Body&& body) noexcept {
    try {
        return body();
    } catch (std::exception const& error) {
        tell(message, message_bytes, error.what());
    } catch (...) {
        tell(message, message_bytes, "unknown exception");
    }
    return failure;
}

bool is_flag(int32_t value) { return value == 0 || value == 1; }

}  // namespace

extern "C" {

TWELL_API char const* twell_attention_validate(twell_attention_problem const* problem) {
    constexpr int64_t kLargest = 2147483647;
    twell_attention_problem const& p = *problem;
    if (p.batch < 0 || p.batch > kLargest || p.tokens < 0 || p.tokens > kLargest) {
        return "batch and tokens must be 0 to 2147483647";
    }
    if (p.keys < 1 || p.keys > kLargest) {
        return "keys must be 1 to 2147483647";
    }
    if (p.kv_heads < 1 || p.heads < 1 || p.heads % p.kv_heads != 0) {
        return "heads must be a positive multiple of kv_heads";
    }
    if (p.width < 8 || p.width % 8 != 0 || p.width > TWELL_MAX_HEAD_WIDTH) {
        return "width must be a positive multiple of 8, up to 256";
    }
    if (p.dtype != TWELL_BF16 && p.dtype != TWELL_FP16) {
        return "dtype must be bf16 or fp16";
    }
    if (!is_flag(p.causal) || !is_flag(p.lengths)) {
        return "causal and lengths must be 0 or 1";
    }
    if (!is_flag(p.cached)) {
        return "cached must be 0 or 1";
    }
    if (p.cached == 1 && (p.causal == 1 || p.lengths == 1)) {
        return "causal and lengths must be 0 where keys and values are cached";
    }
    if (p.cached == 1 && p.tokens > p.keys) {
        return "there must not be more tokens than keys where these are cached";
    }
    if (!is_flag(p.rotated) || (p.rotated == 1 && (p.cached == 0 || p.width % 16 != 0))) {
        return "rotated must be 0 or 1, and is 1 only where keys and values are cached and width is a multiple of 16";
    }
    auto const is_scale = [](float scale) { return std::isfinite(scale) && scale > 0.0F; };
    if (!is_flag(p.fp8) || (p.fp8 == 1 && (p.cached == 0 || !is_scale(p.key_scale) || !is_scale(p.value_scale)))) {
        return "fp8 must be 0 or 1, and is 1 only where keys and values are cached, with positive, finite scales";
    }
    if (p.causal == 1 && p.tokens != p.keys) {
        return "tokens and keys must be equal where attention is causal";
    }
    if (!std::isfinite(p.scale)) {
        return "scale must be finite";
    }
    return nullptr;
}

TWELL_API twell_attention_plan* twell_attention_create(twell_attention_problem const* problem, char* message,
                                                       size_t message_bytes) {
    if (char const* const complaint = twell_attention_validate(problem); complaint != nullptr) {
        tell(message, message_bytes, complaint);
        return nullptr;
    }
    return guarded<twell_attention_plan*>(message, message_bytes, nullptr, [&] {
        auto plan = std::make_unique<twell_attention_plan>();
        plan->problem = *problem;
        plan->workspace_bytes = plan->attention.prepare(*problem);
        return plan.release();
    });
}

TWELL_API void twell_attention_destroy(twell_attention_plan* plan) { delete plan; }

TWELL_API size_t twell_attention_workspace_bytes(twell_attention_plan const* plan) { return plan->workspace_bytes; }

TWELL_API int32_t twell_attention_run(twell_attention_plan* plan, twell_attention_tensors const* tensors,
                                      void* workspace, cudaStream_t stream, char* message, size_t message_bytes) {
    return guarded<int32_t>(message, message_bytes, 1, [&] {
        plan->attention.run(plan->problem, *tensors, workspace, stream);
        return 0;
    });
}

TWELL_API char const* twell_attention_version(void) { return TWELL_VERSION; }

}  // extern "C"

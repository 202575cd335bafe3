// The C API: checks what the caller gave, then calls the launchers. No device code here.
#include <cuda_runtime_api.h>
#include <math.h>

#include <algorithm>

#include "few_tokens/few.h"
#include "host/problem.h"
#include "many_tokens/dense.h"
#include "many_tokens/gate.h"
#include "many_tokens/schedule.h"
#include "many_tokens/sparse_rows.h"
#include "many_tokens/split.h"
#include "many_tokens/up_down.h"
#include "one_or_two_tokens/one_or_two.h"
#include "routes.h"
#include "twell/twell.h"

#if !defined(TWELL_VERSION)
#error "TWELL_VERSION must be the project's version as a string literal"
#endif

namespace {

using twell::Device;
using twell::first_error;
using twell::kWorkspaceAlignment;
using twell::num_tiles;
using twell::words_per_tile;

constexpr size_t kAlignment = 16;
// twell_internal_dense and twell_internal_describe: not a number of rows.
constexpr int64_t kDenseBlock = -3;
constexpr int64_t kSplit = -5;
// twell_internal_describe likewise: the routes, or the gate alone.
constexpr int64_t kRoutes = -6;
constexpr int64_t kGate = -7;
constexpr int kMinComputeCapabilityMajor = 8;

bool is_aligned(void const* pointer, size_t alignment) { return reinterpret_cast<uintptr_t>(pointer) % alignment == 0; }

// Pointers that must be there.
cudaError_t check_required(void const* pointer, size_t alignment = kAlignment) {
    if (pointer == nullptr) {
        return cudaErrorInvalidValue;
    }
    return is_aligned(pointer, alignment) ? cudaSuccess : cudaErrorMisalignedAddress;
}

// Biases and residual, which may be null.
cudaError_t check_optional(void const* pointer) {
    return is_aligned(pointer, kAlignment) ? cudaSuccess : cudaErrorMisalignedAddress;
}

cudaError_t check_gate_tensors(twell_tensors const& tensors) {
    return first_error({check_required(tensors.x), check_required(tensors.w_gate), check_optional(tensors.b_gate)});
}

// y is stored before all of the residual has been read.
bool overlaps_y(twell_problem const& problem, twell_tensors const& tensors) {
    auto const residual = reinterpret_cast<uintptr_t>(tensors.residual);
    auto const y = reinterpret_cast<uintptr_t>(tensors.y);
    uintptr_t const bytes = static_cast<uintptr_t>(problem.tokens) * problem.d_out * sizeof(uint16_t);
    return residual != 0 && residual < y + bytes && y < residual + bytes;
}

cudaError_t check_block_tensors(twell_problem const& problem, twell_tensors const& tensors) {
    TWELL_TRY(first_error({check_gate_tensors(tensors), check_required(tensors.w_down), check_optional(tensors.b_down),
                           check_optional(tensors.residual), check_required(tensors.y)}));
    if (overlaps_y(problem, tensors)) {
        return cudaErrorInvalidValue;
    }
    if (problem.variant == TWELL_PLAIN) {
        return tensors.w_up == nullptr && tensors.b_up == nullptr ? cudaSuccess : cudaErrorInvalidValue;
    }
    return first_error({check_required(tensors.w_up), check_optional(tensors.b_up)});
}

// The current device, which must have kernels.
cudaError_t find_device(Device& device) {
    TWELL_TRY(twell::query_device(device));
    return device.major >= kMinComputeCapabilityMajor ? cudaSuccess : cudaErrorNotSupported;
}

bool is_valid(twell_problem const* problem) { return twell_validate(problem) == nullptr; }

// Scratch memory starts in the workspace behind the place of a packed matrix.
void* scratch_in(void* workspace, twell_problem const* problem) {
    return static_cast<unsigned char*>(workspace) + twell::aligned(twell_packed_bytes(problem));
}

// Both steps, from many tokens on.
cudaError_t run_steps(twell_problem const& problem, twell_tensors const& tensors, uint32_t* packed, void* scratch,
                      int64_t dense_rows, Device const& device, cudaStream_t stream,
                      twell::Kernels choice = twell::Kernels::kBest) {
    twell::GateOutput const output = twell::gate_output_in(problem, packed, scratch, device, choice);
    TWELL_TRY(twell::launch_gate(problem, tensors, output, device, stream, choice));
    return twell::launch_up_down(problem, tensors, packed, scratch, dense_rows, device, stream, choice);
}

size_t bytes_of_steps(twell_problem const& problem) {
    return twell::aligned(twell_packed_bytes(&problem)) + twell::up_down_scratch_bytes(problem);
}

// A problem that is split: its first neurons densely, then both steps for the others.
cudaError_t run_split(twell_problem const& problem, twell_tensors const& tensors, void* workspace, Device const& device,
                      cudaStream_t stream, twell::Kernels choice = twell::Kernels::kBest) {
    twell::Split const split = twell::split_at(problem, tensors, workspace);
    auto const run = [&](twell::Part const& part, int64_t dense_rows) {
        void* const scratch = scratch_in(split.workspace, &part.problem);
        return run_steps(part.problem, part.tensors, static_cast<uint32_t*>(split.workspace), scratch, dense_rows,
                         device, stream, choice);
    };
    twell_problem const& hot = split.hot.problem;
    cudaError_t const error =
        choice != twell::Kernels::kGeneric && twell::has_dense_block(hot, device)
            ? twell::launch_dense_rows(hot, split.hot.tensors, scratch_in(split.workspace, &hot), false, device, stream)
            : run(split.hot, hot.tokens);
    if (error != cudaSuccess || split.rest.problem.d_ff == 0) {
        return error;
    }
    return run(split.rest, twell::kGuardDecides);
}

// The whole block.
cudaError_t run(twell_problem const& problem, twell_tensors const& tensors, void* workspace, Device const& device,
                cudaStream_t stream) {
    uint32_t* const packed = static_cast<uint32_t*>(workspace);
    void* const scratch = scratch_in(workspace, &problem);
    twell::Route const route = twell::choose_route(problem, device);
    if (device.trace != nullptr) {
        device.trace->add("route %s\n", twell::name_of(route));
    }
    switch (route) {
        case twell::Route::kOneOrTwoTokens:
            return twell::launch_one_or_two(problem, tensors, scratch, device, stream);
        case twell::Route::kFewTokens:
            return twell::launch_few(problem, tensors, scratch, device, stream);
        case twell::Route::kDenseBlock:
            return twell::launch_dense_rows(problem, tensors, scratch, true, device, stream);
        default:
            if (twell::is_split(problem)) {
                return run_split(problem, tensors, workspace, device, stream);
            }
            return run_steps(problem, tensors, packed, scratch, twell::kGuardDecides, device, stream);
    }
}

// The same, but with so many rows on the dense path, or as a dense block, or split.
cudaError_t run_forced(twell_problem const& problem, twell_tensors const& tensors, void* workspace, int64_t dense_rows,
                       twell::Kernels choice, Device const& device, cudaStream_t stream) {
    void* const scratch = scratch_in(workspace, &problem);
    if (dense_rows == kDenseBlock) {
        return twell::launch_dense_rows(problem, tensors, scratch, false, device, stream);
    }
    if (dense_rows == kSplit) {
        return run_split(problem, tensors, workspace, device, stream, choice);
    }
    return run_steps(problem, tensors, static_cast<uint32_t*>(workspace), scratch, dense_rows, device, stream, choice);
}

// The device that is described, or the current one if it is null.
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

// Pointers that nobody follows, for a call that is only described.
twell_tensors described_tensors(twell_problem const& problem, void* memory) {
    bool const gated = problem.variant == TWELL_GATED;
    return {memory, memory, memory, gated ? memory : nullptr, gated ? memory : nullptr, memory, memory, memory, memory};
}

}  // namespace

extern "C" {

// twell_gate with the caller's choice of twell::Kernels. For tests and benchmarks, so it is in no public header.
TWELL_API cudaError_t twell_internal_gate(twell_problem const* problem, twell_tensors const* tensors, uint32_t* packed,
                                          int32_t kernel, cudaStream_t stream);

// The order in which step 2 takes rows, if only those without a list are dense. `packed` and `spilled`: see pack.cuh.
// `memory`: twell_internal_schedule_bytes, 256-byte aligned; it then holds a twell::ScheduleHeader and, from byte 256
// on, the rows in order. For tests, likewise.
TWELL_API size_t twell_internal_schedule_bytes(twell_problem const* problem);
TWELL_API cudaError_t twell_internal_schedule(twell_problem const* problem, uint32_t const* packed,
                                              uint16_t const* spilled, void* memory, cudaStream_t stream);

// twell_mlp for any number of tokens, with so many rows on the dense path, see launch_up_down, or, for kDenseBlock, as
// a dense block without a gate of its own, or, for kSplit, split by the problem's hint; `kernels` is the caller's
// choice of twell::Kernels. For tests, likewise.
TWELL_API cudaError_t twell_internal_dense(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                                           int64_t dense_rows, int32_t kernels, cudaStream_t stream);

// twell_describe of a call of twell_internal_dense, or, for kRoutes, of twell_mlp, or, for kGate, of
// twell_internal_gate. For tests, likewise.
TWELL_API size_t twell_internal_describe(twell_problem const* problem, twell_device const* device, int64_t dense_rows,
                                         int32_t kernels, char* text, size_t size);

// The table of routes, as Markdown; and the rows of all tables of configurations: a line each, what twell_describe says
// of a launch before the bar. They return what twell_describe does. For tests, likewise.
TWELL_API size_t twell_internal_routes(char* text, size_t size);
TWELL_API size_t twell_internal_configurations(char* text, size_t size);

// Where a call of twell_internal_dense leaves how many neurons are hot, in device memory, and 256 bytes behind it which
// ones; null if there are none. For tests, likewise.
TWELL_API uint32_t const* twell_internal_hot_neurons(twell_problem const* problem, void* workspace, int32_t kernels);

char const* twell_validate(twell_problem const* problem) {
    if (problem == nullptr) {
        return "problem is null";
    }
    if (problem->tokens < 0 || problem->tokens > TWELL_MAX_TOKENS) {
        return "tokens must be 0 to 536870912 (2^29)";
    }
    if (problem->d_model <= 0 || problem->d_model % twell::kVector != 0) {
        return "d_model must be a positive multiple of 8";
    }
    if (problem->d_model > TWELL_MAX_WIDTH) {
        return "d_model must be at most 1073741824 (2^30)";
    }
    if (problem->d_out <= 0 || problem->d_out % twell::kVector != 0) {
        return "d_out must be a positive multiple of 8";
    }
    if (problem->d_out > TWELL_MAX_WIDTH) {
        return "d_out must be at most 1073741824 (2^30)";
    }
    if (problem->d_ff < 1 || problem->d_ff > TWELL_MAX_D_FF) {
        return "d_ff must be 1 to 65536";
    }
    if (problem->compression != 1 && problem->compression != 2 && problem->compression != 4 &&
        problem->compression != 8) {
        return "compression must be 1, 2, 4 or 8";
    }
    if (problem->dtype != TWELL_BF16 && problem->dtype != TWELL_FP16) {
        return "dtype must be bf16 (0) or fp16 (1)";
    }
    if (problem->variant != TWELL_GATED && problem->variant != TWELL_PLAIN) {
        return "variant must be gated (0) or plain (1)";
    }
    if (problem->activation < TWELL_RELU || problem->activation > TWELL_DRELU) {
        return "activation must be relu (0), relu2 (1), fatrelu (2) or drelu (3)";
    }
    if (problem->activation == TWELL_DRELU && problem->variant != TWELL_GATED) {
        return "drelu needs the gated variant";
    }
    if (problem->activation == TWELL_FATRELU && !(problem->threshold >= 0.0f && isfinite(problem->threshold))) {
        return "threshold must be finite and at least 0";
    }
    if (problem->hot < 0 || problem->hot > problem->d_ff) {
        return "hot must be 0 to d_ff";
    }
    return nullptr;
}

size_t twell_packed_bytes(twell_problem const* problem) {
    if (!is_valid(problem)) {
        return 0;
    }
    return static_cast<size_t>(problem->tokens) * num_tiles(*problem) * words_per_tile(*problem) * sizeof(uint32_t);
}

size_t twell_workspace_bytes(twell_problem const* problem) {
    if (!is_valid(problem) || problem->tokens == 0) {
        return 0;
    }
    size_t const few = twell::aligned(twell_packed_bytes(problem)) +
                       std::max(twell::one_or_two_scratch_bytes(*problem), twell::few_scratch_bytes(*problem));
    return std::max({few, bytes_of_steps(*problem), twell::split_bytes(*problem, bytes_of_steps)});
}

cudaError_t twell_gate(twell_problem const* problem, twell_tensors const* tensors, uint32_t* packed,
                       cudaStream_t stream) {
    return twell_internal_gate(problem, tensors, packed, static_cast<int32_t>(twell::Kernels::kBest), stream);
}

cudaError_t twell_internal_gate(twell_problem const* problem, twell_tensors const* tensors, uint32_t* packed,
                                int32_t kernel, cudaStream_t stream) {
    if (!is_valid(problem) || tensors == nullptr || kernel < 0 ||
        kernel > static_cast<int32_t>(twell::Kernels::kSm90)) {
        return cudaErrorInvalidValue;
    }
    if (problem->tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(first_error({check_gate_tensors(*tensors), check_required(packed)}));
    Device device = {};
    TWELL_TRY(find_device(device));
    return twell::launch_gate(*problem, *tensors, {packed}, device, stream, static_cast<twell::Kernels>(kernel));
}

cudaError_t twell_mlp(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                      size_t workspace_bytes, cudaStream_t stream) {
    if (!is_valid(problem) || tensors == nullptr || workspace_bytes < twell_workspace_bytes(problem)) {
        return cudaErrorInvalidValue;
    }
    if (problem->tokens == 0) {
        return cudaSuccess;
    }
    TWELL_TRY(first_error({check_block_tensors(*problem, *tensors), check_required(workspace, kWorkspaceAlignment)}));
    Device device = {};
    TWELL_TRY(find_device(device));
    return run(*problem, *tensors, workspace, device, stream);
}

size_t twell_describe(twell_problem const* problem, twell_device const* device, char* text, size_t size) {
    return twell_internal_describe(problem, device, kRoutes, static_cast<int32_t>(twell::Kernels::kBest), text, size);
}

size_t twell_internal_describe(twell_problem const* problem, twell_device const* described, int64_t dense_rows,
                               int32_t kernels, char* text, size_t size) {
    Device device = {};
    if (!is_valid(problem) || find_device(described, device) != cudaSuccess) {
        return 0;
    }
    twell::Text trace(text, size);
    device.trace = &trace;
    if (problem->tokens == 0) {
        return trace.bytes();
    }
    void* const memory = reinterpret_cast<void*>(kWorkspaceAlignment);
    twell_tensors const tensors = described_tensors(*problem, memory);
    twell::Kernels const choice = static_cast<twell::Kernels>(kernels);
    cudaError_t const error =
        dense_rows == kRoutes ? run(*problem, tensors, memory, device, nullptr)
        : dense_rows == kGate
            ? twell::launch_gate(*problem, tensors, {static_cast<uint32_t*>(memory)}, device, nullptr, choice)
            : run_forced(*problem, tensors, memory, dense_rows, choice, device, nullptr);
    return error == cudaSuccess ? trace.bytes() : 0;
}

size_t twell_internal_routes(char* text, size_t size) {
    twell::Text table(text, size);
    twell::list_routes(table);
    return table.bytes();
}

size_t twell_internal_configurations(char* text, size_t size) {
    twell::Text rows(text, size);
    twell::list_one_or_two(rows);
    twell::list_few(rows);
    twell::list_gate(rows);
    twell::list_up_down(rows);
    return rows.bytes();
}

cudaError_t twell_internal_dense(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                                 int64_t dense_rows, int32_t kernels, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(find_device(device));
    return run_forced(*problem, *tensors, workspace, dense_rows, static_cast<twell::Kernels>(kernels), device, stream);
}

uint32_t const* twell_internal_hot_neurons(twell_problem const* problem, void* workspace, int32_t kernels) {
    Device device = {};
    if (find_device(device) != cudaSuccess) {
        return nullptr;
    }
    return twell::hot_neurons_in(*problem, scratch_in(workspace, problem), device, static_cast<twell::Kernels>(kernels))
        .count;
}

size_t twell_internal_schedule_bytes(twell_problem const* problem) { return twell::schedule_bytes(*problem); }

cudaError_t twell_internal_schedule(twell_problem const* problem, uint32_t const* packed, uint16_t const* spilled,
                                    void* memory, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(find_device(device));
    twell::GuardModel guard = {};  // forced: no row
    guard.max_part = static_cast<uint32_t>(twell::max_dense_part(*problem));
    return twell::launch_schedule(*problem, packed, spilled, twell::schedule_at(*problem, memory), guard, {}, {},
                                  nullptr, {}, device, stream);
}

char const* twell_version(void) { return TWELL_VERSION; }

}  // extern "C"

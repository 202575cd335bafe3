#include "check.h"
#include "dense_block/dense_block.h"
#include "experts/experts.h"
#include "features/features.h"
#include "few_tokens/few.h"
#include "fp8/fp8.h"
#include "host/problem.h"
#include "internal.h"
#include "linear/linear.h"
#include "many_tokens/many_tokens.h"
#include "many_tokens/schedule/schedule.h"
#include "norm/norm.h"
#include "one_or_two_tokens/one_or_two.h"
#include "routes.h"
#include "split/split.h"

namespace {

using twell::Call;
using twell::Device;
using twell::GuardOrder;
using twell::Kernels;

static_assert(static_cast<int>(Kernels::kBest) == TWELL_KERNELS_BEST &&
                  static_cast<int>(Kernels::kGeneric) == TWELL_KERNELS_GENERIC &&
                  static_cast<int>(Kernels::kSm90) == TWELL_KERNELS_SM90,
              "a choice is cast");

cudaError_t run(Call const& call, void* workspace, twell_internal_choice const& choice) {
    Kernels const kernels = static_cast<Kernels>(choice.kernels);
    if (choice.kernels < TWELL_KERNELS_BEST || choice.kernels > TWELL_KERNELS_SM90) {
        return cudaErrorInvalidValue;
    }
    bool const is_many =
        choice.path == TWELL_RUN_MANY_TOKENS || choice.path == TWELL_RUN_EARLY || choice.path == TWELL_RUN_DENSE_ROWS;
    // The workspace has a place for widened weights where the routes widen.
    bool const takes_scales = choice.path == TWELL_RUN_ROUTES || choice.path == TWELL_RUN_DENSE_BLOCK ||
                              (is_many && !twell::many_tokens_widen(call.problem));
    if (twell::has_scales(call.problem) && !takes_scales) {
        return cudaErrorNotSupported;
    }
    switch (choice.path) {
        case TWELL_RUN_ROUTES:
            return twell::launch_route(call, workspace);
        case TWELL_RUN_GATE:
            return twell::launch_gate(call, {static_cast<uint32_t*>(workspace)},
                                      twell::choose_gate(call.problem, call.device, kernels));
        case TWELL_RUN_MANY_TOKENS:
            return twell::launch_many_tokens(call, workspace, kernels);
        case TWELL_RUN_EARLY:
            return twell::launch_many_tokens(call, workspace, kernels, {GuardOrder::kEarly});
        case TWELL_RUN_DENSE_ROWS:
            return twell::launch_many_tokens(call, workspace, kernels, {GuardOrder::kRows, choice.dense_rows});
        case TWELL_RUN_DENSE_BLOCK:
            return twell::launch_dense_block(call, workspace, false);
        case TWELL_RUN_SPLIT:
            return twell::launch_split(call, workspace, kernels);
        default:
            return cudaErrorInvalidValue;
    }
}

}  // namespace

extern "C" {

cudaError_t twell_internal_run(twell_problem const* problem, twell_tensors const* tensors, void* workspace,
                               twell_internal_choice const* choice, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return run({*problem, *tensors, device, stream}, workspace, *choice);
}

size_t twell_internal_describe(twell_problem const* problem, twell_device const* device,
                               twell_internal_choice const* choice, char* text, size_t size) {
    return twell::describe(problem, device, text, size,
                           [choice](Call const& call, void* workspace) { return run(call, workspace, *choice); });
}

size_t twell_internal_schedule_bytes(twell_problem const* problem) { return twell::schedule_bytes(*problem); }

cudaError_t twell_internal_schedule(twell_problem const* problem, uint32_t const* packed, uint16_t const* spilled,
                                    void* memory, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    twell::GuardModel guard = {};
    guard.forced = 0;  // rows
    guard.max_part = static_cast<uint32_t>(twell::max_dense_part(*problem));
    twell_tensors const tensors = {};
    return twell::launch_schedule({*problem, tensors, device, stream}, packed, spilled,
                                  twell::schedule_at(*problem, false, memory), guard, {}, {}, {});
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
    twell::list_dense_block(rows);
    twell::list_many_tokens(rows);
    twell::list_fp8(rows);
    twell::list_norm(rows);
    twell::list_linear(rows);
    twell::list_experts(rows);
    twell::list_features(rows);
    return rows.bytes();
}

cudaError_t twell_internal_linear(twell_linear_problem const* problem, twell_linear_tensors const* tensors,
                                  void* workspace, int32_t kernels, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(twell::find_device(device));
    return twell::launch_linear({*problem, *tensors, device, stream, static_cast<Kernels>(kernels)}, workspace);
}

size_t twell_internal_workspace_bytes(twell_problem const* problem, twell_device const* described) {
    Device device = {};
    return twell::find_device(described, device) == cudaSuccess ? twell::workspace_bytes(*problem, &device) : 0;
}

uint32_t const* twell_internal_hot_neurons(twell_problem const* problem, void* workspace, int32_t kernels) {
    Device device = {};
    if (twell::find_device(device) != cudaSuccess) {
        return nullptr;
    }
    return twell::hot_neurons_in(*problem, workspace, device, static_cast<Kernels>(kernels)).count;
}

}  // extern "C"

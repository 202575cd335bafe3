#include <cuda_runtime.h>

#include "dense.h"
#include "launch.cuh"
#include "problem.cuh"
#include "schedule.h"
#include "up_down.h"
#include "up_down_generic.cuh"

namespace twell {
namespace {

namespace generic = up_down_generic;

// One 8-column vector a thread as long as a row has threads enough: the heaviest row of a call often decides its time,
// and more warps shorten it.
using Config1024 = generic::Config<128, 1>;
using Config2048 = generic::Config<256, 1>;
// Also for few rows, which do not fill the device: a row then gets 16 warps.
using Config4096 = generic::Config<512, 1>;
constexpr int kFewTokens = 128;
// Rows wider than that keep 16 warps and take more accumulators a thread.
using Config8192 = generic::Config<512, 2>;
using Config16384 = generic::Config<512, 4>;

template <class Element, class Cfg>
cudaError_t launch_config(generic::Params const& params, int64_t tokens, cudaStream_t stream) {
    Device device = {};
    if (cudaError_t const error = query_device(device); error != cudaSuccess) {
        return error;
    }
    return launch_dependent(generic::up_down_kernel<Element, Cfg>, params, dim3(static_cast<unsigned>(tokens)),
                            Cfg::kThreads, 0, device, stream);
}

template <class Element>
cudaError_t launch_generic(generic::Params const& params, int64_t tokens, cudaStream_t stream) {
    if (params.d_out > Config8192::kColumns) {
        return launch_config<Element, Config16384>(params, tokens, stream);
    }
    if (params.d_out > Config4096::kColumns) {
        return launch_config<Element, Config8192>(params, tokens, stream);
    }
    if (params.d_out > Config2048::kColumns || tokens <= kFewTokens) {
        return launch_config<Element, Config4096>(params, tokens, stream);
    }
    if (params.d_out > Config1024::kColumns) {
        return launch_config<Element, Config2048>(params, tokens, stream);
    }
    return launch_config<Element, Config1024>(params, tokens, stream);
}

// The sparse kernels for the rows that the schedule leaves to them. `packed` may be null: all tiles then count as
// overflowed.
cudaError_t launch_sparse(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                          uint16_t const* spilled, Schedule const& schedule, cudaStream_t stream) {
    generic::Params params = {};
    params.x = static_cast<uint16_t const*>(tensors.x);
    params.w_gate = static_cast<uint16_t const*>(tensors.w_gate);
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.w_up = static_cast<uint16_t const*>(tensors.w_up);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.w_down = static_cast<uint16_t const*>(tensors.w_down);
    params.b_down = static_cast<uint16_t const*>(tensors.b_down);
    params.y = static_cast<uint16_t*>(tensors.y);
    params.packed = packed;
    params.schedule = schedule;
    params.spilled = spilled;
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.d_out = problem.d_out;
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    params.relu_on_up = problem.activation == TWELL_DRELU;
    params.act = activation_of(problem);
    return problem.dtype == TWELL_BF16 ? launch_generic<Bf16>(params, problem.tokens, stream)
                                       : launch_generic<Fp16>(params, problem.tokens, stream);
}

}  // namespace

size_t up_down_scratch_bytes(twell_problem const& problem) {
    return schedule_bytes(problem) + spilled_bytes(problem) + dense_scratch_bytes(problem);
}

uint16_t* spilled_in(twell_problem const& problem, void* scratch) {
    return reinterpret_cast<uint16_t*>(static_cast<unsigned char*>(scratch) + schedule_bytes(problem));
}

cudaError_t launch_up_down(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                           void* scratch, int64_t dense_rows, cudaStream_t stream) {
    Device device = {};
    if (cudaError_t const error = query_device(device); error != cudaSuccess) {
        return error;
    }
    uint16_t* const spilled = dense_rows == kGuardOff ? nullptr : spilled_in(problem, scratch);
    Schedule const schedule = schedule_at(problem, scratch);
    GuardModel guard = {};
    Gather gather = {};
    if (spilled != nullptr) {
        guard = guard_model(problem, device);
        guard.forced = dense_rows;
        gather = gather_for(problem, tensors, packed, spilled,
                            reinterpret_cast<unsigned char*>(spilled) + spilled_bytes(problem));
    }
    if (cudaError_t const error = launch_schedule(problem, packed, schedule, guard, gather, stream);
        error != cudaSuccess) {
        return error;
    }
    if (guard.enabled) {
        if (cudaError_t const error = launch_dense(problem, tensors, gather, schedule, device, stream);
            error != cudaSuccess) {
            return error;
        }
    }
    return launch_sparse(problem, tensors, packed, spilled, schedule, stream);
}

cudaError_t launch_dense_rows(twell_problem const& problem, twell_tensors const& tensors, void* scratch,
                              Device const& device, cudaStream_t stream) {
    Schedule const schedule = schedule_at(problem, scratch);
    if (cudaError_t const error =
            launch_dense_block(problem, tensors, spilled_in(problem, scratch), schedule, device, stream);
        error != cudaSuccess) {
        return error;
    }
    return launch_sparse(problem, tensors, nullptr, nullptr, schedule, stream);
}

}  // namespace twell

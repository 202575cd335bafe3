// Sparse up and down projections: y = sum over active neurons n of h[n] Wd[n, :] + bd.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "many_tokens/chunks/hot.h"
#include "many_tokens/gate.h"
#include "twell/twell.h"

namespace twell {

// Bytes of scratch memory that launch_up_down needs; never shrinks when `tokens` grows.
size_t up_down_scratch_bytes(twell_problem const& problem);

// What launch_gate is to leave for launch_up_down: beside `packed`, in that memory.
GateOutput gate_output_in(twell_problem const& problem, uint32_t* packed, void* scratch, Device const& device,
                          Kernels choice);

// The rows of all configurations of step 2, a line each.
void list_up_down(Text& text);

// Where in that memory what concerns hot neurons is, or nulls if there are none. launch_gate is to clear the sample.
HotNeurons hot_neurons_in(twell_problem const& problem, void* scratch, Device const& device, Kernels choice);

// launch_up_down: how many rows take the dense path.
constexpr int64_t kGuardDecides = -1;
constexpr int64_t kGuardEarly = -4;  // for tests: all, as if the gate's count had told so

// Enqueues the schedule of the rows and the up and down projections. Same preconditions as launch_gate; `scratch` is
// 256-byte aligned, and holds what launch_gate has left, see gate_output_in. dense_rows: one of the above or, for
// tests, a number of rows: up to max_dense_part(problem), or all. With more than that, or with rows that have no list,
// there are others or more.
cudaError_t launch_up_down(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                           void* scratch, int64_t dense_rows, Device const& device, cudaStream_t stream,
                           Kernels choice = Kernels::kBest);

// Enqueues the whole block as a dense one, where has_dense_block(problem, device) holds.
cudaError_t launch_dense_rows(twell_problem const& problem, twell_tensors const& tensors, void* scratch, bool skips,
                              Device const& device, cudaStream_t stream);

}  // namespace twell

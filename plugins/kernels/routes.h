// Which kernels compute a block: one table, whose first row that fits wins.
#pragma once

#include <stddef.h>

#include "check.h"
#include "host/launch.h"
#include "host/problem.h"
#include "host/trace.h"
#include "twell/twell.h"

namespace twell {

enum class Route {
    kOneOrTwoTokens,  // each CTA adds what its neurons contribute to y
    kFewTokens,       // a token's work is spread over the device
    kDenseBlock,      // all neurons, whatever is active
    kManyTokens,      // the gate packs active neurons, and a guard decides which rows are too dense for that
    kWidened,         // FP8 weights become 16 first, and another route follows
    kWide,            // more neurons than the packed format counts: piece by piece
};

// The device has compute capability 8.0 or later.
Route choose_route(twell_problem const& problem, Device const& device);

char const* name_of(Route route);

// Rows of x that are normalised by a kernel, [tokens, d_model], in front of all other workspace; without a norm none.
uint16_t* take_normalised(twell_problem const& problem, unsigned char*& memory);

// Bytes of workspace that launch_route needs on a device, null: on any one; never shrinks when `tokens` grows.
size_t workspace_bytes(twell_problem const& problem, Device const* device);

// Enqueues the whole block by its route, behind its norm. The problem has been validated, has at least one row, and the
// pointers have been checked; `workspace` is 256-byte aligned.
cudaError_t launch_route(Call const& call, void* workspace);

// Writes down what launch(call, workspace) launches, instead of launching it: see twell_describe.
template <class Launch>
size_t describe(twell_problem const* problem, twell_device const* described, char* text, size_t size, Launch launch) {
    Device device = {};
    twell_problem copy;
    if (read_problem(copy, problem).text != nullptr || find_device(described, device) != cudaSuccess) {
        return 0;
    }
    Text trace(text, size);
    device.trace = &trace;
    if (copy.tokens == 0) {
        return trace.bytes();
    }
    // Pointers that no kernel follows: none is launched.
    void* const memory = reinterpret_cast<void*>(kWorkspaceAlignment);
    twell_tensors tensors = {};
    tensors.x = tensors.w_gate = tensors.b_gate = tensors.w_down = tensors.b_down = tensors.residual = memory;
    tensors.y = memory;
    if (copy.variant == TWELL_GATED) {
        tensors.w_up = tensors.b_up = memory;
    }
    if (has_scales(copy)) {
        tensors.w_gate_scale = tensors.w_up_scale = tensors.w_down_scale = memory;
    }
    return launch({copy, tensors, device, nullptr}, memory) == cudaSuccess ? trace.bytes() : 0;
}

// Numbers of the table and of the routes that others ask for.
twell_limits limits();

// The table, as Markdown.
void list_routes(Text& text);

}  // namespace twell

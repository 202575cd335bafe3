// The whole block for few tokens: kernels of their own, in which a token's work is spread over the device.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Offsets in w_gate and w_up are 32-bit numbers of 16-byte vectors.
constexpr int kMostDModelFew = 65536;

// The most tokens that these kernels compute; and without those of compute capability 9.0.
constexpr int64_t kMostTokensFew = 128;
constexpr int64_t kMostTokensFewGeneric = 64;
// The fewest columns and neurons of the kernels of compute capability 9.0: as long as the rows of TMA's boxes.
constexpr int kFewestColumnsSm90 = 64;

// The configuration of a call, chosen once: rows of the tables of configurations.
struct FewConfig {
    bool may_be_dense;     // the down projection is that of compute capability 9.0, down_sm90
    bool gate_up_is_sm90;  // gate_up_sm90 multiplies before it, else gate_up_few
    int gate_up_neurons;   // of a CTA; of gate_up_sm90 of a cluster
    int gate_up_tokens;
    int num_gate_ctas;
    int down_columns;  // of a CTA of the sparse down projection
    int down_threads;  // of down_few
    int down_tokens;   // of a CTA of the dense down projection, in down_sm90
    int num_shares;    // CTAs that share out the neurons: in down_sm90 of the dense down projection
};

// Bytes of workspace that launch_few needs for the problem; never shrinks when `tokens` grows, also where it is not for
// it.
size_t few_bytes(twell_problem const& problem);

// The rows of all configurations, a line each.
void list_few(Text& text);

// Enqueues the whole block, without a packed matrix, where routes.cu says so. The problem has been validated, has at
// least one row, and the pointers have been checked; `workspace` is 256-byte aligned.
cudaError_t launch_few(Call const& call, void* workspace);

}  // namespace twell

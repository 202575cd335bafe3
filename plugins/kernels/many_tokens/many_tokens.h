// The whole block for many tokens, in two steps: the gate packs active neurons; then a schedule decides which rows are
// too dense for that, and up and down projections follow.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "host/launch.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/dense/dense.h"
#include "many_tokens/gate/gate.h"
#include "many_tokens/guard/guard.h"
#include "many_tokens/sparse/sparse.h"
#include "twell/twell.h"

namespace twell {

// The configuration of a call, chosen once.
struct ManyTokensConfig {
    GateConfig gate;
    ChunkConfig chunks;
    DenseConfig dense;
    SparseConfig sparse;
    GuardModel guard;
    bool has_direct;  // rows may be direct, see format/schedule.cuh
};

ManyTokensConfig choose_many_tokens(twell_problem const& problem, Device const& device, Kernels kernels,
                                    GuardOrder order);

// Whether there are kernels for weights of the problem's that have scales.
bool many_tokens_take_scales(twell_problem const& problem, Device const& device);

// Whether FP8 weights become 16 for the dense rows of the block.
bool many_tokens_widen(twell_problem const& problem);

// Bytes of workspace that launch_many_tokens needs, behind those of take_widened, if they widen, and take_quantised;
// never shrinks when `tokens` grows.
size_t many_tokens_bytes(twell_problem const& problem);

// Enqueues the whole block. The problem has been validated, has at least one row, and the pointers have been checked;
// `workspace` is 256-byte aligned.
cudaError_t launch_many_tokens(Call const& call, void* workspace, Kernels kernels = Kernels::kBest,
                               GuardOrder order = {});

// The rows of all configurations, a line each.
void list_many_tokens(Text& text);

// For tests: where in the workspace a call says which neurons are hot; nulls if none may be.
HotNeurons hot_neurons_in(twell_problem const& problem, void* workspace, Device const& device, Kernels kernels);

}  // namespace twell

// The hot split: a call's first neurons, which are often active, as a dense block, the others by TwELL.
#pragma once

#include <stddef.h>

#include "twell/twell.h"

namespace twell {

// A block of some of the neurons.
struct Part {
    twell_problem problem;
    twell_tensors tensors;
};

// The first part leaves its sums, with bias and residual, as the second part's residual. NOTE: not in y, which kernels
// store before they have read all of the residual. The parts share their workspace, one after the other.
struct Split {
    Part hot;
    Part rest;        // without neurons if all are hot: then the first part leaves y
    void* workspace;  // of either part
};

// Whether the hint splits the problem, where the two steps would run.
bool is_split(twell_problem const& problem);

// Bytes of workspace that split_at needs, 0 if the problem is not split. `bytes_of` tells how many a part needs.
size_t split_bytes(twell_problem const& problem, size_t (*bytes_of)(twell_problem const& part));

Split split_at(twell_problem const& problem, twell_tensors const& tensors, void* workspace);

}  // namespace twell

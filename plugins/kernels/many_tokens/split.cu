#include <algorithm>

#include "host/problem.h"
#include "many_tokens/split.h"

namespace twell {
namespace {

// Fewer hot neurons fill no CTA's part of a tile of a dense block.
constexpr int kFewestHot = 128;

// Neurons of the first part, 0 for no split. Where the others begin, pointers stay aligned. NOTE: not in fp16, where
// sums over the hot neurons may be out of range and y is not.
int num_hot(twell_problem const& problem) {
    if (problem.dtype != TWELL_BF16) {
        return 0;
    }
    if (problem.hot == problem.d_ff) {
        return problem.d_ff;
    }
    int const rounded = problem.hot / kVector * kVector;
    return rounded >= kFewestHot ? rounded : 0;
}

twell_problem with_neurons(twell_problem problem, int d_ff) {
    problem.d_ff = d_ff;
    problem.hot = 0;
    return problem;
}

void const* skip(void const* tensor, int64_t elements) {
    return tensor == nullptr ? nullptr : static_cast<uint16_t const*>(tensor) + elements;
}

int64_t num_sums(twell_problem const& problem) { return problem.tokens * problem.d_out; }

}  // namespace

bool is_split(twell_problem const& problem) { return num_hot(problem) != 0; }

size_t split_bytes(twell_problem const& problem, size_t (*bytes_of)(twell_problem const& part)) {
    int const hot = num_hot(problem);
    if (hot == 0) {
        return 0;
    }
    size_t bytes = bytes_of(with_neurons(problem, hot));
    if (hot != problem.d_ff) {
        bytes = std::max(bytes, bytes_of(with_neurons(problem, problem.d_ff - hot)));
    }
    return aligned(static_cast<size_t>(num_sums(problem)) * sizeof(uint16_t)) + bytes;
}

Split split_at(twell_problem const& problem, twell_tensors const& tensors, void* workspace) {
    int const hot = num_hot(problem);
    unsigned char* memory = static_cast<unsigned char*>(workspace);
    uint16_t* const sums = take<uint16_t>(memory, num_sums(problem));
    Split split = {{with_neurons(problem, hot), tensors}, {with_neurons(problem, problem.d_ff - hot), tensors}, memory};
    if (split.rest.problem.d_ff == 0) {
        return split;
    }
    split.hot.tensors.y = sums;
    twell_tensors& rest = split.rest.tensors;
    int64_t const weights = int64_t{hot} * problem.d_model;
    rest.w_gate = skip(rest.w_gate, weights);
    rest.b_gate = skip(rest.b_gate, hot);
    rest.w_up = skip(rest.w_up, weights);
    rest.b_up = skip(rest.b_up, hot);
    rest.w_down = skip(rest.w_down, int64_t{hot} * problem.d_out);
    rest.b_down = nullptr;
    rest.residual = sums;
    return split;
}

}  // namespace twell

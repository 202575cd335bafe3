#include <algorithm>

#include "dense_block/dense_block.h"
#include "host/problem.h"
#include "many_tokens/many_tokens.h"
#include "split/split.h"

namespace twell {
namespace {

// A block of some of the neurons.
struct Part {
    twell_problem problem;
    twell_tensors tensors;
};

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
    return rounded >= kFewestHotSplit ? rounded : 0;
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

// The neurons behind the hot ones, with what these add to y as their residual.
Part rest_of(twell_problem const& problem, twell_tensors const& tensors, int hot, uint16_t const* sums) {
    Part rest = {with_neurons(problem, problem.d_ff - hot), tensors};
    int64_t const weights = int64_t{hot} * problem.d_model;
    rest.tensors.w_gate = skip(tensors.w_gate, weights);
    rest.tensors.b_gate = skip(tensors.b_gate, hot);
    rest.tensors.w_up = skip(tensors.w_up, weights);
    rest.tensors.b_up = skip(tensors.b_up, hot);
    rest.tensors.w_down = skip(tensors.w_down, int64_t{hot} * problem.d_out);
    rest.tensors.thresholds =
        tensors.thresholds == nullptr ? nullptr : static_cast<float const*>(tensors.thresholds) + hot;
    rest.tensors.b_down = nullptr;
    rest.tensors.residual = sums;
    return rest;
}

cudaError_t launch_hot(Call const& call, void* workspace, Kernels kernels) {
    if (kernels != Kernels::kGeneric && has_dense_block(call.problem, call.device)) {
        return launch_dense_block(call, workspace, false);
    }
    return launch_many_tokens(call, workspace, kernels, {GuardOrder::kRows, call.problem.tokens});
}

}  // namespace

bool is_split(twell_problem const& problem) { return num_hot(problem) != 0; }

size_t split_bytes(twell_problem const& problem) {
    int const hot = num_hot(problem);
    if (hot == 0) {
        return 0;
    }
    twell_problem const first = with_neurons(problem, hot);
    size_t bytes = std::max(dense_block_bytes(first), many_tokens_bytes(first));
    if (hot != problem.d_ff) {
        bytes = std::max(bytes, many_tokens_bytes(with_neurons(problem, problem.d_ff - hot)));
    }
    return aligned(static_cast<size_t>(num_sums(problem)) * sizeof(uint16_t)) + bytes;
}

cudaError_t launch_split(Call const& call, void* workspace, Kernels kernels) {
    int const hot = num_hot(call.problem);
    unsigned char* memory = static_cast<unsigned char*>(workspace);
    // NOTE: the first part leaves its sums here, with bias and residual, not in y, which kernels store before they have
    // read all of the residual. The parts share the workspace behind them, one after the other.
    uint16_t* const sums = take<uint16_t>(memory, num_sums(call.problem));
    bool const has_rest = hot != call.problem.d_ff;
    Part first = {with_neurons(call.problem, hot), call.tensors};
    if (has_rest) {
        first.tensors.y = sums;
    }
    TWELL_TRY(launch_hot({first.problem, first.tensors, call.device, call.stream}, memory, kernels));
    if (!has_rest) {
        return cudaSuccess;
    }
    Part const rest = rest_of(call.problem, call.tensors, hot, sums);
    return launch_many_tokens({rest.problem, rest.tensors, call.device, call.stream}, memory, kernels);
}

}  // namespace twell

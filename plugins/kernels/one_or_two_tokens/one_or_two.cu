#include <algorithm>

#include "host/problem.h"
#include "one_or_two_tokens/contribute_few.cuh"
#include "one_or_two_tokens/one_or_two.h"

namespace twell {
namespace {

// Whether CTAs may contribute to y (contribute_few.cuh), if the device has enough of them.
bool suits_contributing(twell_problem const& problem) {
    return std::max(problem.d_model, problem.d_out) <= contribute_few::kMostColumns &&
           problem.d_ff <= contribute_few::kMostCtas * contribute_few::kNeurons;
}

int most_contributing_ctas(twell_problem const& problem) { return std::min(problem.d_ff, contribute_few::kMostCtas); }

template <class Stored>
contribute_few::ParamsOf<Stored> take_contributions(twell_problem const& problem, unsigned char*& memory) {
    contribute_few::ParamsOf<Stored> params = {};
    if (suits_contributing(problem)) {
        int64_t const rows =
            std::min(problem.tokens, int64_t{contribute_few::kMostTokens}) * most_contributing_ctas(problem);
        params.contributions = take<float>(memory, rows * problem.d_out);
        params.contributes = take<uint32_t>(memory, rows * contribute_few::kCopies);
    }
    return params;
}

// As many CTAs for each multiprocessor as its share of the neurons needs, so that none has more to read than another.
OneOrTwoConfig choose(twell_problem const& problem, Device const& device) {
    using contribute_few::kMostCtas;
    int const multiprocessors = std::min(device.num_multiprocessors, kMostCtas);
    int const needed = static_cast<int>(ceil_div(problem.d_ff, multiprocessors * contribute_few::kNeurons));
    int const of_each = std::min({needed, kCtasPerMultiprocessorOneOrTwo, kMostCtas / multiprocessors});
    int const num_ctas = std::min(problem.d_ff, multiprocessors * of_each);
    return {num_ctas, problem.d_ff / num_ctas, problem.d_ff % num_ctas};
}

constexpr Label label_of(int64_t tokens, bool has_norm) {
    return {has_norm ? "norm_contribute" : "contribute", {{"tokens", tokens}}};
}

template <class Element, class Stored, int kTokens, bool kHasNorm>
cudaError_t contribute(Call const& call, contribute_few::ParamsOf<Stored> const& params) {
    return launch_dependent(label_of(kTokens, kHasNorm),
                            contribute_few::contribute_kernel<Element, Stored, kTokens, kHasNorm>, params,
                            dim3(static_cast<unsigned>(params.num_ctas)), contribute_few::kThreads,
                            contribute_few::Layout<kTokens, kHasNorm>::kSharedBytes, call.device, call.stream,
                            {{}, params.num_ctas, most_contributing_ctas(call.problem)});
}

template <class Element, class Stored>
cudaError_t launch(Call const& call, void* workspace, OneOrTwoConfig const& config) {
    twell_problem const& problem = call.problem;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    contribute_few::ParamsOf<Stored> params = take_contributions<Stored>(problem, next);
    set_block(params, problem, call.tensors);
    params.num_ctas = config.num_ctas;
    params.neurons_each = config.neurons_each;
    params.neurons_left = config.neurons_left;
    params.norm = {static_cast<uint16_t const*>(call.tensors.norm_weight),
                   static_cast<uint16_t const*>(call.tensors.norm_bias), problem.eps, problem.norm};
    static_assert(contribute_few::kMostTokens == 2, "one of two kernels");
    bool const one = problem.tokens == 1;
    TWELL_TRY(has_norm(problem) ? one ? contribute<Element, Stored, 1, true>(call, params)
                                      : contribute<Element, Stored, 2, true>(call, params)
              : one ? contribute<Element, Stored, 1, false>(call, params)
                                : contribute<Element, Stored, 2, false>(call, params));
    dim3 const grid(static_cast<unsigned>(ceil_div(problem.d_out, contribute_few::kAddColumns)),
                    static_cast<unsigned>(problem.tokens));
    return launch_dependent({"add_contributions"}, contribute_few::add_kernel<Element, Stored>, params, grid,
                            contribute_few::kAddThreads, 0, call.device, call.stream);
}

}  // namespace

size_t one_or_two_bytes(twell_problem const& problem) {
    return bytes_taken([&](unsigned char*& end) { take_contributions<uint16_t>(problem, end); });
}

void list_one_or_two(Text& text) {
    for (bool const has_norm : {false, true}) {
        add_line(text, label_of(1, has_norm));
        add_line(text, label_of(2, has_norm));
    }
    add_line(text, {"add_contributions"});
}

cudaError_t launch_one_or_two(Call const& call, void* workspace) {
    OneOrTwoConfig const config = choose(call.problem, call.device);
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (has_scales(call.problem)) {
        return is_bf16 ? launch<Bf16, E4m3>(call, workspace, config) : launch<Fp16, E4m3>(call, workspace, config);
    }
    return is_bf16 ? launch<Bf16, uint16_t>(call, workspace, config) : launch<Fp16, uint16_t>(call, workspace, config);
}

}  // namespace twell

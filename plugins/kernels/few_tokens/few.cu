#include <cuda_runtime.h>

#include <algorithm>

#include "few_tokens/down_few.cuh"
#include "few_tokens/few.h"
#include "few_tokens/gate_up_few.cuh"
#include "host/launch.h"
#include "host/problem.h"
#include "sm90.h"

namespace twell {
namespace {

// Up to 16 tokens only the weights' way through memory counts: small CTAs, three a multiprocessor.
using GateUp8 = gate_up_few::Config<1, 1, 2, 3>;
using GateUp16 = gate_up_few::Config<1, 2, 2, 3>;
// Where CTAs of twice as many neurons, two a multiprocessor, leave less of their last round empty.
using GateUp8Large = gate_up_few::Config<2, 1, 2, 2>;
using GateUp16Large = gate_up_few::Config<2, 2, 2, 2>;
// From there on x is read over and over from L2.
using GateUp32 = gate_up_few::Config<1, 4, 2, 1>;
using GateUp64 = gate_up_few::Config<1, 8, 1, 1>;
static_assert(GateUp32::kSharedBytes <= 98 * 1024 && GateUp64::kSharedBytes <= 98 * 1024,
              "sm_86, sm_89 and sm_120 give a block 99 KiB");

// The fewer tokens, the fewer columns a CTA has, so that there are CTAs enough. One token's are large, for it may have
// many active neurons and no other path.
using Down1 = down_few::Config<8, 1024, 4>;
static_assert(Down1::kColumns == kDenseDownColumns && Down1::kMostShares <= kDenseDownTokens[0],
              "there is scratch memory for its shares");
using Down4 = down_few::Config<8, 256>;
using Down16 = down_few::Config<16, 512>;
using Down64 = down_few::Config<16, 256>;

int num_mask_words(twell_problem const& problem) {
    return static_cast<int>(ceil_div(problem.d_ff, gate_up_few::kMaskBits));
}

// The multiprocessors that devices of compute capability 9.0 have.
constexpr int kMultiprocessors[] = {78, 114, 132};

// Rows of sums that there is memory for in each block of columns, on every device: never fewer for more tokens.
int num_summed(twell_problem const& problem) {
    int most = 0;
    for (int const tokens : kDenseDownTokens) {
        for (int const multiprocessors : kMultiprocessors) {
            if (tokens <= dense_down_tokens(problem.tokens)) {
                most = std::max(most, dense_down_shares(problem.d_out, tokens, multiprocessors) * tokens);
            }
        }
    }
    return most;
}

FewScratch take_scratch(twell_problem const& problem, unsigned char*& memory) {
    FewScratch scratch = {};
    scratch.num_mask_words = num_mask_words(problem);
    scratch.num_counters = static_cast<int>(ceil_div(problem.d_out, kDenseDownColumns));
    scratch.num_summed = num_summed(problem);
    int64_t const row_bits = int64_t{scratch.num_mask_words} * gate_up_few::kMaskBits;
    int64_t const dense_tokens = dense_down_tokens(problem.tokens);
    scratch.masks = take<uint32_t>(memory, problem.tokens * scratch.num_mask_words);
    scratch.h = take<float>(memory, problem.tokens * problem.d_ff);
    scratch.h_rounded = take<uint16_t>(memory, dense_tokens * row_bits);
    scratch.counted = take<int2>(memory, most_counted(scratch.num_mask_words));
    scratch.sums = take<float>(memory, int64_t{scratch.num_counters} * scratch.num_summed * kDenseDownColumns);
    scratch.counters = take<int>(memory, scratch.num_counters);
    return scratch;
}

template <class Cfg>
int num_gate_up_ctas(gate_up_few::Params const& params) {
    // CTAs cover whole mask words, also where d_ff ends in the first half of one.
    return static_cast<int>(ceil_div(params.num_mask_words * gate_up_few::kMaskBits, Cfg::kNeurons));
}

template <class Cfg>
constexpr Label gate_up_label_of() {
    return {"gate_up_few", {{"neurons", Cfg::kNeurons}, {"tokens", Cfg::kTokens}}};
}

template <class Cfg>
constexpr Label down_label_of() {
    return {"down_few", {{"columns", Cfg::kColumns}, {"threads", Cfg::kThreads}}};
}

template <class Element, class Cfg>
cudaError_t launch_gate_up(gate_up_few::Params const& params, Device const& device, cudaStream_t stream) {
    dim3 const grid(static_cast<unsigned>(num_gate_up_ctas<Cfg>(params)));
    Choice const choice = {{}, grid.x, params.counted == nullptr ? 0 : most_counted(params.num_mask_words)};
    return launch_dependent(gate_up_label_of<Cfg>(), gate_up_few::gate_up_kernel<Element, Cfg>, params, grid,
                            gate_up_few::kThreads, Cfg::kSharedBytes, device, stream, choice);
}

// How much of the rounds of its CTAs a launch fills.
template <class Cfg>
double filled_share(gate_up_few::Params const& params, Device const& device) {
    int const places = device.num_multiprocessors * Cfg::kMinBlocks;
    int const ctas = num_gate_up_ctas<Cfg>(params);
    return static_cast<double>(ctas) / static_cast<double>(ceil_div(ctas, places) * places);
}

// Calls use(config) with the configuration that suits the problem and the device.
template <class Use>
auto with_gate_up_config(gate_up_few::Params const& params, Device const& device, Use use) {
    if (params.tokens <= GateUp16::kTokens) {
        bool const eight = params.tokens <= GateUp8::kTokens;
        if (device.max_shared_bytes >= 227 * 1024 &&
            filled_share<GateUp16Large>(params, device) > filled_share<GateUp16>(params, device)) {
            return eight ? use(GateUp8Large()) : use(GateUp16Large());
        }
        return eight ? use(GateUp8()) : use(GateUp16());
    }
    return params.tokens <= GateUp32::kTokens ? use(GateUp32()) : use(GateUp64());
}

template <class Element>
cudaError_t launch_gate_up(gate_up_few::Params const& params, Device const& device, cudaStream_t stream) {
    return with_gate_up_config(
        params, device, [&](auto config) { return launch_gate_up<Element, decltype(config)>(params, device, stream); });
}

template <class Element, class Cfg>
cudaError_t launch_down(down_few::Params params, int tokens, int num_summed, Device const& device,
                        cudaStream_t stream) {
    params.num_slabs = static_cast<int>(ceil_div(params.d_out, Cfg::kColumns));
    params.num_shares = std::clamp(device.num_multiprocessors / params.num_slabs, 1, Cfg::kMostShares);
    dim3 const grid(static_cast<unsigned>(params.num_slabs * params.num_shares), static_cast<unsigned>(tokens));
    Choice const choice = {{"shares", params.num_shares}, params.num_shares, params.num_shares > 1 ? num_summed : 0};
    return launch_dependent(down_label_of<Cfg>(), down_few::down_kernel<Element, Cfg>, params, grid, Cfg::kThreads, 0,
                            device, stream, choice);
}

template <class Element>
cudaError_t launch_down(down_few::Params const& params, int tokens, int num_summed, Device const& device,
                        cudaStream_t stream) {
    auto const launch = [&](auto config) {
        return launch_down<Element, decltype(config)>(params, tokens, num_summed, device, stream);
    };
    return tokens == 1    ? launch(Down1())
           : tokens <= 4  ? launch(Down4())
           : tokens <= 16 ? launch(Down16())
                          : launch(Down64());
}

gate_up_few::Params gate_up_params(twell_problem const& problem, twell_tensors const& tensors,
                                   FewScratch const& scratch) {
    gate_up_few::Params params = {};
    params.x = static_cast<uint16_t const*>(tensors.x);
    params.w_gate = static_cast<uint16_t const*>(tensors.w_gate);
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.w_up = static_cast<uint16_t const*>(tensors.w_up);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.w_down = static_cast<uint16_t const*>(tensors.w_down);
    params.masks = scratch.masks;
    params.h = scratch.h;
    params.counters = scratch.counters;
    params.num_counters = scratch.num_counters;
    params.tokens = static_cast<int>(problem.tokens);
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.d_out = problem.d_out;
    params.num_mask_words = scratch.num_mask_words;
    params.relu_on_up = problem.activation == TWELL_DRELU;
    params.act = activation_of(problem);
    return params;
}

// On compute capability 9.0, where the down projection may be dense.
template <class Element>
cudaError_t launch_hopper(twell_problem const& problem, twell_tensors const& tensors, FewScratch const& scratch,
                          Device const& device, cudaStream_t stream) {
    int num_gate_ctas = 0;
    if (problem.tokens <= GateUp16::kTokens) {
        gate_up_few::Params params = gate_up_params(problem, tensors, scratch);
        params.h_rounded = scratch.h_rounded;
        params.counted = scratch.counted;
        num_gate_ctas = with_gate_up_config(params, device,
                                            [&](auto config) { return num_gate_up_ctas<decltype(config)>(params); });
        TWELL_TRY(launch_gate_up<Element>(params, device, stream));
    } else {
        TWELL_TRY(launch_gate_up_sm90(problem, tensors, scratch, num_gate_ctas, device, stream));
    }
    return launch_down_sm90(problem, tensors, scratch, num_gate_ctas, device, stream);
}

template <class Element>
cudaError_t launch_few(twell_problem const& problem, twell_tensors const& tensors, void* memory, Device const& device,
                       cudaStream_t stream) {
    unsigned char* next = static_cast<unsigned char*>(memory);
    FewScratch const scratch = take_scratch(problem, next);
    if constexpr (kHasSm90) {
        if (is_sm90(device) && few_sm90_supports(problem)) {
            return launch_hopper<Element>(problem, tensors, scratch, device, stream);
        }
    }
    TWELL_TRY(launch_gate_up<Element>(gate_up_params(problem, tensors, scratch), device, stream));
    down_few::Params params = down_params(problem, tensors, scratch);
    params.sums = scratch.sums;
    params.counters = scratch.counters;
    return launch_down<Element>(params, static_cast<int>(problem.tokens), scratch.num_summed, device, stream);
}

template <class... Configs>
void list_gate_up(Text& text, Configs...) {
    (add_line(text, gate_up_label_of<Configs>()), ...);
}

template <class... Configs>
void list_down(Text& text, Configs...) {
    (add_line(text, down_label_of<Configs>()), ...);
}

}  // namespace

void list_few(Text& text) {
    list_gate_up(text, GateUp8(), GateUp16(), GateUp8Large(), GateUp16Large(), GateUp32(), GateUp64());
    list_down(text, Down1(), Down4(), Down16(), Down64());
    if constexpr (kHasSm90) {
        list_few_sm90(text);
    }
}

size_t few_scratch_bytes(twell_problem const& problem) {
    if (problem.d_model > kMostDModelFew) {
        return 0;
    }
    twell_problem largest = problem;
    largest.tokens = std::min(problem.tokens, kMostTokensFew);
    return bytes_taken([&](unsigned char*& end) { take_scratch(largest, end); });
}

cudaError_t launch_few(twell_problem const& problem, twell_tensors const& tensors, void* scratch, Device const& device,
                       cudaStream_t stream) {
    return problem.dtype == TWELL_BF16 ? launch_few<Bf16>(problem, tensors, scratch, device, stream)
                                       : launch_few<Fp16>(problem, tensors, scratch, device, stream);
}

}  // namespace twell

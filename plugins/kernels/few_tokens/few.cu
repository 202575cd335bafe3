#include <cuda_runtime.h>

#include <algorithm>

#include "few_tokens/down_few.cuh"
#include "few_tokens/few.h"
#include "few_tokens/few_scratch.h"
#include "few_tokens/few_sm90.h"
#include "few_tokens/gate_up_few.cuh"
#include "host/problem.h"

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
              "its shares find a place in the scratch memory");
using Down4 = down_few::Config<8, 256>;
using Down16 = down_few::Config<16, 512>;
using Down64 = down_few::Config<16, 256>;

int num_mask_words(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, kMaskBits)); }

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
    int64_t const row_bits = int64_t{scratch.num_mask_words} * kMaskBits;
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
int num_gate_up_ctas(FewScratch const& scratch) {
    // CTAs cover whole mask words, also where d_ff ends in the first half of one.
    return static_cast<int>(ceil_div(scratch.num_mask_words * kMaskBits, Cfg::kNeurons));
}

template <class Cfg>
constexpr Label gate_up_label_of() {
    return {"gate_up_few", {{"neurons", Cfg::kNeurons}, {"tokens", Cfg::kTokens}}};
}

template <class Cfg>
constexpr Label down_label_of() {
    return {"down_few", {{"columns", Cfg::kColumns}, {"threads", Cfg::kThreads}}};
}

// The share of whole rounds of CTAs that a launch fills.
template <class Cfg>
double filled_share(FewScratch const& scratch, Device const& device) {
    int const places = device.num_multiprocessors * Cfg::kMinBlocks;
    int const ctas = num_gate_up_ctas<Cfg>(scratch);
    return static_cast<double>(ctas) / static_cast<double>(ceil_div(ctas, places) * places);
}

template <class Cfg>
void set_gate_up(FewConfig& config, FewScratch const& scratch) {
    config.gate_up_neurons = Cfg::kNeurons;
    config.gate_up_tokens = Cfg::kTokens;
    config.num_gate_ctas = num_gate_up_ctas<Cfg>(scratch);
}

void choose_gate_up(FewConfig& config, twell_problem const& problem, FewScratch const& scratch, Device const& device) {
    if (problem.tokens > GateUp32::kTokens) {
        return set_gate_up<GateUp64>(config, scratch);
    }
    if (problem.tokens > GateUp16::kTokens) {
        return set_gate_up<GateUp32>(config, scratch);
    }
    bool const eight = problem.tokens <= GateUp8::kTokens;
    if (device.max_shared_bytes >= 227 * 1024 &&
        filled_share<GateUp16Large>(scratch, device) > filled_share<GateUp16>(scratch, device)) {
        return eight ? set_gate_up<GateUp8Large>(config, scratch) : set_gate_up<GateUp16Large>(config, scratch);
    }
    return eight ? set_gate_up<GateUp8>(config, scratch) : set_gate_up<GateUp16>(config, scratch);
}

template <class Cfg>
void set_down(FewConfig& config, twell_problem const& problem, Device const& device) {
    int const num_slabs = static_cast<int>(ceil_div(problem.d_out, Cfg::kColumns));
    config.down_columns = Cfg::kColumns;
    config.down_threads = Cfg::kThreads;
    config.num_shares = std::clamp(device.num_multiprocessors / num_slabs, 1, Cfg::kMostShares);
}

void choose_down(FewConfig& config, twell_problem const& problem, Device const& device) {
    return problem.tokens == 1    ? set_down<Down1>(config, problem, device)
           : problem.tokens <= 4  ? set_down<Down4>(config, problem, device)
           : problem.tokens <= 16 ? set_down<Down16>(config, problem, device)
                                  : set_down<Down64>(config, problem, device);
}

FewConfig choose(twell_problem const& problem, FewScratch const& scratch, Device const& device) {
    FewConfig config = {};
    if constexpr (kHasSm90) {
        if (is_sm90(device) && few_sm90_supports(problem) && !has_scales(problem)) {
            config.may_be_dense = true;
            config.gate_up_is_sm90 = problem.tokens > GateUp16::kTokens;
            if (config.gate_up_is_sm90) {
                choose_gate_up_sm90(config, problem, scratch, device);
            } else {
                choose_gate_up(config, problem, scratch, device);
            }
            choose_down_sm90(config, problem, scratch, device);
            return config;
        }
    }
    choose_gate_up(config, problem, scratch, device);
    choose_down(config, problem, device);
    return config;
}

template <class Element, class Stored>
cudaError_t launch_gate_up(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    gate_up_few::ParamsOf<Stored> params = {};
    set_scales(params, problem, tensors);
    params.x = static_cast<uint16_t const*>(tensors.x);
    params.w_gate = static_cast<Stored const*>(tensors.w_gate);
    params.b_gate = static_cast<uint16_t const*>(tensors.b_gate);
    params.w_up = static_cast<Stored const*>(tensors.w_up);
    params.b_up = static_cast<uint16_t const*>(tensors.b_up);
    params.w_down = static_cast<Stored const*>(tensors.w_down);
    params.masks = scratch.masks;
    params.h = scratch.h;
    params.counters = scratch.counters;
    params.num_counters = scratch.num_counters;
    if (config.may_be_dense) {
        params.h_rounded = scratch.h_rounded;
        params.counted = scratch.counted;
    }
    params.tokens = static_cast<int>(problem.tokens);
    params.d_model = problem.d_model;
    params.d_ff = problem.d_ff;
    params.d_out = problem.d_out;
    params.num_mask_words = scratch.num_mask_words;
    params.relu_on_up = problem.activation == TWELL_DRELU;
    Activation const act = activation_of(problem, tensors);
    params.cuts = act.cuts;
    params.cut = act.cut;
    params.square = act.square;
    dim3 const grid(static_cast<unsigned>(config.num_gate_ctas));
    Choice const choice = {{}, config.num_gate_ctas, config.may_be_dense ? most_counted(scratch.num_mask_words) : 0};
    return with_config<GateUp8, GateUp16, GateUp8Large, GateUp16Large, GateUp32, GateUp64>(
        [&](auto c) {
            return decltype(c)::kNeurons == config.gate_up_neurons && decltype(c)::kTokens == config.gate_up_tokens;
        },
        [&](auto c) {
            using Cfg = decltype(c);
            return launch_dependent(gate_up_label_of<Cfg>(), gate_up_few::gate_up_kernel<Element, Stored, Cfg>, params,
                                    grid, gate_up_few::kThreads, Cfg::kSharedBytes, call.device, call.stream, choice);
        });
}

template <class Element, class Stored>
cudaError_t launch_down(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    down_few::ParamsOf<Stored> params = down_params<Stored>(call, scratch);
    params.sums = scratch.sums;
    params.counters = scratch.counters;
    params.num_slabs = static_cast<int>(ceil_div(params.d_out, config.down_columns));
    params.num_shares = config.num_shares;
    dim3 const grid(static_cast<unsigned>(params.num_slabs * params.num_shares),
                    static_cast<unsigned>(call.problem.tokens));
    Choice const choice = {
        {"shares", params.num_shares}, params.num_shares, params.num_shares > 1 ? scratch.num_summed : 0};
    return with_config<Down1, Down4, Down16, Down64>(
        [&](auto c) {
            return decltype(c)::kColumns == config.down_columns && decltype(c)::kThreads == config.down_threads;
        },
        [&](auto c) {
            using Cfg = decltype(c);
            return launch_dependent(down_label_of<Cfg>(), down_few::down_kernel<Element, Stored, Cfg>, params, grid,
                                    Cfg::kThreads, 0, call.device, call.stream, choice);
        });
}

template <class Element, class Stored>
cudaError_t launch(Call const& call, FewScratch const& scratch, FewConfig const& config) {
    if constexpr (kHasSm90 && sizeof(Stored) == 2) {
        if (config.may_be_dense) {
            TWELL_TRY(config.gate_up_is_sm90 ? launch_gate_up_sm90(call, scratch, config)
                                             : launch_gate_up<Element, Stored>(call, scratch, config));
            return launch_down_sm90(call, scratch, config);
        }
    }
    TWELL_TRY(launch_gate_up<Element, Stored>(call, scratch, config));
    return launch_down<Element, Stored>(call, scratch, config);
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

int dense_down_shares(int d_out, int block_tokens, int multiprocessors) {
    int const places = (block_tokens <= 16 ? 2 : 1) * multiprocessors;
    int64_t const blocks = ceil_div(d_out, kDenseDownColumns);
    // A share of a block's time; what a CTA takes besides is about a tenth of it.
    auto const cost = [&](int shares) {
        return static_cast<double>(ceil_div(blocks * shares, places)) * (1.0 / shares + 0.1);
    };
    int best = 1;
    for (int shares = 2; shares <= most_dense_down_shares(block_tokens); ++shares) {
        best = cost(shares) < cost(best) ? shares : best;
    }
    return best;
}

void list_few(Text& text) {
    list_gate_up(text, GateUp8(), GateUp16(), GateUp8Large(), GateUp16Large(), GateUp32(), GateUp64());
    list_down(text, Down1(), Down4(), Down16(), Down64());
    if constexpr (kHasSm90) {
        list_few_sm90(text);
    }
}

size_t few_bytes(twell_problem const& problem) {
    if (problem.d_model > kMostDModelFew) {
        return 0;
    }
    twell_problem largest = problem;
    largest.tokens = std::min(problem.tokens, kMostTokensFew);
    return bytes_taken([&](unsigned char*& end) { take_scratch(largest, end); });
}

cudaError_t launch_few(Call const& call, void* workspace) {
    unsigned char* next = static_cast<unsigned char*>(workspace);
    FewScratch const scratch = take_scratch(call.problem, next);
    FewConfig const config = choose(call.problem, scratch, call.device);
    bool const is_bf16 = call.problem.dtype == TWELL_BF16;
    if (has_scales(call.problem)) {
        return is_bf16 ? launch<Bf16, E4m3>(call, scratch, config) : launch<Fp16, E4m3>(call, scratch, config);
    }
    return is_bf16 ? launch<Bf16, uint16_t>(call, scratch, config) : launch<Fp16, uint16_t>(call, scratch, config);
}

}  // namespace twell

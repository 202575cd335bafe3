#include <cuda_runtime.h>

#include <algorithm>
#include <initializer_list>

#include "host/problem.h"
#include "many_tokens/gate/gate.h"
#include "many_tokens/gate/gate_generic.cuh"
#include "many_tokens/gate/gate_sm90.h"

namespace twell {
namespace {

namespace generic = gate_generic;

// 64 x 64 a warp: the most reuse per fragment that the registers allow.
using ConfigLarge = generic::Config<128, 2, 4, 4>;
// Fewer rows: where large blocks would be half empty or leave multiprocessors idle.
using ConfigMiddle = generic::Config<96, 2, 4, 4>;
using ConfigMedium = generic::Config<64, 2, 4, 4>;
// Up to 16 rows the weights' way through memory decides: a fifth stage keeps more bytes in flight.
using ConfigSmall = generic::Config<16, 1, 8, 5>;

// How rows are cut into blocks: the first ones into large blocks, the rest as it says.
struct Cut {
    int64_t large_rows;
    int rest_block;
};

// How long `rows` rows take, in the time that a multiprocessor needs for one: tiles are computed in rounds, one a
// multiprocessor, and a tile's start and end take as long as a few rows.
int64_t cost_of(int64_t rows, int block, int num_tiles, int num_multiprocessors) {
    constexpr int kOverhead = 12;
    return ceil_div(ceil_div(rows, block) * num_tiles, num_multiprocessors) * (block + kOverhead);
}

// The cut that takes the least time. Large blocks for all rows may leave most of the last round idle; then they are for
// whole rounds only, and smaller blocks for the other rows.
Cut choose_cut(int64_t rows, int num_tiles, int num_multiprocessors) {
    constexpr int kLarge = ConfigLarge::BLOCK_M;
    int64_t const whole_rounds = ceil_div(rows, kLarge) * num_tiles / num_multiprocessors;
    int64_t const whole_rows = std::min(whole_rounds * num_multiprocessors / num_tiles, rows / kLarge) * kLarge;
    Cut best = {};
    int64_t best_cost = INT64_MAX;
    for (int64_t const large_rows : {int64_t{0}, whole_rows}) {
        for (int const block : {kLarge, ConfigMiddle::BLOCK_M, ConfigMedium::BLOCK_M}) {
            int64_t const cost = cost_of(large_rows, kLarge, num_tiles, num_multiprocessors) +
                                 cost_of(rows - large_rows, block, num_tiles, num_multiprocessors);
            if (cost < best_cost) {
                best = {large_rows, block};
                best_cost = cost;
            }
        }
    }
    return best;
}

// The problem of `count` rows from `begin` on.
generic::Params rows_of(generic::Params params, int64_t begin, int64_t count) {
    params.x += begin * params.d_model;
    params.packed += begin * params.num_tiles * params.words_per_tile;
    if (params.spilled != nullptr) {
        params.spilled += begin * params.num_tiles * TWELL_TILE;
    }
    params.tokens = count;
    return params;
}

template <class Cfg>
constexpr Label label_of() {
    return {"gate_generic", {{"tokens", Cfg::BLOCK_M}}};
}

template <class Element, class Cfg>
cudaError_t launch_config(generic::Params const& params, Device const& device, cudaStream_t stream) {
    if (params.tokens == 0) {
        return cudaSuccess;
    }
    dim3 const grid(static_cast<unsigned>(ceil_div(params.tokens, Cfg::BLOCK_M) * params.num_tiles));
    return launch_dependent(label_of<Cfg>(), generic::gate_kernel<Element, Cfg>, params, grid, Cfg::kThreads,
                            Cfg::kSharedBytes, device, stream);
}

template <class Element>
cudaError_t launch_generic(generic::Params const& params, GateConfig const& config, Device const& device,
                           cudaStream_t stream) {
    TWELL_TRY(launch_config<Element, ConfigLarge>(rows_of(params, 0, config.large_rows), device, stream));
    generic::Params const rest = rows_of(params, config.large_rows, params.tokens - config.large_rows);
    return with_config<ConfigSmall, ConfigMedium, ConfigMiddle, ConfigLarge>(
        [&](auto c) { return decltype(c)::BLOCK_M == config.rest_block; },
        [&](auto c) { return launch_config<Element, decltype(c)>(rest, device, stream); });
}

// From this many rows on the Hopper kernel is the faster one: below, the generic kernel has a configuration for few
// rows.
constexpr int64_t kFewestTokensSm90 = ConfigSmall::BLOCK_M + 1;

template <class... Configs>
void list(Text& text, Configs...) {
    (add_line(text, label_of<Configs>()), ...);
}

}  // namespace

void list_gate(Text& text) {
    list(text, ConfigSmall(), ConfigMedium(), ConfigMiddle(), ConfigLarge());
    if constexpr (kHasSm90) {
        list_gate_sm90(text);
    }
}

GateConfig choose_gate(twell_problem const& problem, Device const& device, Kernels kernels) {
    if constexpr (kHasSm90) {
        bool const wants_sm90 =
            kernels == Kernels::kSm90 || (kernels == Kernels::kBest && problem.tokens >= kFewestTokensSm90);
        if (wants_sm90 && is_sm90(device) && gate_sm90_supports(problem)) {
            return choose_gate_sm90(problem, device);
        }
    }
    GateConfig config = {};
    config.exists = kernels != Kernels::kSm90 && !has_scales(problem);
    if (problem.tokens <= ConfigSmall::BLOCK_M) {
        config.rest_block = ConfigSmall::BLOCK_M;
    } else {
        Cut const cut = choose_cut(problem.tokens, num_tiles(problem), device.num_multiprocessors);
        config.large_rows = cut.large_rows;
        config.rest_block = cut.rest_block;
    }
    return config;
}

cudaError_t launch_gate(Call const& call, GateOutput const& output, GateConfig const& config,
                        Quantised const& rounded) {
    if (!config.exists) {
        return cudaErrorNotSupported;
    }
    if constexpr (kHasSm90) {
        if (config.is_sm90) {
            return launch_gate_sm90(call, rounded, output, config);
        }
    }
    twell_problem const& problem = call.problem;
    generic::Params params = {};
    set_block(params, problem, call.tensors);
    params.packed = output.packed;
    params.spilled = output.spilled;
    params.tokens = problem.tokens;
    params.num_tiles = num_tiles(problem);
    params.words_per_tile = words_per_tile(problem);
    return problem.dtype == TWELL_BF16 ? launch_generic<Bf16>(params, config, call.device, call.stream)
                                       : launch_generic<Fp16>(params, config, call.device, call.stream);
}

}  // namespace twell

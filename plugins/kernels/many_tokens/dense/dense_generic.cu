#include <algorithm>

#include "host/problem.h"
#include "many_tokens/dense/dense_generic.cuh"
#include "many_tokens/dense/dense_generic.h"

namespace twell {
namespace {

using dense::Projection;

// 64 x 64 a warp, as in the gate.
using Cfg = dense_generic::Config<128, 2, 4, 4>;

// The speed of a multiprocessor, in cycles: how long it multiplies a slice; how many bytes of weights the sparse path
// gathers, from L2 and from memory, while all others do so too. Those of 9.0 were measured on an H200, see
// benchmarks/LOG.md; the others are estimates from data sheets. Of 8.6, 8.9 and 12.0, GeForce boards multiply at half
// the rate assumed here: they may take the dense path where the sparse one is up to twice as fast.
struct Rates {
    float slice_cycles;
    float gathered_l2_bytes;
    float gathered_memory_bytes;
};

Rates rates_of(Device const& device) {
    if (device.major == 8) {
        return device.minor == 0 ? Rates{1170.0f, 30.0f, 13.0f} : Rates{2330.0f, 22.0f, 5.0f};
    }
    return device.major == 9 ? Rates{920.0f, 36.0f, 20.0f} : Rates{2330.0f, 22.0f, 4.5f};
}

// A tile's start and end.
constexpr float kCyclesOfOverhead = 6000.0f;
// The time of a cycle. Clocks differ, but a query takes long, and the guard compares times that nearly all depend on
// it.
constexpr float kCycleNs = 0.65f;

template <Projection kProjection>
int num_neurons(twell_problem const& problem) {
    return kProjection == Projection::kUp ? problem.d_ff : problem.d_out;
}

template <Projection kProjection>
int depth(twell_problem const& problem) {
    return kProjection == Projection::kUp ? problem.d_model : problem.d_ff;
}

template <Projection kProjection>
int num_tiles_of(twell_problem const& problem) {
    return static_cast<int>(ceil_div(num_neurons<kProjection>(problem), dense_generic::BLOCK_N));
}

template <Projection kProjection>
DenseRounds rounds_of(twell_problem const& problem, Device const& device) {
    float const slices = static_cast<float>(ceil_div(depth<kProjection>(problem), dense_generic::BLOCK_K));
    return {1.0f / static_cast<float>(Cfg::BLOCK_M),
            static_cast<float>(num_tiles_of<kProjection>(problem)) / static_cast<float>(device.num_multiprocessors),
            (slices * rates_of(device).slice_cycles + kCyclesOfOverhead) * kCycleNs};
}

template <class Element, Projection kProjection>
cudaError_t launch_projection(Call const& call, Gather const& gather, Schedule const& schedule) {
    constexpr bool kUp = kProjection == Projection::kUp;
    twell_problem const& problem = call.problem;
    twell_tensors const& tensors = call.tensors;
    dense_generic::Params params = {};
    set_block(params, problem, tensors);
    params.weights = static_cast<uint16_t const*>(kUp ? tensors.w_up : tensors.w_down);
    params.bias = static_cast<uint16_t const*>(kUp ? tensors.b_up : tensors.b_down);
    params.gather = gather;
    params.schedule = schedule;
    params.num_rows = problem.tokens;
    params.depth = depth<kProjection>(problem);
    params.num_neurons = num_neurons<kProjection>(problem);
    params.num_tiles = num_tiles_of<kProjection>(problem);
    int64_t const tiles = ceil_div(problem.tokens, Cfg::BLOCK_M) * params.num_tiles;
    dim3 const grid(static_cast<unsigned>(std::min<int64_t>(tiles, call.device.num_multiprocessors)));
    return launch_dependent({kUp ? "dense_up_generic" : "dense_down_generic"},
                            dense_generic::dense_kernel<Element, Cfg, kProjection>, params, grid, Cfg::kThreads,
                            Cfg::kSharedBytes, call.device, call.stream);
}

template <class Element>
cudaError_t launch_projections(Call const& call, Gather const& gather, Schedule const& schedule) {
    if (call.problem.variant == TWELL_GATED) {
        TWELL_TRY(launch_projection<Element, Projection::kUp>(call, gather, schedule));
    }
    return launch_projection<Element, Projection::kDown>(call, gather, schedule);
}

}  // namespace

void list_dense_generic(Text& text) {
    add_line(text, {"dense_up_generic"});
    add_line(text, {"dense_down_generic"});
}

PathCosts dense_generic_costs(twell_problem const& problem, Device const& device) {
    Rates const rates = rates_of(device);
    // Weights beyond what L2 holds come from memory.
    float const weights = 2.0f * static_cast<float>(problem.d_ff) *
                          static_cast<float>(problem.d_out + (problem.variant == TWELL_GATED ? problem.d_model : 0));
    float const in_l2 = std::min(1.0f, static_cast<float>(device.l2_bytes) / weights);
    float const cycles_per_byte = in_l2 / rates.gathered_l2_bytes + (1.0f - in_l2) / rates.gathered_memory_bytes;
    float const cycles_per_ns = static_cast<float>(device.num_multiprocessors) / kCycleNs;
    PathCosts costs = {};
    costs.gathered_bytes_per_ns = cycles_per_ns / cycles_per_byte;
    costs.copied_bytes_per_ns = cycles_per_ns * rates.gathered_memory_bytes / 3.0f;
    costs.up = rounds_of<Projection::kUp>(problem, device);
    costs.down = rounds_of<Projection::kDown>(problem, device);
    return costs;
}

cudaError_t launch_dense_generic(Call const& call, Gather const& gather, Schedule const& schedule) {
    return call.problem.dtype == TWELL_BF16 ? launch_projections<Bf16>(call, gather, schedule)
                                            : launch_projections<Fp16>(call, gather, schedule);
}

}  // namespace twell

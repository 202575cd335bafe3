#include "host/problem.h"
#include "many_tokens/dense/dense.h"
#include "many_tokens/dense/dense_generic.h"

namespace twell {
namespace {

// For the guard, measured on an H200 at d_model 2048 and d_ff 5632, see benchmarks/LOG.md: how fast the sparse path
// gathers weights, how fast rows are copied; and how long a cycle is under load.
constexpr float kGatheredBytesPerNs = 8400.0f;
constexpr float kGatheredBytesPerNsChunks = 10240.0f;
constexpr float kCopiedBytesPerNs = 450.0f;
constexpr float kCycleNs = 0.72f;

DenseRounds rounds_of(DenseShape const& shape) {
    return {1.0f / static_cast<float>(shape.tiling.tile_tokens),
            static_cast<float>(shape.tiling.num_tiles) / static_cast<float>(shape.clusters),
            static_cast<float>(shape.tiling.round_cycles) * kCycleNs};
}

}  // namespace

DenseConfig choose_dense(twell_problem const& problem, Device const& device, Kernels kernels) {
    DenseConfig config = {};
    if constexpr (kHasSm90) {
        config.is_sm90 = kernels != Kernels::kGeneric && is_sm90(device) && dense_sm90_supports(problem);
        if (config.is_sm90 && has_scales(problem) && problem.variant == TWELL_GATED) {
            config.up = choose_dense_up_bytes_sm90(problem, device);
            config.down = choose_dense_down_bytes_sm90(problem, 0, device);
        } else if (config.is_sm90) {
            config.up = choose_dense_up_sm90(problem, device);
            config.down = choose_dense_down_sm90(problem, 0, device);
        }
    }
    return config;
}

PathCosts path_costs(twell_problem const& problem, DenseConfig const& config, Device const& device, bool with_chunks) {
    if (config.is_sm90) {
        return {with_chunks ? kGatheredBytesPerNsChunks : kGatheredBytesPerNs, kCopiedBytesPerNs, rounds_of(config.up),
                rounds_of(config.down)};
    }
    return dense_generic_costs(problem, device);
}

cudaError_t launch_dense(Call const& call, Gather const& gather, Schedule const& schedule, DenseConfig const& config) {
    if constexpr (kHasSm90) {
        if (config.is_sm90) {
            DenseRows rows = {};
            rows.gate = gather.gate;
            rows.x_part = gather.x_part;
            rows.h_part = gather.h_part;
            rows.part = max_dense_part(call.problem);
            rows.schedule = schedule;
            if (call.problem.variant == TWELL_GATED) {
                TWELL_TRY(launch_dense_up_sm90(call, rows, config.up));
            }
            return launch_dense_down_sm90(call, rows, config.down);
        }
    }
    return launch_dense_generic(call, gather, schedule);
}

cudaError_t launch_dense_bytes(Call const& call, Gather const& gather, Schedule const& schedule,
                               DenseConfig const& config, Quantised const& rounded, HiddenBytes const& h) {
    if constexpr (kHasSm90) {
        DenseRows rows = {};
        rows.gate = gather.gate;
        rows.x_part = gather.x_part;
        rows.part = max_dense_part(call.problem);
        rows.schedule = schedule;
        rows.bytes = h;
        rows.x_bytes = rounded.x;
        rows.x_scale = rounded.scale;
        TWELL_TRY(launch_dense_up_bytes_sm90(call, rows, config.up));
        return launch_dense_down_bytes_sm90(call, rows, config.down);
    }
    return cudaErrorNotSupported;
}

void list_dense(Text& text) {
    if constexpr (kHasSm90) {
        list_dense_sm90(text);
        list_dense_bytes_sm90(text);
    }
    list_dense_generic(text);
}

}  // namespace twell

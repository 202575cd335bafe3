#include <algorithm>

#include "few_tokens/few.h"
#include "host/problem.h"
#include "many_tokens/dense.h"
#include "many_tokens/dense_sm90.cuh"
#include "matmul/matmul_sm90.h"
#include "sm90.h"

namespace twell {
namespace {

namespace sm90 = dense_sm90;
using sm90::Projection;

// For the guard, measured on an H200 at d_model 2048 and d_ff 5632, see benchmarks/LOG.md: how fast the sparse path
// gathers weights, how fast rows are copied; and how long a cycle is under load.
constexpr float kGatheredBytesPerNs = 8400.0f;
constexpr float kGatheredBytesPerNsChunks = 10240.0f;
constexpr float kCopiedBytesPerNs = 450.0f;
constexpr float kCycleNs = 0.72f;
// Up to kMostTokensSkipping tokens, where blocks are dense for want of places for so many neurons, the down projection
// may skip inactive ones: beside what it takes it does not matter that a dense layer takes 1 to 4 us longer. It does up
// to so many active pairs of a token and a neuron, and so many of one token, for each neuron. Measured on an H200 with
// d_model 2048 to 5120, see benchmarks/LOG.md.
constexpr float kMostPairsSkipping = 0.6f;
constexpr float kMostOfRowSkipping = 0.07f;

using UpTilings = sm90::Tilings<sm90::Choices<144, 160, 176, 192, 200, 208, 216, 224, 232, 240, 256>, sm90::Choices<>>;
using DownTilings = sm90::Tilings<
    sm90::Choices<32, 48, 64, 88, 112, 128, 136, 144, 152, 160, 168, 176, 192, 200, 208, 216, 224, 240, 248, 256>,
    sm90::Choices<32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120>>;

// What all kernels of one call share.
struct Launch {
    twell_problem const& problem;
    twell_tensors const& tensors;
    Gather const& gather;
    Schedule schedule;
    Device const& device;
    cudaStream_t stream;
    bool all_rows;         // are dense, and there is no schedule
    BlockScratch scratch;  // then
};

// What a projection has to do if all rows are dense, and how it does it, whatever rows are.
template <Projection kProjection>
struct Shape {
    static constexpr bool kUp = kProjection == Projection::kUp;
    static constexpr char const* kName = kUp ? "dense_up_sm90" : "dense_down_sm90";

    using Tilings = std::conditional_t<kUp, UpTilings, DownTilings>;

    sm90::Product product;
    int clusters;  // that the device holds
    sm90::Tiling tiling;

    Shape(twell_problem const& problem, int64_t most_part_sums, Device const& device)
        : product{problem.tokens,
                  kUp ? problem.d_ff : problem.d_out,
                  static_cast<int>((kUp ? problem.d_model : spilled_stride(problem)) / sm90::BLOCK_K),
                  1,
                  most_part_sums,
                  0},
          clusters(sm90::num_clusters(device)),
          tiling(sm90::choose(product, clusters, Tilings())) {}

    DenseRounds rounds() const {
        return {1.0f / static_cast<float>(tiling.tile_tokens),
                static_cast<float>(tiling.num_tiles) / static_cast<float>(clusters),
                static_cast<float>(tiling.round_cycles) * kCycleNs};
    }
};

// Of a dense block: the next launch computes y if it is sparse enough.
bool may_skip(Launch const& launch) { return launch.scratch.active.masks != nullptr; }

skipping_down::Decision skipping_of(Launch const& launch) {
    float const d_ff = static_cast<float>(launch.problem.d_ff);
    return {launch.scratch.active, static_cast<uint32_t>(kMostPairsSkipping * d_ff),
            static_cast<uint32_t>(kMostOfRowSkipping * d_ff)};
}

using NarrowSkipping = down_few::Config<32, skipping_down::kThreads>;
using WideSkipping = down_few::Config<64, skipping_down::kThreads>;

template <class Cfg>
constexpr Label skipping_label_of() {
    return {"skipping_down", {{"columns", Cfg::kColumns}}};
}

template <class Element, class Cfg>
cudaError_t launch_skipping_down(Launch const& launch, skipping_down::Params const& params, int num_slabs) {
    return launch_dependent(skipping_label_of<Cfg>(), skipping_down::down_kernel<Element, Cfg>, params,
                            dim3(static_cast<unsigned>(launch.problem.tokens), static_cast<unsigned>(num_slabs)),
                            Cfg::kThreads, 0, launch.device, launch.stream);
}

template <class Element>
cudaError_t launch_skipping_down(Launch const& launch) {
    twell_problem const& problem = launch.problem;
    FewScratch scratch = {};
    scratch.masks = launch.scratch.active.masks;
    scratch.num_mask_words = launch.scratch.active.num_words;
    scratch.h_rounded = launch.gather.gate.spilled;
    skipping_down::Params params = {};
    params.decision = skipping_of(launch);
    params.down = down_params(problem, launch.tensors, scratch);
    // The fewer columns a CTA has, the more loads are in flight, but not in a second round of CTAs.
    int const narrow_slabs = static_cast<int>(ceil_div(problem.d_out, NarrowSkipping::kColumns));
    if (problem.tokens * narrow_slabs <= launch.device.num_multiprocessors * skipping_down::kCtasPerMultiprocessor) {
        return launch_skipping_down<Element, NarrowSkipping>(launch, params, narrow_slabs);
    }
    int const wide_slabs = static_cast<int>(ceil_div(problem.d_out, WideSkipping::kColumns));
    return launch_skipping_down<Element, WideSkipping>(launch, params, wide_slabs);
}

template <class Element, Projection kProjection>
cudaError_t launch_projection(Launch const& launch) {
    constexpr bool kUp = kProjection == Projection::kUp;
    twell_problem const& problem = launch.problem;
    Gather const& gather = launch.gather;
    Shape<kProjection> const shape(problem, launch.scratch.parts.most_sums, launch.device);
    using Tilings = typename Shape<kProjection>::Tilings;
    auto const kernel = sm90::find_kernel<sm90::Params>(shape.tiling, Tilings(), [](auto tokens, auto layout) {
        using Cfg = sm90::Config<decltype(tokens)::value, kUp, 1, decltype(layout)::value>;
        return sm90::Kernel<sm90::Params>::of<Cfg>(sm90::dense_kernel<Element, Cfg, kProjection>);
    });
    int64_t const part = max_dense_part(problem);
    int64_t const stride = spilled_stride(problem);
    sm90::Params params = {};
    set_block(params.block, problem, launch.tensors);
    params.relu_on_up = params.block.relu_on_up;
    params.schedule = launch.schedule;
    params.num_rows = problem.tokens;
    params.num_neurons = shape.product.num_neurons;
    params.num_tiles = shape.tiling.num_tiles;
    params.num_slices = shape.product.num_slices;
    params.num_parts = shape.tiling.num_parts;
    params.parts = {launch.scratch.parts.sums, launch.scratch.parts.states};
    params.all_rows = launch.all_rows;
    params.gate = gather.gate;
    params.h_part = gather.h_part;
    params.bias = static_cast<uint16_t const*>(kUp ? launch.tensors.b_up : launch.tensors.b_down);
    if constexpr (kUp) {
        TWELL_TRY(first_error({
            sm90::encode(launch.device, params.weights, launch.tensors.w_up, problem.d_ff, problem.d_model,
                         sm90::BLOCK_M, problem.dtype),
            sm90::encode(launch.device, params.tokens[0], launch.tensors.x, problem.tokens, problem.d_model,
                         kernel.rows_loaded, problem.dtype),
            sm90::encode(launch.device, params.tokens[1], gather.x_part, part, problem.d_model, kernel.rows_loaded,
                         problem.dtype),
        }));
    } else {
        params.next_overlaps = !launch.all_rows || may_skip(launch);  // then a sparse down projection follows
        params.may_skip = may_skip(launch);
        params.skipping = skipping_of(launch);
        TWELL_TRY(first_error({
            sm90::encode(launch.device, params.weights, launch.tensors.w_down, problem.d_ff, problem.d_out,
                         sm90::BLOCK_K, problem.dtype),
            sm90::encode(launch.device, params.tokens[0], gather.gate.spilled, problem.tokens, problem.d_ff, stride,
                         kernel.rows_loaded, problem.dtype),
            sm90::encode(launch.device, params.tokens[1], launch.all_rows ? gather.gate.spilled : gather.h_part, part,
                         problem.d_ff, stride, kernel.rows_loaded, problem.dtype),
        }));
    }
    Choice const choice = {
        {"parts", params.num_parts}, (params.num_parts - 1) * shape.tiling.num_sums(), shape.product.most_part_sums};
    return launch_dependent(sm90::label_of(Shape<kProjection>::kName, shape.tiling.block, shape.tiling.layout),
                            kernel.function, params, sm90::grid_of(shape.tiling, shape.clusters), sm90::kThreads,
                            kernel.shared_bytes, launch.device, launch.stream, choice);
}

template <class Element>
cudaError_t launch_projections(Launch const& launch) {
    if (launch.problem.variant == TWELL_GATED) {
        TWELL_TRY(launch_projection<Element, Projection::kUp>(launch));
    }
    return launch_projection<Element, Projection::kDown>(launch);
}

// Of a dense block.
template <class Element>
cudaError_t launch_down(Launch const& launch) {
    TWELL_TRY(launch_projection<Element, Projection::kDown>(launch));
    return may_skip(launch) ? launch_skipping_down<Element>(launch) : cudaSuccess;
}

}  // namespace

void list_dense_sm90(Text& text) {
    list_hidden_sm90(text);
    sm90::list(text, Shape<Projection::kUp>::kName, UpTilings());
    sm90::list(text, Shape<Projection::kDown>::kName, DownTilings());
    add_line(text, skipping_label_of<NarrowSkipping>());
    add_line(text, skipping_label_of<WideSkipping>());
}

bool dense_sm90_supports(twell_problem const& problem) {
    return problem.variant == TWELL_PLAIN || problem.d_model % sm90::BLOCK_K == 0;
}

PathCosts dense_sm90_costs(twell_problem const& problem, Device const& device, bool with_chunks) {
    return {with_chunks ? kGatheredBytesPerNsChunks : kGatheredBytesPerNs, kCopiedBytesPerNs,
            Shape<Projection::kUp>(problem, 0, device).rounds(), Shape<Projection::kDown>(problem, 0, device).rounds()};
}

cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                              Schedule const& schedule, Device const& device, cudaStream_t stream) {
    Launch const launch = {problem, tensors, gather, schedule, device, stream, false, {}};
    return problem.dtype == TWELL_BF16 ? launch_projections<Bf16>(launch) : launch_projections<Fp16>(launch);
}

cudaError_t launch_dense_block(twell_problem const& problem, twell_tensors const& tensors, uint16_t* h,
                               BlockScratch const& scratch, bool skips, Device const& device, cudaStream_t stream) {
    BlockScratch left = scratch;
    if (!skips || problem.tokens > kMostTokensSkipping) {
        left.active.masks = nullptr;
    }
    TWELL_TRY(launch_hidden_sm90(problem, tensors, h, left, device, stream));
    Gather gather = {};
    gather.gate = {nullptr, h, num_tiles(problem), words_per_tile(problem)};
    Launch const launch = {problem, tensors, gather, {}, device, stream, true, left};
    return problem.dtype == TWELL_BF16 ? launch_down<Bf16>(launch) : launch_down<Fp16>(launch);
}

}  // namespace twell

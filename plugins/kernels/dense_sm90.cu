#include "dense_sm90.cuh"
#include "dense_sm90.h"
#include "matmul_sm90.h"
#include "problem.cuh"

namespace twell {
namespace {

namespace sm90 = dense_sm90;

constexpr int kGatherBlocks = 4;  // a multiprocessor

// Of the tokens, this share may be dense while the others are not; from there on all are.
constexpr int64_t kPartDivisor = 4;

size_t h_part_bytes(twell_problem const& problem) {
    return static_cast<size_t>(max_dense_part(problem)) * spilled_stride(problem) * sizeof(uint16_t);
}

size_t x_part_bytes(twell_problem const& problem) {
    return problem.variant == TWELL_GATED
               ? static_cast<size_t>(max_dense_part(problem)) * problem.d_model * sizeof(uint16_t)
               : 0;
}

// What all kernels of one call share.
struct Launch {
    twell_problem const& problem;
    twell_tensors const& tensors;
    sm90::Gate gate;
    uint16_t* h_part;
    uint16_t* x_part;
    sm90::Rows rows;
    int clusters;  // that the device holds
    cudaStream_t stream;
};

cudaError_t launch_gather(Launch const& launch, int num_multiprocessors) {
    sm90::GatherParams params = {};
    params.rows = launch.rows;
    params.gate = launch.gate;
    params.h_part = launch.h_part;
    if (launch.problem.variant == TWELL_GATED) {
        params.x = static_cast<uint16_t const*>(launch.tensors.x);
        params.x_part = launch.x_part;
    }
    params.d_model = launch.problem.d_model;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(num_multiprocessors * kGatherBlocks));
    config.blockDim = dim3(sm90::kGatherThreads);
    config.stream = launch.stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, sm90::gather_kernel, params);
}

template <class Element, class Cfg, sm90::Projection kProjection>
cudaError_t launch_projection(Launch const& launch) {
    constexpr bool kUp = kProjection == sm90::Projection::kUp;
    twell_problem const& problem = launch.problem;
    int64_t const part = max_dense_part(problem);
    int64_t const stride = spilled_stride(problem);
    sm90::Params params = {};
    params.rows = launch.rows;
    params.relu_on_up = problem.activation == TWELL_DRELU;
    cudaError_t error = cudaSuccess;
    if constexpr (kUp) {
        params.bias = static_cast<uint16_t const*>(launch.tensors.b_up);
        params.num_neurons = problem.d_ff;
        params.num_slices = problem.d_model / sm90::BLOCK_K;
        params.gate = launch.gate;
        params.h_part = launch.h_part;
        error = sm90::first_error({
            sm90::encode(params.weights, launch.tensors.w_up, problem.d_ff, problem.d_model, sm90::BLOCK_M,
                         problem.dtype),
            sm90::encode(params.tokens[0], launch.tensors.x, problem.tokens, problem.d_model, Cfg::kRowsLoaded,
                         problem.dtype),
            sm90::encode(params.tokens[1], launch.x_part, part, problem.d_model, Cfg::kRowsLoaded, problem.dtype),
        });
    } else {
        params.bias = static_cast<uint16_t const*>(launch.tensors.b_down);
        params.y = static_cast<uint16_t*>(launch.tensors.y);
        params.num_neurons = problem.d_out;
        params.num_slices = static_cast<int>(stride / sm90::BLOCK_K);
        error = sm90::first_error({
            sm90::encode(params.weights, launch.tensors.w_down, problem.d_ff, problem.d_out, sm90::BLOCK_K,
                         problem.dtype),
            sm90::encode(params.tokens[0], launch.gate.spilled, problem.tokens, stride, Cfg::kRowsLoaded, problem.dtype),
            sm90::encode(params.tokens[1], launch.h_part, part, stride, Cfg::kRowsLoaded, problem.dtype),
        });
    }
    if (error != cudaSuccess) {
        return error;
    }
    params.num_tiles = (params.num_neurons + TWELL_TILE - 1) / TWELL_TILE;
    int64_t const tiles = sm90::num_blocks(problem.tokens, Cfg::BLOCK_N) * params.num_tiles;
    return sm90::launch_clusters<Cfg>(sm90::dense_kernel<Element, Cfg, kProjection>, params, tiles, launch.clusters,
                                      true, launch.stream);
}

template <class Element, sm90::Projection kProjection>
cudaError_t launch_projection(Launch const& launch, int num_tiles) {
    int const tokens_per_block = sm90::choose(launch.problem.tokens, num_tiles, launch.clusters, sm90::AllChoices());
    return sm90::with_config(tokens_per_block, sm90::AllChoices(), [&](auto config) {
        return launch_projection<Element, decltype(config), kProjection>(launch);
    });
}

template <class Element>
cudaError_t launch_projections(Launch const& launch) {
    if (launch.problem.variant == TWELL_GATED) {
        if (cudaError_t const error =
                launch_projection<Element, sm90::Projection::kUp>(launch, num_tiles(launch.problem));
            error != cudaSuccess) {
            return error;
        }
    }
    return launch_projection<Element, sm90::Projection::kDown>(launch,
                                                               (launch.problem.d_out + TWELL_TILE - 1) / TWELL_TILE);
}

}  // namespace

bool dense_sm90_supports(twell_problem const& problem) {
    return problem.variant == TWELL_PLAIN || problem.d_model % sm90::BLOCK_K == 0;
}

int64_t max_dense_part(twell_problem const& problem) { return (problem.tokens + kPartDivisor - 1) / kPartDivisor; }

size_t dense_scratch_bytes(twell_problem const& problem) { return h_part_bytes(problem) + x_part_bytes(problem); }

cudaError_t launch_dense_sm90(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed,
                              uint16_t* spilled, DenseRows const& rows, void* scratch, int num_multiprocessors,
                              cudaStream_t stream) {
    sm90::Gate const gate = {packed, spilled, num_tiles(problem), words_per_tile(problem)};
    uint16_t* const h_part = static_cast<uint16_t*>(scratch);
    uint16_t* const x_part = h_part + h_part_bytes(problem) / sizeof(uint16_t);
    Launch const launch = {problem, tensors, gate, h_part, x_part, {rows.order, rows.count, rows.failed, problem.tokens},
                           num_multiprocessors / sm90::kClusterSize, stream};
    if (cudaError_t const error = launch_gather(launch, num_multiprocessors); error != cudaSuccess) {
        return error;
    }
    return problem.dtype == TWELL_BF16 ? launch_projections<Bf16>(launch) : launch_projections<Fp16>(launch);
}

}  // namespace twell

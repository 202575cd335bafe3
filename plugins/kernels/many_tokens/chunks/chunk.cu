#include <algorithm>

#include "host/problem.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/chunks/chunk_up.cuh"
#include "many_tokens/chunks/hot_sm90.h"

namespace twell {
namespace {

// Chunks pay from kFewestTokensChunks tokens and kFewestProducts products on, measured on an H200: building them takes
// about 11 us, loading all of Wu into shared memory about as long as reading it from memory.
constexpr float kFewestProducts = 4096.0f * 2048 * 5632;
// Places in chunks are counted in 31 bits; beyond this they might not fit.
constexpr int64_t kMostTokens = 1 << 22;
static_assert(kMostTokens / kRunRows * kRunChunksOfBlock * kMostBlocks * kChunkPairs < int64_t{1} << 31,
              "places are told from kSecondRow");
// To look for hot neurons, and to find none, takes a call about 5 us: it pays from kFewestProductsHot products on,
// measured likewise.
constexpr float kFewestProductsHot = 16384.0f * 2048 * 5632;
// Rows in which active neurons are counted, at most.
constexpr int64_t kSampledRows = 512;
// The parts of sums take memory in proportion to d_ff and d_model: with more than this, more than all else.
constexpr int kMostDModel = 4096;

int num_blocks(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, kMostBlockNeurons)); }

int64_t num_runs(twell_problem const& problem) {
    return ceil_div(std::min<int64_t>(problem.tokens, kMostTokens), kRunRows);
}

int num_slabs(twell_problem const& problem) { return problem.d_model / kSlabColumns; }

HotNeurons take_hot(twell_problem const& problem, unsigned char*& memory) {
    HotNeurons hot = {};
    hot.sampled = take<uint32_t>(memory, problem.d_ff);
    hot.count = take<uint32_t>(memory, 1);
    hot.neurons = take<uint32_t>(memory, kMostHot);
    hot.w_up = take<uint16_t>(memory, int64_t{kMostHot} * problem.d_model);
    hot.u = take<float>(memory, problem.tokens * kMostHot);
    hot.num_words = static_cast<int>(ceil_div(problem.d_ff, 32));
    hot.sample_step = static_cast<int>(ceil_div(problem.tokens, kSampledRows));
    hot.num_sampled = static_cast<int>(ceil_div(problem.tokens, hot.sample_step));
    return hot;
}

Chunks take_chunks(twell_problem const& problem, unsigned char*& memory) {
    int64_t const most_chunks = num_runs(problem) * kRunChunks * num_blocks(problem);  // that have parts of sums
    Chunks chunks = {};
    chunks.num_blocks = num_blocks(problem);
    chunks.block_neurons = static_cast<int>(ceil_div(problem.d_ff, chunks.num_blocks));
    chunks.inverse = static_cast<uint32_t>(ceil_div(int64_t{1} << 32, chunks.block_neurons));
    chunks.num_slabs = num_slabs(problem);
    chunks.block_capacity = static_cast<uint32_t>(num_runs(problem) * kRunChunksOfBlock);
    chunks.hot = take_hot(problem, memory);
    chunks.counts = take<uint32_t>(memory, kMostBlocks);
    chunks.chunks = take<Chunk>(memory, int64_t{chunks.block_capacity} * (chunks.num_blocks + 1));
    chunks.sums = take<float>(memory, most_chunks * chunks.num_slabs * kChunkPairs);
    return chunks;
}

bool suits(twell_problem const& problem) {
    return problem.variant == TWELL_GATED && problem.tokens >= kFewestTokensChunks &&
           problem.d_model % kSlabColumns == 0 && problem.d_model <= kMostDModel &&
           num_blocks(problem) <= kMostNeuronBlocks;
}

// In how many parts each block's chunks are shared out: the number that takes the least time, if a part takes as long
// as loading its Wu and multiplying its tokens' chunks.
int chunk_parts(twell_problem const& problem, Device const& device) {
    // How many tokens' chunks take as long as loading their part of Wu.
    constexpr double kLoadTokens = 1000.0;
    constexpr int kMostParts = 8;
    int const units = num_blocks(problem) * num_slabs(problem);
    int best = 1;
    double best_cost = 0.0;
    for (int parts = 1; parts <= kMostParts; ++parts) {
        double const rounds = static_cast<double>(ceil_div(int64_t{units} * parts, device.num_multiprocessors));
        double const cost = rounds * (kLoadTokens + static_cast<double>(problem.tokens) / parts);
        if (parts == 1 || cost < best_cost) {
            best = parts;
            best_cost = cost;
        }
    }
    return best;
}

template <class Element>
cudaError_t launch_products(Call const& call, Schedule const& schedule, Chunks const& chunks,
                            ChunkConfig const& config) {
    chunk_up::Params params = {};
    set_block(params, call.problem, call.tensors);
    params.schedule = schedule;
    params.chunks = chunks;
    params.num_parts = config.parts;
    int const units = chunks.num_blocks * chunks.num_slabs * params.num_parts;
    int const grid = std::min(units, call.device.num_multiprocessors);
    return launch_dependent({"chunk_up"}, chunk_up::up_kernel<Element>, params, dim3(static_cast<unsigned>(grid)),
                            chunk_up::kThreads, chunk_up::shared_bytes_for(chunks.block_neurons), call.device,
                            call.stream, {{"parts", params.num_parts}}, chunk_up::kMostSharedBytes);
}

}  // namespace

ChunkConfig choose_chunks(twell_problem const& problem, Device const& device, Kernels kernels) {
    bool const all = kernels == Kernels::kSm90;
    float const products = gate_products(problem);
    bool const wanted = all || (kernels == Kernels::kBest && products >= kFewestProducts);
    ChunkConfig config = {};
    config.exists =
        wanted && suits(problem) && !has_scales(problem) && problem.tokens <= kMostTokens && is_sm90(device);
    config.has_hot = config.exists && (all || products >= kFewestProductsHot);
    config.parts = config.exists ? chunk_parts(problem, device) : 0;
    return config;
}

float nonzeros_in_chunks(twell_problem const& problem) {
    return static_cast<float>(num_blocks(problem) * kRunChunks * kChunkPairs) / kRunRows;
}

size_t chunk_bytes(twell_problem const& problem) {
    return suits(problem) ? bytes_taken([&](unsigned char*& memory) { take_chunks(problem, memory); }) : 0;
}

Chunks chunks_at(twell_problem const& problem, ChunkConfig const& config, void* memory) {
    if (!config.exists) {
        return {};
    }
    unsigned char* next = static_cast<unsigned char*>(memory);
    Chunks chunks = take_chunks(problem, next);
    if (!config.has_hot) {
        chunks.hot = {};
    }
    return chunks;
}

cudaError_t launch_chunk_up(Call const& call, Schedule const& schedule, Chunks const& chunks,
                            ChunkConfig const& config) {
    TWELL_TRY(call.problem.dtype == TWELL_BF16 ? launch_products<Bf16>(call, schedule, chunks, config)
                                               : launch_products<Fp16>(call, schedule, chunks, config));
    if constexpr (kHasSm90) {
        if (config.has_hot) {
            return launch_hot_sm90(call, chunks.hot, schedule);
        }
    }
    return cudaSuccess;
}

void list_chunks(Text& text) {
    add_line(text, {"chunk_up"});
    if constexpr (kHasSm90) {
        list_hot_sm90(text);
    }
}

}  // namespace twell

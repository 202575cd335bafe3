#include <algorithm>

#include "chunk.h"
#include "problem.cuh"

namespace twell {
namespace {

// Chunks pay from so many tokens and products on, measured on an H200: building them takes about 11 us, loading all of
// Wu into shared memory about as long as reading it from memory.
constexpr int64_t kFewestTokens = 4096;
constexpr float kFewestProducts = 4096.0f * 2048 * 5632;
// Chunks are counted in 32 bits; far beyond this their numbers would not fit.
constexpr int64_t kMostTokens = 1 << 22;
// To look for hot neurons, and to find none, takes a call about 5 us: it pays from so many products on, measured
// likewise.
constexpr float kFewestProductsHot = 24576.0f * 2048 * 5632;
// Rows in which active neurons are counted, at most.
constexpr int64_t kSampledRows = 512;
// The parts of sums take memory in proportion to d_ff and d_model: with more than this, more than all else.
constexpr int kMostDModel = 4096;

int num_blocks(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, kMostBlockNeurons)); }

int64_t num_runs(twell_problem const& problem) {
    return ceil_div(std::min<int64_t>(problem.tokens, kMostTokens), kRunRows);
}

// Takes the pieces from `memory`, which may be null: then the pointers tell sizes alone.
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

int64_t block_capacity(twell_problem const& problem) { return num_runs(problem) * kRunChunksOfBlock; }

bool suits(twell_problem const& problem) {
    return problem.variant == TWELL_GATED && problem.tokens >= kFewestTokens && problem.d_model % kSlabColumns == 0 &&
           problem.d_model <= kMostDModel && num_blocks(problem) <= kMostNeuronBlocks;
}

}  // namespace

bool has_chunks(twell_problem const& problem, Device const& device, Kernels choice) {
#if defined(TWELL_SM90A)
    bool const wanted =
        choice == Kernels::kSm90 || (choice == Kernels::kBest && gate_products(problem) >= kFewestProducts);
    return wanted && suits(problem) && problem.tokens <= kMostTokens && device.major == 9 && device.minor == 0;
#else
    (void)problem;
    (void)device;
    (void)choice;
    return false;
#endif
}

float nonzeros_in_chunks(twell_problem const& problem) {
    return static_cast<float>(num_blocks(problem) * kRunChunks * kChunkPairs) / kRunRows;
}

size_t chunk_bytes(twell_problem const& problem) {
    if (!suits(problem)) {
        return 0;
    }
    int64_t const most_chunks = num_runs(problem) * kRunChunks * num_blocks(problem);
    unsigned char* hot_end = nullptr;
    take_hot(problem, hot_end);
    return reinterpret_cast<size_t>(hot_end) + aligned(kMostBlocks * sizeof(uint32_t)) +
           aligned(block_capacity(problem) * (num_blocks(problem) + 1) * sizeof(Chunk)) +
           aligned(most_chunks * (problem.d_model / kSlabColumns) * kChunkPairs * sizeof(float));
}

Chunks chunks_at(twell_problem const& problem, Kernels choice, void* memory) {
    unsigned char* next = static_cast<unsigned char*>(memory);
    Chunks chunks = {};
    HotNeurons const hot = take_hot(problem, next);
    chunks.hot = choice == Kernels::kSm90 || gate_products(problem) >= kFewestProductsHot ? hot : HotNeurons{};
    chunks.counts = take<uint32_t>(next, kMostBlocks);
    chunks.chunks = take<Chunk>(next, block_capacity(problem) * (num_blocks(problem) + 1));
    chunks.sums = reinterpret_cast<float*>(next);
    chunks.block_capacity = static_cast<uint32_t>(block_capacity(problem));
    chunks.num_blocks = num_blocks(problem);
    chunks.block_neurons = static_cast<int>(ceil_div(problem.d_ff, chunks.num_blocks));
    chunks.inverse = static_cast<uint32_t>(ceil_div(int64_t{1} << 32, chunks.block_neurons));
    chunks.num_slabs = problem.d_model / kSlabColumns;
    return chunks;
}

}  // namespace twell

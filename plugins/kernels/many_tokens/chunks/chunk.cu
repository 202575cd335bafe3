#include <algorithm>

#include "host/problem.h"
#include "many_tokens/chunks/chunk.h"
#include "sm90.h"

namespace twell {
namespace {

// Chunks pay from so many tokens and products on, measured on an H200: building them takes about 11 us, loading all of
// Wu into shared memory about as long as reading it from memory.
constexpr int64_t kFewestTokens = 4096;
constexpr float kFewestProducts = 4096.0f * 2048 * 5632;
// Places in chunks are counted in 31 bits; beyond this they might not fit.
constexpr int64_t kMostTokens = 1 << 22;
static_assert(kMostTokens / kRunRows * kRunChunksOfBlock * kMostBlocks * kChunkPairs < int64_t{1} << 31,
              "places are told from kSecondRow");
// To look for hot neurons, and to find none, takes a call about 5 us: it pays from so many products on, measured
// likewise.
constexpr float kFewestProductsHot = 16384.0f * 2048 * 5632;
// Rows in which active neurons are counted, at most.
constexpr int64_t kSampledRows = 512;
// The parts of sums take memory in proportion to d_ff and d_model: with more than this, more than all else.
constexpr int kMostDModel = 4096;

int num_blocks(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, kMostBlockNeurons)); }

int64_t num_runs(twell_problem const& problem) {
    return ceil_div(std::min<int64_t>(problem.tokens, kMostTokens), kRunRows);
}

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
    chunks.num_slabs = problem.d_model / kSlabColumns;
    chunks.block_capacity = static_cast<uint32_t>(num_runs(problem) * kRunChunksOfBlock);
    chunks.hot = take_hot(problem, memory);
    chunks.counts = take<uint32_t>(memory, kMostBlocks);
    chunks.chunks = take<Chunk>(memory, int64_t{chunks.block_capacity} * (chunks.num_blocks + 1));
    chunks.sums = take<float>(memory, most_chunks * chunks.num_slabs * kChunkPairs);
    return chunks;
}

bool suits(twell_problem const& problem) {
    return problem.variant == TWELL_GATED && problem.tokens >= kFewestTokens && problem.d_model % kSlabColumns == 0 &&
           problem.d_model <= kMostDModel && num_blocks(problem) <= kMostNeuronBlocks;
}

}  // namespace

bool has_chunks(twell_problem const& problem, Device const& device, Kernels choice) {
    bool const wanted =
        choice == Kernels::kSm90 || (choice == Kernels::kBest && gate_products(problem) >= kFewestProducts);
    return wanted && suits(problem) && problem.tokens <= kMostTokens && is_sm90(device);
}

float nonzeros_in_chunks(twell_problem const& problem) {
    return static_cast<float>(num_blocks(problem) * kRunChunks * kChunkPairs) / kRunRows;
}

size_t chunk_bytes(twell_problem const& problem) {
    return suits(problem) ? bytes_taken([&](unsigned char*& memory) { take_chunks(problem, memory); }) : 0;
}

Chunks chunks_at(twell_problem const& problem, Kernels choice, void* memory) {
    unsigned char* next = static_cast<unsigned char*>(memory);
    Chunks chunks = take_chunks(problem, next);
    if (choice != Kernels::kSm90 && gate_products(problem) < kFewestProductsHot) {
        chunks.hot = {};
    }
    return chunks;
}

}  // namespace twell

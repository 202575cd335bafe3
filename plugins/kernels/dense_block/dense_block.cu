#include <algorithm>

#include "dense_block/dense_block.h"
#include "dense_block/hidden_sm90.h"
#include "dense_block/skipping_down_sm90.h"
#include "fp8/fp8.h"
#include "host/problem.h"
#include "matmul/parts_sm90.cuh"

namespace twell {
namespace {

// With few tokens a dense block lacks tiles for all multiprocessors, and parts of sums share them. These leave at most
// kMostPartRows rows of y in memory, and kMostPartRowsPerToken for each token.
constexpr int64_t kMostPartRows = 768;
constexpr int64_t kMostPartRowsPerToken = 8;

// Up to kMostTokensSkipping tokens, where blocks are dense since few_tokens has no place for that many neurons, the
// down projection may skip inactive ones: the product takes so long there that the 1 to 4 us that a dense layer loses
// do not count. It skips up to kMostPairsSkipping active pairs of a token and a neuron for each neuron, and
// kMostOfRowSkipping of one token. Measured on an H200 with d_model 2048 to 5120, see benchmarks/LOG.md.
constexpr float kMostPairsSkipping = 0.6f;
constexpr float kMostOfRowSkipping = 0.07f;
// With FP8 weights it is the fastest at 0.5 % active up to so many tokens: of 2048 / 5632, 32 tokens, on an H200 20.6
// us for 23.3 of the dense one, but 24.4 from 2 % on. With 64 tokens they are 22.5, 23.3 and 24.7.
constexpr int64_t kMostTokensSkippingScaled = 32;

// With the columns that tiles have outside.
int64_t most_part_sums(twell_problem const& problem) {
    int64_t const rows = std::min(problem.tokens * kMostPartRowsPerToken, kMostPartRows);
    return rows * ceil_div(problem.d_out, TWELL_TILE) * TWELL_TILE;
}

int64_t rows_skipping(twell_problem const& problem) { return std::min(problem.tokens, kMostTokensSkipping); }

// The counts that there is room for: a group has at least kFewestOfGroup tokens, but the last ones of a launch.
int64_t most_counts(twell_problem const& problem) {
    constexpr int64_t kFewestOfGroup = 32;
    constexpr int64_t kLastGroups = 2;
    constexpr int kCountsOfTile = 2;
    return (rows_skipping(problem) / kFewestOfGroup + kLastGroups) * num_tiles(problem) * kCountsOfTile;
}

struct BlockMemory {
    uint16_t* h;        // [tokens, d_ff], rows spilled_stride(problem) elements apart; null with FP8 weights
    HiddenBytes bytes;  // then
    PartSums parts;
    Active active;
    int64_t most_counts;  // that there is room for in `active`
};

BlockMemory take_block_memory(twell_problem const& problem, unsigned char*& next) {
    BlockMemory memory = {};
    memory.h = take<uint16_t>(next, has_scales(problem) ? 0 : problem.tokens * spilled_stride(problem));
    memory.bytes = take_hidden_bytes(problem, next);
    memory.parts.most_sums = most_part_sums(problem);
    memory.parts.num_states = static_cast<int>(memory.parts.most_sums / kFewestPartSums);
    memory.parts.states = take<uint32_t>(next, memory.parts.num_states);
    memory.parts.sums = take<float4>(next, memory.parts.most_sums / 4);
    memory.active.num_words = num_tiles(problem) * (TWELL_TILE / kMaskBits);
    memory.active.masks = take<uint32_t>(next, rows_skipping(problem) * memory.active.num_words);
    memory.most_counts = most_counts(problem);
    memory.active.counted = take<uint32_t>(next, memory.most_counts);
    return memory;
}

DenseBlockConfig choose(twell_problem const& problem, Device const& device, bool may_skip) {
    DenseBlockConfig config = {};
    if constexpr (kHasSm90) {
        bool const scaled = has_scales(problem);
        auto const choose_hidden = scaled ? choose_hidden_bytes_sm90 : choose_hidden_sm90;
        auto const choose_down = scaled ? choose_dense_down_bytes_sm90 : choose_dense_down_sm90;
        config.hidden = choose_hidden(problem, device);
        config.down = choose_down(problem, most_part_sums(problem), device);
        config.skips = may_skip && problem.tokens <= (scaled ? kMostTokensSkippingScaled : kMostTokensSkipping) &&
                       hidden_sm90_leaves_active(config.hidden);
        config.skipping_columns = choose_skipping_columns_sm90(problem, device);
    }
    return config;
}

}  // namespace

size_t dense_block_bytes(twell_problem const& problem) {
    return bytes_taken([&](unsigned char*& next) { take_block_memory(problem, next); });
}

void list_dense_block(Text& text) {
    if constexpr (kHasSm90) {
        list_hidden_sm90(text);
        list_hidden_bytes_sm90(text);
        list_skipping_down_sm90(text);
    }
}

cudaError_t launch_dense_block(Call const& call, void* workspace, bool may_skip) {
    bool const scaled = has_scales(call.problem);
    if (scaled ? !dense_block_takes_scales(call.problem, call.device) : !has_dense_block(call.problem, call.device)) {
        return cudaErrorNotSupported;
    }
    if constexpr (kHasSm90) {
        twell_problem const& problem = call.problem;
        DenseBlockConfig const config = choose(problem, call.device, may_skip);
        unsigned char* next = static_cast<unsigned char*>(workspace);
        Quantised const rounded = take_quantised(problem, next);
        BlockMemory memory = take_block_memory(problem, next);
        if (!config.skips) {
            memory.active.masks = nullptr;
        }
        set_groups_sm90(memory.active, config.hidden);
        DenseRows rows = {};
        if (scaled) {
            rows.bytes = memory.bytes;
            TWELL_TRY(launch_quantise(call, rounded));
            TWELL_TRY(launch_hidden_bytes_sm90(call, config.hidden, rounded, rows.bytes, memory.parts, memory.active,
                                               memory.most_counts));
        } else {
            TWELL_TRY(
                launch_hidden_sm90(call, config.hidden, memory.h, memory.parts, memory.active, memory.most_counts));
        }
        float const d_ff = static_cast<float>(problem.d_ff);
        rows.gate = {nullptr, memory.h, num_tiles(problem), words_per_tile(problem)};
        rows.part = problem.tokens;
        rows.all_rows = true;
        rows.parts = memory.parts;
        rows.skipping = {memory.active, static_cast<uint32_t>(kMostPairsSkipping * d_ff),
                         static_cast<uint32_t>(kMostOfRowSkipping * d_ff)};
        auto const launch_down = scaled ? launch_dense_down_bytes_sm90 : launch_dense_down_sm90;
        TWELL_TRY(launch_down(call, rows, config.down));
        if (config.skips) {
            return launch_skipping_down_sm90(call, rows.skipping, memory.h, memory.bytes, config.skipping_columns);
        }
    }
    return cudaSuccess;
}

}  // namespace twell

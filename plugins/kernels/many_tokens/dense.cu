#include <algorithm>

#include "host/problem.h"
#include "many_tokens/chunks/chunk.h"
#include "many_tokens/dense.h"
#include "many_tokens/gate.h"
#include "many_tokens/guard.cuh"
#include "matmul/parts_sm90.cuh"
#include "packed/pack.cuh"
#include "sm90.h"

namespace twell {
namespace {

// Of the tokens, this share may be dense while the others are not; from there on all are. It bounds the memory for what
// has to be gathered.
constexpr int64_t kPartDivisor = 4;

// For the guard, measured on an H200, see benchmarks/LOG.md: how long each non-zero of the heaviest row takes; how
// much longer both paths take than one, by their order; and which part of the sparse path's time is its down
// projection.
constexpr float kHeaviestNonzeroNs = 100.0f;
constexpr float kPartNs = 40e3f;
constexpr float kPartNsFirst = 5e3f;
constexpr float kDownShareGated = 0.5f;
// How fast the rows of w_up of what finds no place in chunks are gathered, beside the time that it would take there.
constexpr float kExcessBytesPerNs = 25000.0f;

size_t h_part_bytes(twell_problem const& problem) {
    return aligned(static_cast<size_t>(max_dense_part(problem)) * spilled_stride(problem) * sizeof(uint16_t));
}

size_t x_part_bytes(twell_problem const& problem) {
    return problem.variant == TWELL_GATED
               ? aligned(static_cast<size_t>(max_dense_part(problem)) * problem.d_model * sizeof(uint16_t))
               : 0;
}

bool runs_sm90(twell_problem const& problem, Device const& device, Kernels choice) {
    if constexpr (kHasSm90) {
        return choice != Kernels::kGeneric && is_sm90(device) && dense_sm90_supports(problem);
    }
    return false;
}

PathCosts path_costs(twell_problem const& problem, Device const& device, Kernels choice, bool with_chunks) {
    if constexpr (kHasSm90) {
        if (runs_sm90(problem, device, choice)) {
            return dense_sm90_costs(problem, device, with_chunks);
        }
    }
    return dense_generic_costs(problem, device);
}

// With few tokens a dense block lacks tiles for all multiprocessors, and parts of sums share them. These leave so many
// rows of y in memory at most, and so many for each token.
constexpr int64_t kMostPartRows = 768;
constexpr int64_t kMostPartRowsPerToken = 8;

// With the columns that tiles have outside.
int64_t most_part_sums(twell_problem const& problem) {
    int64_t const rows = std::min(problem.tokens * kMostPartRowsPerToken, kMostPartRows);
    return rows * ceil_div(problem.d_out, TWELL_TILE) * TWELL_TILE;
}

int num_part_states(twell_problem const& problem) {
    return static_cast<int>(most_part_sums(problem) / kFewestPartSums);
}

int num_mask_words(twell_problem const& problem) { return num_tiles(problem) * (TWELL_TILE / 32); }

int64_t rows_skipping(twell_problem const& problem) { return std::min(problem.tokens, kMostTokensSkipping); }

// What there is room for: a group has so many tokens at least, but the last ones of a launch.
int64_t most_counts(twell_problem const& problem) {
    constexpr int64_t kFewestOfGroup = 24;
    constexpr int64_t kLastGroups = 2;
    constexpr int kCountsOfTile = 2;
    return (rows_skipping(problem) / kFewestOfGroup + kLastGroups) * num_tiles(problem) * kCountsOfTile;
}

BlockScratch take_block_scratch(twell_problem const& problem, unsigned char*& memory) {
    BlockScratch scratch = {};
    scratch.parts.most_sums = most_part_sums(problem);
    scratch.parts.num_states = num_part_states(problem);
    scratch.parts.states = take<uint32_t>(memory, scratch.parts.num_states);
    scratch.parts.sums = take<float4>(memory, scratch.parts.most_sums / 4);
    scratch.active.num_words = num_mask_words(problem);
    scratch.active.masks = take<uint32_t>(memory, rows_skipping(problem) * scratch.active.num_words);
    scratch.most_counts = most_counts(problem);
    scratch.active.counted = take<uint32_t>(memory, scratch.most_counts);
    return scratch;
}

}  // namespace

bool dense_comes_first(twell_problem const& problem, Device const& device, Kernels choice) {
    return runs_sm90(problem, device, choice);
}

int64_t max_dense_part(twell_problem const& problem) { return ceil_div(problem.tokens, kPartDivisor); }

size_t dense_scratch_bytes(twell_problem const& problem) {
    return std::max(x_part_bytes(problem) + std::max(h_part_bytes(problem), chunk_bytes(problem)),
                    bytes_taken([&](unsigned char*& memory) { take_block_scratch(problem, memory); }));
}

void* chunks_in(twell_problem const& problem, void* scratch) {
    return static_cast<unsigned char*>(scratch) + x_part_bytes(problem);
}

BlockScratch block_scratch_in(twell_problem const& problem, void* scratch) {
    unsigned char* memory = static_cast<unsigned char*>(scratch);
    return take_block_scratch(problem, memory);
}

void list_dense(Text& text) {
    if constexpr (kHasSm90) {
        list_dense_sm90(text);
    }
    list_dense_generic(text);
}

GuardModel guard_model(twell_problem const& problem, Device const& device, Kernels choice) {
    bool const gated = problem.variant == TWELL_GATED;
    float const row_bytes = 2.0f * static_cast<float>(problem.d_out + (gated ? problem.d_model : 0));
    float const copied_bytes = 2.0f * static_cast<float>(gated ? problem.d_model : spilled_stride(problem));
    bool const comes_first = dense_comes_first(problem, device, choice);
    bool const with_chunks = has_chunks(problem, device, choice);
    PathCosts const costs = path_costs(problem, device, choice, with_chunks);
    GuardModel model = {};
    model.max_part = static_cast<uint32_t>(max_dense_part(problem));
    model.nonzero_ns = row_bytes / costs.gathered_bytes_per_ns;
    model.heaviest_ns = kHeaviestNonzeroNs;
    model.part_row_ns = copied_bytes / costs.copied_bytes_per_ns;
    model.part_ns = comes_first ? kPartNsFirst : kPartNs;
    model.down_overlaps = comes_first;
    model.down_share = gated ? kDownShareGated : 1.0f;
    if (with_chunks) {
        model.excess_begin = nonzeros_in_chunks(problem);
        model.excess_ns = 2.0f * static_cast<float>(problem.d_model) / kExcessBytesPerNs;
    }
    model.up = costs.up;
    model.down = costs.down;
    if (!gated) {
        model.up.round_ns = 0.0f;
    }
    // Of the count a part as large as may be takes at most so much off the sparse path, and about its share of the
    // dense path's time for all rows. If what is left takes longer than what is left of that, decide() will choose all;
    // the margin is for what floats lose there. Without chunks the schedule takes more than the best part could gain
    // from a little less on, and layers whose rows differ as the suite's do are dense, or nearly, from kSomeSparseTo
    // on.
    float const margin = with_chunks ? 1.01f : 0.9f;
    constexpr float kSomeSparseTo = 0.72f;
    float const most_of_row = static_cast<float>(num_tiles(problem)) * kMostCounted;
    uint32_t const tokens = static_cast<uint32_t>(problem.tokens);
    float const all_ns = guard::cost_of(model.up, tokens) + guard::cost_of(model.down, tokens);
    float const part = static_cast<float>(model.max_part) / static_cast<float>(tokens);
    float const bound =
        most_of_row * static_cast<float>(model.max_part) + (1.0f - part) * all_ns / model.nonzero_ns + 1.0f;
    if (most_of_row * static_cast<float>(tokens) < static_cast<float>(UINT32_MAX)) {
        model.count.num_parts = num_count_parts(problem, device, choice);
        auto const limit = [&](float share) {
            return static_cast<uint32_t>(std::min(share * bound, static_cast<float>(UINT32_MAX / 2)));
        };
        model.count.all_dense_from = limit(margin);
        model.count.some_sparse_to = limit(kSomeSparseTo);
    }
    return model;
}

Gather gather_for(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed, uint16_t* spilled,
                  void* scratch) {
    Gather gather = {};
    gather.gate = {packed, spilled, num_tiles(problem), words_per_tile(problem)};
    // NOTE: in the place of the chunks, whose h are in lists before the dense path begins.
    gather.h_part = static_cast<uint16_t*>(chunks_in(problem, scratch));
    if (problem.variant == TWELL_GATED) {
        gather.x = static_cast<uint16_t const*>(tensors.x);
        gather.x_part = static_cast<uint16_t*>(scratch);
    }
    gather.d_model = problem.d_model;
    return gather;
}

cudaError_t launch_dense(twell_problem const& problem, twell_tensors const& tensors, Gather const& gather,
                         Schedule const& schedule, Device const& device, cudaStream_t stream, Kernels choice) {
    if constexpr (kHasSm90) {
        if (runs_sm90(problem, device, choice)) {
            return launch_dense_sm90(problem, tensors, gather, schedule, device, stream);
        }
    }
    return launch_dense_generic(problem, tensors, gather, schedule, device, stream);
}

}  // namespace twell

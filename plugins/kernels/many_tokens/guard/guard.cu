#include <algorithm>

#include "format/pack.cuh"
#include "host/problem.h"
#include "many_tokens/guard/guard.cuh"
#include "many_tokens/guard/guard.h"

namespace twell {
namespace {

// Of the tokens, this share may be dense while the others are not; from there on all are. It bounds the memory for
// gathered rows.
constexpr int64_t kPartDivisor = 4;

// For the guard, measured on an H200, see benchmarks/LOG.md: how long each non-zero of the heaviest row takes; how
// much longer both paths take than one, by their order; and which part of the sparse path's time is its down
// projection.
constexpr float kHeaviestNonzeroNs = 100.0f;
constexpr float kPartNs = 40e3f;
constexpr float kPartNsFirst = 5e3f;
constexpr float kDownShareGated = 0.5f;
// How fast rows of w_up are gathered for pairs that find no place in chunks, beside the time that those would take
// there.
constexpr float kExcessBytesPerNs = 25000.0f;

// With FP8 weights, measured on an H100: how much slower than 16 bits their bytes are gathered, and how much
// longer a round of products takes; of a plain block, how fast they are widened for dense rows, whichever these are.
constexpr float kSlowerOfBytes = 1.5f;
constexpr float kLongerOfBytes = 1.6f;
constexpr float kWidenedBytesPerNs = 2500.0f;

void adapt_to_bytes(GuardModel& model, twell_problem const& problem, bool gated) {
    model.nonzero_ns *= kSlowerOfBytes;
    if (gated) {
        model.up.round_ns *= kLongerOfBytes;
        model.down.round_ns *= kLongerOfBytes;
        return;
    }
    float const weights = static_cast<float>(problem.d_ff) * static_cast<float>(problem.d_out + problem.d_model);
    float const widen_ns = 3.0f * weights / kWidenedBytesPerNs;
    DenseRounds one = model.down;
    one.round_ns = 1.0f;
    model.down.round_ns += widen_ns / guard::cost_of(one, static_cast<uint32_t>(problem.tokens));
    model.part_ns += widen_ns;
}

}  // namespace

int64_t max_dense_part(twell_problem const& problem) { return ceil_div(problem.tokens, kPartDivisor); }

GuardModel guard_model(twell_problem const& problem, PathCosts const& costs, bool dense_first, float nonzeros_in_chunks,
                       int num_count_parts, GuardOrder order) {
    bool const gated = problem.variant == TWELL_GATED;
    float const row_bytes =
        static_cast<float>(weight_bytes(problem)) * static_cast<float>(problem.d_out + (gated ? problem.d_model : 0));
    float const copied_bytes = 2.0f * static_cast<float>(gated ? problem.d_model : spilled_stride(problem));
    bool const with_chunks = nonzeros_in_chunks > 0.0f;
    GuardModel model = {};
    model.forced = order.kind == GuardOrder::kRows ? order.rows : kGuardDecides;
    model.max_part = static_cast<uint32_t>(max_dense_part(problem));
    model.nonzero_ns = row_bytes / costs.gathered_bytes_per_ns;
    model.heaviest_ns = kHeaviestNonzeroNs;
    model.part_row_ns = copied_bytes / costs.copied_bytes_per_ns;
    model.part_ns = dense_first ? kPartNsFirst : kPartNs;
    model.down_overlaps = dense_first;
    model.down_share = gated ? kDownShareGated : 1.0f;
    if (with_chunks) {
        model.excess_begin = nonzeros_in_chunks;
        model.excess_ns = 2.0f * static_cast<float>(problem.d_model) / kExcessBytesPerNs;
    }
    model.up = costs.up;
    model.down = costs.down;
    if (!gated) {
        model.up.round_ns = 0.0f;
    }
    if (has_scales(problem)) {
        adapt_to_bytes(model, problem, gated);
    }
    // The largest part of rows that may be dense takes at most so much of the count off the sparse path, and costs
    // about its share of the dense path's time for all rows. If the rest of the count takes longer than the rest of
    // that time, decide() will choose all; the margin is for rounding of floats there. Without chunks the schedule
    // takes more than the best part could gain from a little less on, and layers whose rows differ as the suite's do
    // are dense, or nearly, from kSomeSparseTo on.
    float const margin = with_chunks ? 1.01f : 0.9f;
    constexpr float kSomeSparseTo = 0.72f;
    float const most_of_row = static_cast<float>(num_tiles(problem)) * kMostCounted;
    uint32_t const tokens = static_cast<uint32_t>(problem.tokens);
    float const all_ns = guard::cost_of(model.up, tokens) + guard::cost_of(model.down, tokens);
    float const part = static_cast<float>(model.max_part) / static_cast<float>(tokens);
    float const bound =
        most_of_row * static_cast<float>(model.max_part) + (1.0f - part) * all_ns / model.nonzero_ns + 1.0f;
    if (most_of_row * static_cast<float>(tokens) < static_cast<float>(UINT32_MAX)) {
        model.count.num_parts = num_count_parts;
        auto const limit = [&](float share) {
            return static_cast<uint32_t>(std::min(share * bound, static_cast<float>(UINT32_MAX / 2)));
        };
        model.count.all_dense_from = limit(margin);
        model.count.some_sparse_to = limit(kSomeSparseTo);
    }
    if (order.kind == GuardOrder::kEarly) {
        model.count.all_dense_from = 0;
        model.count.some_sparse_to = 0;
    } else if (order.kind == GuardOrder::kRows) {
        model.count.all_dense_from = UINT32_MAX;
        model.count.some_sparse_to = order.rows == 0 ? UINT32_MAX : 0;
    }
    return model;
}

}  // namespace twell

#include <algorithm>

#include "few_tokens/few.h"
#include "host/problem.h"
#include "many_tokens/dense.h"
#include "one_or_two_tokens/contribute_few.cuh"
#include "routes.h"

namespace twell {
namespace {

constexpr int64_t kAnyTokens = TWELL_MAX_TOKENS;
constexpr int kAnyWidth = TWELL_MAX_WIDTH;
constexpr float kAnyProducts = 0.0f;
constexpr int kAnyVariant = -1;

// Neurons that a device computes at once: so many by each of `places`, which so many multiprocessors have.
struct Round {
    int neurons;
    int places;
    int multiprocessors;
    int most_places;  // of the device

    constexpr int neurons_of(Device const& device) const {
        int const groups = std::min(device.num_multiprocessors / multiprocessors, most_places);
        return neurons * groups * std::min(places, most_places / std::max(groups, 1));
    }
};
constexpr int kAnyPlaces = 1 << 16;
constexpr Round kAnyNeurons = {0, 0, 1, 1};
constexpr Round kContributing = {contribute_few::kNeurons, contribute_few::kCtasPerMultiprocessor, 1,
                                 contribute_few::kMostCtas};
// By the clusters of two CTAs in gate_up_sm90.cuh: the largest of up to 64 tokens, and those of more.
constexpr Round kClusters224 = {224, 1, 2, kAnyPlaces};
constexpr Round kClusters96 = {96, 1, 2, kAnyPlaces};

// What a row is for: all of it must fit.
struct Row {
    Route route;
    bool needs_sm90;  // compute capability 9.0, and kernels for it in the library
    int variant;
    int64_t fewest_tokens;
    int64_t most_tokens;
    int fewest_columns;  // d_model, d_ff, d_out
    int most_d_model;
    int most_d_out;
    Round round;          // at least d_ff neurons at once
    float most_products;  // tokens * d_model * d_ff
};

// The limits were measured on an H200, see benchmarks/LOG.md.
//  - Few tokens: their kernels lose little if a layer is dense, as long as one round holds all of its neurons.
//  - Dense blocks: where the guard would cost a dense layer more than skipping gains a sparse one. Narrow layers are so
//    with any number of tokens, since packing takes longer than a product there.
//  - What is left: layers too narrow or too wide for the other kernels.
constexpr int kProductsPerToken = 2048 * 5632;
constexpr Row kRoutes[] = {
    // clang-format off
    {Route::kOneOrTwoTokens, false, kAnyVariant, 1, contribute_few::kMostTokens, 1, contribute_few::kMostColumns, contribute_few::kMostColumns, kContributing, kAnyProducts},
    {Route::kFewTokens, false, kAnyVariant, 1, 16, 1, kMostDModelFew, kAnyWidth, kAnyNeurons, kAnyProducts},
    {Route::kFewTokens, true, kAnyVariant, 17, kMostTokensFewGeneric, 1, kMostDModelFew, kAnyWidth, kClusters224, kAnyProducts},
    {Route::kFewTokens, true, TWELL_GATED, 65, kMostTokensFew, kFewestColumnsSm90, kMostDModelFew, kAnyWidth, kClusters96, kAnyProducts},
    {Route::kManyTokens, true, TWELL_GATED, 65, kMostTokensFew, 1, kAnyWidth, kAnyWidth, kClusters96, kAnyProducts},
    {Route::kDenseBlock, true, kAnyVariant, 17, 1280, 1, kMostDModelDenseBlock, kAnyWidth, kAnyNeurons, kAnyProducts},
    {Route::kDenseBlock, true, kAnyVariant, 17, kAnyTokens, 1, kMostDModelDenseBlock, kAnyWidth, kAnyNeurons, 1920.0f * kProductsPerToken},
    {Route::kDenseBlock, true, TWELL_GATED, 17, kAnyTokens, 1, 1024, 1024, kAnyNeurons, kAnyProducts},
    {Route::kDenseBlock, true, TWELL_PLAIN, 17, kAnyTokens, 1, 1536, 1536, kAnyNeurons, kAnyProducts},
    {Route::kFewTokens, true, kAnyVariant, 17, kMostTokensFew, kFewestColumnsSm90, kMostDModelFew, kAnyWidth, kAnyNeurons, kAnyProducts},
    {Route::kFewTokens, false, kAnyVariant, 17, kMostTokensFewGeneric, 1, kMostDModelFew, kAnyWidth, kAnyNeurons, kAnyProducts},
    {Route::kManyTokens, false, kAnyVariant, 1, kAnyTokens, 1, kAnyWidth, kAnyWidth, kAnyNeurons, kAnyProducts},
    // clang-format on
};

bool fits(Row const& row, twell_problem const& problem, Device const& device) {
    return (!row.needs_sm90 || device.is_sm90()) && (row.variant == kAnyVariant || row.variant == problem.variant) &&
           problem.tokens >= row.fewest_tokens && problem.tokens <= row.most_tokens &&
           std::min({problem.d_model, problem.d_ff, problem.d_out}) >= row.fewest_columns &&
           problem.d_model <= row.most_d_model && problem.d_out <= row.most_d_out &&
           (row.round.neurons == 0 || problem.d_ff <= row.round.neurons_of(device)) &&
           (row.most_products == kAnyProducts || gate_products(problem) <= row.most_products);
}

void add_columns(Text& text, int fewest, int most) {
    if (fewest > 1 && most < kAnyWidth) {
        text.add(" | %d to %d", fewest, most);
    } else if (fewest > 1) {
        text.add(" | %d and more", fewest);
    } else if (most < kAnyWidth) {
        text.add(" | up to %d", most);
    } else {
        text.add(" | any");
    }
}

}  // namespace

Route choose_route(twell_problem const& problem, Device const& device) {
    for (Row const& row : kRoutes) {
        if (fits(row, problem, device)) {
            return row.route;
        }
    }
    return Route::kManyTokens;
}

char const* name_of(Route route) {
    switch (route) {
        case Route::kOneOrTwoTokens:
            return "one_or_two_tokens";
        case Route::kFewTokens:
            return "few_tokens";
        case Route::kDenseBlock:
            return "dense_block";
        default:
            return "many_tokens";
    }
}

void list_routes(Text& text) {
    text.add("| route | GPU | block | tokens | d_model | d_out | d_ff | tokens · d_model · d_ff |\n");
    text.add("| --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (Row const& row : kRoutes) {
        text.add("| `%s` | %s | %s", name_of(row.route), row.needs_sm90 ? "9.0" : "8.0 and later",
                 row.variant == TWELL_GATED   ? "gated"
                 : row.variant == TWELL_PLAIN ? "plain"
                                              : "any");
        long long const fewest = row.fewest_tokens;
        if (row.most_tokens == kAnyTokens) {
            text.add(" | %lld and more", fewest);
        } else {
            text.add(" | %lld to %lld", fewest, static_cast<long long>(row.most_tokens));
        }
        add_columns(text, row.fewest_columns, row.most_d_model);
        add_columns(text, row.fewest_columns, row.most_d_out);
        if (row.round.neurons == 0) {
            add_columns(text, row.fewest_columns, kAnyWidth);
        } else {
            if (row.fewest_columns > 1) {
                text.add(" | %d to", row.fewest_columns);
            } else {
                text.add(" | up to");
            }
            text.add(" %d for each multiprocessor", row.round.neurons * row.round.places / row.round.multiprocessors);
        }
        if (row.most_products == kAnyProducts) {
            text.add(" | any |\n");
        } else {
            text.add(" | up to %.0f · 2048 · 5632 |\n", row.most_products / kProductsPerToken);
        }
    }
}

}  // namespace twell

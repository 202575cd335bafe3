#include <algorithm>

#include "dense_block/dense_block.h"
#include "features/features.h"
#include "few_tokens/few.h"
#include "fp8/fp8.h"
#include "host/problem.h"
#include "many_tokens/many_tokens.h"
#include "norm/norm.h"
#include "one_or_two_tokens/one_or_two.h"
#include "routes.h"
#include "split/split.h"

namespace twell {
namespace {

// Values in columns of the table below.
constexpr Route kOneOrTwo = Route::kOneOrTwoTokens;
constexpr Route kFew = Route::kFewTokens;
constexpr Route kDense = Route::kDenseBlock;
constexpr Route kMany = Route::kManyTokens;
constexpr bool kSm80 = false;
constexpr bool kSm90 = true;
constexpr int kBoth = -1;
constexpr int kGated = TWELL_GATED;
constexpr int kPlain = TWELL_PLAIN;
constexpr int64_t kNoEnd = TWELL_MAX_TOKENS;
constexpr int kAnyWidth = TWELL_MAX_WIDTH;
constexpr float kAnyProducts = 0.0f;
constexpr bool kEvenIfSplit = true;
constexpr bool kUnlessSplit = false;

// Neurons that a device computes at once: `neurons` by each of `places`, which `multiprocessors` of them have.
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
constexpr Round kContributing = {kNeuronsOfCtaOneOrTwo, kCtasPerMultiprocessorOneOrTwo, 1, kMostCtasOneOrTwo};
// By the clusters of two CTAs in gate_up_sm90.cuh: the largest of up to 64 tokens, and those of more.
constexpr Round kClusters224 = {224, 1, 2, kAnyPlaces};
constexpr Round kClusters96 = {96, 1, 2, kAnyPlaces};
constexpr int kWidestX = kMostDModelFew;
constexpr int kTmaBox = kFewestColumnsSm90;

// A row and its conditions; all must hold.
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
    bool takes_split;     // also calls that can be split, in which packing the other neurons pays from half as much on
    float most_products;  // tokens * d_model * d_ff
};

// The limits were measured on an H200, see benchmarks/LOG.md.
//  - Few tokens: their kernels lose little if a layer is dense, as long as one round holds all the neurons.
//  - Dense blocks: where the guard would cost a dense layer more than skipping gains a sparse one. Narrow layers are so
//    with any number of tokens, since packing takes longer than a product there. For split calls the limits are halved:
//    the caller has measured the activity, and hot neurons are dense anyway (measured on an H100).
//  - All other layers: too narrow or too wide for the kernels before.
constexpr int kFewAnyLayer = 16;
constexpr int kNarrowGated = 1024;
constexpr int kNarrowPlain = 1536;
constexpr int kBlockIfSplit = 640;
constexpr int kBlock = 1280;
constexpr int kProductsPerToken = 2048 * 5632;
constexpr float kProducts960 = 960.0f * kProductsPerToken;
constexpr float kProducts1920 = 1920.0f * kProductsPerToken;
constexpr int kPair = kMostTokensOneOrTwo;
constexpr int64_t kFew64 = kMostTokensFewGeneric;
constexpr int64_t kFew128 = kMostTokensFew;
constexpr int kWidestPair = kMostColumnsOneOrTwo;
constexpr int kWidestBlock = kMostDModelDenseBlock;
// With weights that have scales: beyond so many tokens a dense block, whose down projection may skip, is faster unless
// hardly a neuron is active; the generic kernels took 4 times as long where all are (H200, 17 to 32 tokens). Up to so
// many tokens or products packing gains 9 to 13 % at 0.5 % active and nothing from 0.7 % on, but one round of products
// takes all rows, so that a single heavy row makes all of them dense.
constexpr int64_t kMostTokensFewScaled = 16;
constexpr int64_t kMostTokensDenseScaled = 768;
constexpr float kMostProductsDenseScaled = 768.0f * kProductsPerToken;
constexpr Row kRoutes[] = {
    // clang-format off
    //          GPU    block   tokens              columns   d_model       d_out         d_ff           hot           products
    {kOneOrTwo, kSm80, kBoth,  1,  kPair,          1,        kWidestPair,  kWidestPair,  kContributing, kEvenIfSplit, kAnyProducts},
    {kFew,      kSm80, kBoth,  1,  kFewAnyLayer,   1,        kWidestX,     kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kFew,      kSm90, kBoth,  17, kFew64,         1,        kWidestX,     kAnyWidth,    kClusters224,  kEvenIfSplit, kAnyProducts},
    {kFew,      kSm90, kGated, 65, kFew128,        kTmaBox,  kWidestX,     kAnyWidth,    kClusters96,   kEvenIfSplit, kAnyProducts},
    {kMany,     kSm90, kGated, 65, kFew128,        1,        kAnyWidth,    kAnyWidth,    kClusters96,   kEvenIfSplit, kAnyProducts},
    {kDense,    kSm90, kGated, 17, kNoEnd,         1,        kNarrowGated, kNarrowGated, kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kDense,    kSm90, kPlain, 17, kNoEnd,         1,        kNarrowPlain, kNarrowPlain, kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kDense,    kSm90, kBoth,  17, kBlockIfSplit,  1,        kWidestBlock, kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kDense,    kSm90, kBoth,  17, kNoEnd,         1,        kWidestBlock, kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kProducts960},
    {kDense,    kSm90, kBoth,  17, kBlock,         1,        kWidestBlock, kAnyWidth,    kAnyNeurons,   kUnlessSplit, kAnyProducts},
    {kDense,    kSm90, kBoth,  17, kNoEnd,         1,        kWidestBlock, kAnyWidth,    kAnyNeurons,   kUnlessSplit, kProducts1920},
    {kFew,      kSm90, kBoth,  17, kFew128,        kTmaBox,  kWidestX,     kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kFew,      kSm80, kBoth,  17, kFew64,         1,        kWidestX,     kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    {kMany,     kSm80, kBoth,  1,  kNoEnd,         1,        kAnyWidth,    kAnyWidth,    kAnyNeurons,   kEvenIfSplit, kAnyProducts},
    // clang-format on
};
bool fits(Row const& row, twell_problem const& problem, Device const& device) {
    return (!row.needs_sm90 || is_sm90(device)) && (row.variant == kBoth || row.variant == problem.variant) &&
           problem.tokens >= row.fewest_tokens && problem.tokens <= row.most_tokens &&
           std::min({problem.d_model, problem.d_ff, problem.d_out}) >= row.fewest_columns &&
           problem.d_model <= row.most_d_model && problem.d_out <= row.most_d_out &&
           (row.takes_split || !is_split(problem)) &&
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

twell_limits limits() {
    twell_limits limits = {};
    limits.one_or_two_tokens = kPair;
    limits.few_tokens = kFewAnyLayer;
    limits.few_tokens_generic = kFew64;
    limits.few_tokens_sm90 = kFew128;
    limits.narrow_gated = kNarrowGated;
    limits.narrow_plain = kNarrowPlain;
    limits.dense_block_tokens = kBlock;
    limits.dense_block_tokens_if_split = kBlockIfSplit;
    limits.dense_block_products = static_cast<int64_t>(kProducts1920);
    limits.dense_block_products_if_split = static_cast<int64_t>(kProducts960);
    limits.fewest_hot = kFewestHotSplit;
    limits.most_hot = kMostHot;
    limits.chunk_tokens = kFewestTokensChunks;
    limits.dense_block_tokens_scaled = static_cast<int32_t>(kMostTokensDenseScaled);
    limits.dense_block_products_scaled = static_cast<int64_t>(kMostProductsDenseScaled);
    return limits;
}

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
        case Route::kWidened:
            return "widened";
        case Route::kWide:
            return "wide";
        default:
            return "many_tokens";
    }
}

namespace {

// The route of weights that have scales. Those of blocks are read by few_tokens and dense_block alone.
Route choose_scaled_route(twell_problem const& problem, Device const& device) {
    bool const of_blocks = has_block_scales(problem);
    if (!of_blocks && choose_route(problem, device) == Route::kOneOrTwoTokens) {
        return Route::kOneOrTwoTokens;
    }
    bool const has_few = problem.d_model <= kMostDModelFew;
    if (has_few && problem.tokens <= kMostTokensFewScaled) {
        return Route::kFewTokens;
    }
    int const narrow = problem.variant == TWELL_GATED ? kNarrowGated : kNarrowPlain;
    bool const is_narrow = std::max(problem.d_model, problem.d_out) <= narrow;
    if (dense_block_takes_scales(problem, device) &&
        (of_blocks || is_narrow || problem.hot == problem.d_ff || problem.tokens <= kMostTokensDenseScaled ||
         gate_products(problem) <= kMostProductsDenseScaled)) {
        return Route::kDenseBlock;
    }
    if (has_few && problem.tokens <= kMostTokensFewGeneric) {
        return Route::kFewTokens;
    }
    return many_tokens_take_scales(problem, device) ? Route::kManyTokens : Route::kWidened;
}

cudaError_t launch_widened(Call const& call, void* workspace) {
    unsigned char* next = static_cast<unsigned char*>(workspace);
    Widened const widened = take_widened(call.problem, next);
    TWELL_TRY(launch_widen(call, widened));
    twell_problem const problem = widened_problem(call.problem);
    twell_tensors const tensors = widened_tensors(call.tensors, widened);
    return launch_route({problem, tensors, call.device, call.stream}, next);
}

// By a route. Those that round x normalise it, as kOneOrTwoTokens does; others leave the norm out.
cudaError_t launch(Route route, Call const& call, void* workspace) {
    switch (route) {
        case Route::kWidened:
            return launch_widened(call, workspace);
        case Route::kWide:
            return launch_wide(call, workspace);
        case Route::kOneOrTwoTokens:
            return launch_one_or_two(call, workspace);
        case Route::kFewTokens:
            return launch_few(call, workspace);
        case Route::kDenseBlock:
            return launch_dense_block(call, workspace, true);
        default:
            return is_split(call.problem) && !has_scales(call.problem) ? launch_split(call, workspace)
                                                                       : launch_many_tokens(call, workspace);
    }
}

}  // namespace

namespace {

// Whether the call, or one of fewer tokens, widens weights. Up to kMostTokensFewGeneric tokens few_tokens reads them in
// FP8, unless there are too many columns for it: then one token widens where more may not.
bool widens(twell_problem const& problem, Device const& device) {
    twell_problem one = problem;
    one.tokens = 1;
    for (twell_problem const& each : {problem, one}) {
        Route const route = choose_scaled_route(each, device);
        if (route == Route::kWidened || (route == Route::kManyTokens && many_tokens_widen(each))) {
            return true;
        }
    }
    return false;
}

}  // namespace

size_t workspace_bytes(twell_problem const& problem, Device const* device) {
    constexpr Device kGeneric = {8, 0, 1, 0, 0};  // what others widen it widens, too
    size_t const first = bytes_taken([&](unsigned char*& end) {
        take_normalised(problem, end);
        if (has_scales(problem) && widens(problem, device == nullptr ? kGeneric : *device)) {
            take_widened(problem, end);
        }
        take_quantised(problem, end);
    });
    if (is_wide(problem)) {
        return first + wide_bytes(problem);
    }
    return first + std::max({one_or_two_bytes(problem), few_bytes(problem), dense_block_bytes(problem),
                             many_tokens_bytes(problem), split_bytes(problem)});
}

uint16_t* take_normalised(twell_problem const& problem, unsigned char*& memory) {
    return take<uint16_t>(memory, has_norm(problem) ? problem.tokens * problem.d_model : 0);
}

cudaError_t launch_route(Call const& call, void* workspace) {
    Route const route = is_wide(call.problem)      ? Route::kWide
                        : has_scales(call.problem) ? choose_scaled_route(call.problem, call.device)
                                                   : choose_route(call.problem, call.device);
    if (call.device.trace != nullptr) {
        call.device.trace->add("route %s\n", name_of(route));
    }
    bool const rounds_x = has_scales(call.problem) && (route == Route::kDenseBlock || route == Route::kManyTokens);
    if (!has_norm(call.problem) || route == Route::kOneOrTwoTokens || rounds_x) {
        return launch(route, call, workspace);  // what reads x first normalises it
    }
    twell_problem problem = call.problem;
    twell_tensors tensors = call.tensors;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    uint16_t* const normalised = take_normalised(problem, next);
    TWELL_TRY(launch_norm(norm_of(call, normalised), call.device, call.stream));
    problem.norm = TWELL_NORM_NONE;
    tensors.x = normalised;
    return launch(route, {problem, tensors, call.device, call.stream}, next);
}

void list_routes(Text& text) {
    text.add("| route | GPU | block | tokens | d_model | d_out | d_ff | hot | tokens · d_model · d_ff |\n");
    text.add("| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
    for (Row const& row : kRoutes) {
        text.add("| `%s` | %s | %s", name_of(row.route), row.needs_sm90 ? "9.0" : "8.0 and later",
                 row.variant == TWELL_GATED   ? "gated"
                 : row.variant == TWELL_PLAIN ? "plain"
                                              : "any");
        long long const fewest = row.fewest_tokens;
        if (row.most_tokens == kNoEnd) {
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
                text.add(" | %d and more, up to", row.fewest_columns);
            } else {
                text.add(" | up to");
            }
            text.add(" %d for each multiprocessor", row.round.neurons * row.round.places / row.round.multiprocessors);
        }
        text.add(row.takes_split ? " | any" : " | no split");
        if (row.most_products == kAnyProducts) {
            text.add(" | any |\n");
        } else {
            text.add(" | up to %.0f · 2048 · 5632 |\n", row.most_products / kProductsPerToken);
        }
    }
}

}  // namespace twell

#include <stdint.h>

#include <algorithm>
#include <iterator>

#include "experts/down.cuh"
#include "experts/experts.h"
#include "experts/many.h"
#include "experts/sort.cuh"
#include "experts/up.cuh"
#include "host/problem.h"

namespace twell {

namespace {

using namespace experts;

// Configurations of kernels, by the number of tokens and by the mean number of an expert's tokens. Figures are of 128
// experts of 2688 / 1856, 6 a token, 10 % active, on an H200.
struct Row {
    int most_tokens;
    int most_mean;
    int tiles;         // of kTile tokens, of a group
    int up_warps;      // that share d_model
    int column_warps;  // of the down projection: 64 columns each
};

constexpr Row kRows[] = {
    // One token leaves few CTAs: 64 columns are 9 to 21 % faster than 256.
    {1, INT32_MAX, 1, 4, 1},
    // Pieces of 512 bytes of a row are 4 to 9 % faster than those of 128. Two warps leave more CTAs to a
    // multiprocessor, and fewer sums to add: with 4 tokens 3 % faster than four, with more up to 2 %. Groups are such
    // that few experts have two, as each reads all weights. More tokens in a group are more loads of x for each weight.
    {INT32_MAX, 4, 1, 2, 4},
    {INT32_MAX, 10, 2, 2, 4},
    // Derived from the rows above: its down projection was not measured.
    {INT32_MAX, 24, 4, 4, 4},
};
constexpr int kRowCount = static_cast<int>(std::size(kRows));
// Of more tokens for each expert hardly a row of w_down is one that none needs: products are dense, of tiles of 64 or
// 128 tokens. On compute capability 9.0 they are faster from fewer tokens on.
constexpr int kMostOfNarrowTiles = 64;
constexpr int kMostSparseSm90 = 10;

struct ExpertsConfig {
    int row;    // of kRows; behind the last one: dense
    int width;  // tokens of a group
    int most_groups;
    bool is_direct;  // each pair is a group: of one token
    bool sorts_at_once;
    bool is_dense;
    bool by_sm90;
};

int64_t num_pairs(twell_experts_problem const& problem) { return problem.tokens * problem.top; }

int num_masks(twell_experts_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, MMA_M)); }

// sm90: the device has kernels of 9.0.
ExpertsConfig choose(twell_experts_problem const& problem, bool sm90) {
    int64_t const pairs = num_pairs(problem);
    ExpertsConfig config = {};
    int64_t const mean = ceil_div(pairs, problem.experts);
    while (config.row < kRowCount &&
           (problem.tokens > kRows[config.row].most_tokens || mean > kRows[config.row].most_mean)) {
        ++config.row;
    }
    if constexpr (kHasSm90) {
        if (sm90 && problem.tokens > 1 && mean > kMostSparseSm90 && experts_many_sm90_supports(problem)) {
            config.by_sm90 = true;
            config.row = kRowCount;
        }
    }
    config.is_dense = config.row == kRowCount;
    config.width = config.is_dense ? mean <= kMostOfNarrowTiles ? 64 : 128 : kRows[config.row].tiles * kTile;
    config.is_direct = problem.tokens == 1;
    config.sorts_at_once = pairs <= kMostSortedAtOnce;
    int64_t const hit = std::min<int64_t>(pairs, problem.experts);
    // Each expert with tokens has a group, and another one for each further `width` tokens.
    config.most_groups = static_cast<int>(config.is_direct ? pairs : hit + (pairs - hit) / config.width);
    return config;
}

struct Scratch {
    Group* groups;
    int* order;
    int* counts;
    uint16_t* h;
    uint16_t* masks;
    uint16_t* sorted;
    float* y_of_pairs;
};

Scratch take_all(unsigned char*& memory, twell_experts_problem const& problem, ExpertsConfig const& config) {
    int64_t const pairs = num_pairs(problem);
    int64_t const groups = config.most_groups;
    Scratch scratch = {};
    scratch.groups = take<Group>(memory, groups);
    scratch.order = take<int>(memory, pairs);
    scratch.counts = take<int>(memory, problem.experts);
    if (config.by_sm90) {
        scratch.sorted = take<uint16_t>(memory, pairs * problem.d_model);
    }
    if (config.is_dense) {
        scratch.h = take<uint16_t>(memory, pairs * experts_many_pitch(problem.d_ff));
    } else {
        scratch.h = take<uint16_t>(memory, groups * problem.d_ff * config.width);
        scratch.masks = take<uint16_t>(memory, groups * num_masks(problem));
    }
    scratch.y_of_pairs = take<float>(memory, pairs * problem.d_out);
    return scratch;
}

Matrix matrix_of(void const* values, twell_expert_strides const& strides, void const* scale, int form, int rows,
                 int columns) {
    Matrix matrix = {values, strides.expert, strides.row, static_cast<float const*>(scale), 0, 0};
    bool const by_row = form == TWELL_SCALE_NEURON;
    matrix.scale_of_expert = by_row ? rows : form == TWELL_SCALE_OUTPUT ? columns : form == TWELL_SCALE_EXPERT ? 1 : 0;
    matrix.scale_of_row = by_row ? 1 : 0;
    return matrix;
}

cudaError_t sort(ExpertsCall const& call, ExpertsConfig const& config, Groups const& groups) {
    if (config.is_direct) {
        return cudaSuccess;
    }
    if (config.sorts_at_once) {
        return launch_dependent({"experts_sort"}, sort_kernel, groups, dim3(1), kSortThreads,
                                sort_bytes(call.problem.experts), call.device, call.stream, {},
                                sort_bytes(TWELL_MAX_EXPERTS));
    }
    dim3 const grid(static_cast<unsigned>(call.problem.experts));
    TWELL_TRY(
        launch_dependent({"experts_count"}, count_kernel, groups, grid, kExpertThreads, 0, call.device, call.stream));
    return launch_dependent({"experts_place"}, place_kernel, groups, grid, kExpertThreads, 0, call.device, call.stream);
}

template <class Element, class Stored, int kMatrices, int kTiles, int kWarps>
cudaError_t launch_up(ExpertsCall const& call, UpParams const& params) {
    using Shape = Up<Element, Stored, kMatrices, kTiles, kWarps>;
    dim3 const grid(static_cast<unsigned>(ceil_div(params.d_ff, Shape::kRowTiles * MMA_M)),
                    static_cast<unsigned>(params.groups.most_groups));
    Label const label = {kMatrices == 2 ? "experts_gate_up" : "experts_up",
                         {{"tokens", kTiles * kTile}, {"warps", kWarps}}};
    return launch_dependent(label, up_kernel<Element, Stored, kMatrices, kTiles, kWarps>, params, grid,
                            kWarps * kWarpSize, 0, call.device, call.stream);
}

template <class Element, class Stored, int kRow>
cudaError_t launch_row(ExpertsCall const& call, UpParams const& up, DownParams const& down) {
    constexpr int kTiles = kRows[kRow].tiles;
    constexpr int kColumnWarps = kRows[kRow].column_warps;
    constexpr int kWarps = kRows[kRow].up_warps;
    TWELL_TRY(call.problem.variant == TWELL_GATED ? launch_up<Element, Stored, 2, kTiles, kWarps>(call, up)
                                                  : launch_up<Element, Stored, 1, kTiles, kWarps>(call, up));
    using Shape = Down<kTiles, kColumnWarps>;
    dim3 const grid(static_cast<unsigned>(ceil_div(down.d_out, kColumnWarps * kWarpOut)),
                    static_cast<unsigned>(down.groups.most_groups));
    return launch_dependent({"experts_down", {{"tokens", kTiles * kTile}, {"columns", kColumnWarps * kWarpOut}}},
                            down_kernel<Element, Stored, kTiles, kColumnWarps>, down, grid, kDownThreads,
                            Shape::shared_bytes(down.d_ff), call.device, call.stream, {},
                            Shape::shared_bytes(TWELL_MAX_EXPERT_D_FF));
}

template <class Element, class Stored>
cudaError_t launch(ExpertsCall const& call, ExpertsConfig const& config, UpParams const& up, DownParams const& down) {
    static_assert(kRowCount == 4, "each has a line here");
    switch (config.row) {
        case 0:
            return launch_row<Element, Stored, 0>(call, up, down);
        case 1:
            return launch_row<Element, Stored, 1>(call, up, down);
        case 2:
            return launch_row<Element, Stored, 2>(call, up, down);
        default:
            return launch_row<Element, Stored, 3>(call, up, down);
    }
}

template <class Element>
cudaError_t launch(ExpertsCall const& call, ExpertsConfig const& config, void* workspace) {
    twell_experts_problem const& problem = call.problem;
    twell_experts_tensors const& tensors = call.tensors;
    auto* memory = static_cast<unsigned char*>(workspace);
    Scratch const scratch = take_all(memory, problem, config);
    Ids const ids = {tensors.ids, problem.id_bytes, problem.experts};
    Groups const groups = {ids,
                           config.is_direct ? nullptr : scratch.groups,
                           scratch.order,
                           scratch.counts,
                           static_cast<int>(num_pairs(problem)),
                           config.most_groups,
                           config.width};
    TWELL_TRY(sort(call, config, groups));

    UpParams up = {};
    up.groups = groups;
    up.x = static_cast<uint16_t const*>(tensors.x);
    up.up = matrix_of(tensors.up, problem.up, tensors.up_scale, problem.gate_up_scale, problem.d_ff, problem.d_model);
    up.gate =
        matrix_of(tensors.gate, problem.gate, tensors.gate_scale, problem.gate_up_scale, problem.d_ff, problem.d_model);
    up.thresholds = static_cast<float const*>(tensors.thresholds);
    up.h = scratch.h;
    up.masks = scratch.masks;
    float const cut = problem.activation == TWELL_FATRELU ? problem.threshold : 0.0f;
    up.cut = Element::round_down(cut) * 0x10001u;
    up.d_model = problem.d_model;
    up.d_ff = problem.d_ff;
    up.top = problem.top;
    up.square = problem.activation == TWELL_RELU2;
    up.relu_on_up = problem.activation == TWELL_DRELU;

    DownParams down = {};
    down.groups = groups;
    down.down =
        matrix_of(tensors.down, problem.down, tensors.down_scale, problem.down_scale, problem.d_ff, problem.d_out);
    down.h = scratch.h;
    down.masks = scratch.masks;
    down.weights = static_cast<float const*>(tensors.weights);
    down.y = scratch.y_of_pairs;
    down.d_ff = problem.d_ff;
    down.d_out = problem.d_out;
    down.scale_of_column = problem.down_scale == TWELL_SCALE_OUTPUT ? 1 : 0;
    auto const launch_products = [&] {
        if constexpr (kHasSm90) {
            if (config.by_sm90) {
                return launch_experts_many_sm90(call, up, down, scratch.sorted, config.width);
            }
        }
        return config.is_dense                      ? launch_experts_many(call, up, down, config.width)
               : problem.weight_dtype == TWELL_E4M3 ? launch<Element, E4m3>(call, config, up, down)
                                                    : launch<Element, uint16_t>(call, config, up, down);
    };
    TWELL_TRY(launch_products());

    AddParams const add = {ids, scratch.y_of_pairs, static_cast<uint16_t*>(tensors.y), problem.top, problem.d_out};
    dim3 const grid(static_cast<unsigned>(problem.tokens),
                    static_cast<unsigned>(ceil_div(problem.d_out, kAddThreads * kVector)));
    return launch_dependent({"experts_add"}, add_kernel<Element>, add, grid, kAddThreads, 0, call.device, call.stream);
}

}  // namespace

size_t experts_bytes(twell_experts_problem const& problem) {
    // Of a call of so many tokens, on any device.
    auto const bytes_of = [&](int64_t tokens) {
        twell_experts_problem of = problem;
        of.tokens = tokens;
        size_t most = 0;
        for (bool const sm90 : {false, true}) {
            ExpertsConfig const config = choose(of, sm90);
            most = std::max(most, bytes_taken([&](unsigned char*& memory) { take_all(memory, of, config); }));
        }
        return most;
    };
    // Dense products take less, but more tokens never need less memory.
    size_t bytes = bytes_of(problem.tokens);
    for (int const mean : {kMostSparseSm90, kRows[kRowCount - 1].most_mean}) {
        int64_t const fewer = int64_t{mean} * problem.experts / problem.top;
        if (fewer > 0 && fewer < problem.tokens) {
            bytes = std::max(bytes, bytes_of(fewer));
        }
    }
    return bytes;
}

void list_experts(Text& text) {
    text.add("experts_sort\nexperts_count\nexperts_place\n");
    for (Row const& row : kRows) {
        int const tokens = row.tiles * kTile;
        for (char const* const name : {"experts_up", "experts_gate_up"}) {
            text.add("%s tokens=%d warps=%d\n", name, tokens, row.up_warps);
        }
        text.add("experts_down tokens=%d columns=%d\n", tokens, row.column_warps * kWarpOut);
    }
    list_experts_many(text);
    if constexpr (kHasSm90) {
        list_experts_many_sm90(text);
    }
    text.add("experts_add\n");
}

cudaError_t launch_experts(ExpertsCall const& call, void* workspace) {
    ExpertsConfig const config = choose(call.problem, is_sm90(call.device));
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, config, workspace)
                                            : launch<Fp16>(call, config, workspace);
}

}  // namespace twell

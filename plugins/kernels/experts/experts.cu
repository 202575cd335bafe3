#include <stdint.h>

#include <algorithm>

#include "experts/down.cuh"
#include "experts/experts.h"
#include "experts/groups.cuh"
#include "experts/up.cuh"
#include "host/problem.h"

namespace twell {

namespace {

using namespace experts;

// Tiles of kTile tokens that a group has, by the mean number of tokens of an expert: few experts have so many more that
// their weights are read twice. More tokens in a group are more loads of x for each weight.
template <int kTiles_, int kMostMean_>
struct Row {
    static constexpr int kTiles = kTiles_;
    static constexpr int kMostMean = kMostMean_;
};

struct ExpertsConfig {
    int tiles;
    int column_warps;  // of the down projection
    int most_groups;
    bool is_direct;  // each pair is a group: of one token
    bool sorts_at_once;
};

int64_t num_pairs(twell_experts_problem const& problem) { return problem.tokens * problem.top; }

int num_masks(twell_experts_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, MMA_M)); }

template <class... Rows>
int tiles_for(int64_t mean) {
    int tiles = 0;
    ((tiles == 0 && mean <= Rows::kMostMean ? tiles = Rows::kTiles : 0), ...);
    return tiles;
}

ExpertsConfig choose(twell_experts_problem const& problem, int num_multiprocessors) {
    int64_t const pairs = num_pairs(problem);
    ExpertsConfig config = {};
    config.tiles = tiles_for<Row<1, 4>, Row<2, 10>, Row<4, 24>, Row<8, INT32_MAX>>(ceil_div(pairs, problem.experts));
    config.is_direct = problem.tokens == 1;
    config.sorts_at_once = pairs <= kMostSortedAtOnce;
    int64_t const hit = std::min<int64_t>(pairs, problem.experts);
    config.most_groups =
        static_cast<int>(config.is_direct ? pairs : std::min(pairs, pairs / (config.tiles * kTile) + hit));
    // Wide pieces of rows, unless that leaves multiprocessors without work.
    constexpr int kWide = 4;
    int64_t const wide_ctas = hit * ceil_div(problem.d_out, kWide * kWarpOut);
    config.column_warps = wide_ctas >= 2 * num_multiprocessors ? kWide : 1;
    return config;
}

struct Scratch {
    Group* groups;
    int* order;
    int* counts;
    uint16_t* h;
    uint16_t* masks;
    float* y_of_pairs;
};

Scratch take_all(unsigned char*& memory, twell_experts_problem const& problem, ExpertsConfig const& config) {
    int64_t const pairs = num_pairs(problem);
    int64_t const groups = config.most_groups;
    Scratch scratch = {};
    scratch.groups = take<Group>(memory, groups);
    scratch.order = take<int>(memory, pairs);
    scratch.counts = take<int>(memory, problem.experts);
    scratch.h = take<uint16_t>(memory, groups * problem.d_ff * config.tiles * kTile);
    scratch.masks = take<uint16_t>(memory, groups * num_masks(problem));
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
        return launch_dependent({"experts_sort"}, sort_kernel, groups, dim3(1), kSortThreads, 0, call.device,
                                call.stream);
    }
    dim3 const grid(static_cast<unsigned>(call.problem.experts));
    TWELL_TRY(
        launch_dependent({"experts_count"}, count_kernel, groups, grid, kExpertThreads, 0, call.device, call.stream));
    return launch_dependent({"experts_place"}, place_kernel, groups, grid, kExpertThreads, 0, call.device, call.stream);
}

template <class Element, class Stored, int kTiles, int kColumnWarps>
cudaError_t launch_products(ExpertsCall const& call, UpParams const& up, DownParams const& down) {
    twell_experts_problem const& problem = call.problem;
    auto const groups = static_cast<unsigned>(up.groups.most_groups);
    dim3 const up_grid(static_cast<unsigned>(num_masks(problem)), groups);
    constexpr int kUpThreads = kUpWarps * kWarpSize;
    if (problem.variant == TWELL_GATED) {
        TWELL_TRY(launch_dependent({"experts_up", {{"matrices", 2}, {"tokens", kTiles * kTile}}},
                                   up_kernel<Element, Stored, 2, kTiles>, up, up_grid, kUpThreads, 0, call.device,
                                   call.stream));
    } else {
        TWELL_TRY(launch_dependent({"experts_up", {{"matrices", 1}, {"tokens", kTiles * kTile}}},
                                   up_kernel<Element, Stored, 1, kTiles>, up, up_grid, kUpThreads, 0, call.device,
                                   call.stream));
    }
    using Shape = Down<kTiles, kColumnWarps>;
    dim3 const down_grid(static_cast<unsigned>(ceil_div(problem.d_out, kColumnWarps * kWarpOut)), groups);
    return launch_dependent({"experts_down", {{"tokens", kTiles * kTile}, {"columns", kColumnWarps * kWarpOut}}},
                            down_kernel<Element, Stored, kTiles, kColumnWarps>, down, down_grid, kDownThreads,
                            Shape::shared_bytes(problem.d_ff), call.device, call.stream, {},
                            Shape::shared_bytes(TWELL_MAX_EXPERT_D_FF));
}

template <class Element, class Stored, int kTiles>
cudaError_t launch_columns(ExpertsCall const& call, ExpertsConfig const& config, UpParams const& up,
                           DownParams const& down) {
    return config.column_warps == 1 ? launch_products<Element, Stored, kTiles, 1>(call, up, down)
                                    : launch_products<Element, Stored, kTiles, 4>(call, up, down);
}

template <class Element, class Stored>
cudaError_t launch(ExpertsCall const& call, ExpertsConfig const& config, UpParams const& up, DownParams const& down) {
    switch (config.tiles) {
        case 1:
            return launch_columns<Element, Stored, 1>(call, config, up, down);
        case 2:
            return launch_columns<Element, Stored, 2>(call, config, up, down);
        case 4:
            return launch_columns<Element, Stored, 4>(call, config, up, down);
        default:
            return launch_columns<Element, Stored, 8>(call, config, up, down);
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
                           config.tiles * kTile};
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
    TWELL_TRY(problem.weight_dtype == TWELL_E4M3 ? launch<Element, E4m3>(call, config, up, down)
                                                 : launch<Element, uint16_t>(call, config, up, down));

    AddParams const add = {ids, scratch.y_of_pairs, static_cast<uint16_t*>(tensors.y), problem.top, problem.d_out};
    dim3 const grid(static_cast<unsigned>(problem.tokens),
                    static_cast<unsigned>(ceil_div(problem.d_out, kAddThreads * kVector)));
    return launch_dependent({"experts_add"}, add_kernel<Element>, add, grid, kAddThreads, 0, call.device, call.stream);
}

}  // namespace

size_t experts_bytes(twell_experts_problem const& problem) {
    // What depends on the device takes no memory.
    ExpertsConfig const config = choose(problem, 1);
    return bytes_taken([&](unsigned char*& memory) { take_all(memory, problem, config); });
}

void list_experts(Text& text) {
    text.add("experts_sort\nexperts_count\nexperts_place\n");
    for (int const tiles : {1, 2, 4, 8}) {
        for (int const matrices : {1, 2}) {
            text.add("experts_up matrices=%d tokens=%d\n", matrices, tiles * kTile);
        }
        for (int const warps : {1, 4}) {
            text.add("experts_down tokens=%d columns=%d\n", tiles * kTile, warps * kWarpOut);
        }
    }
    text.add("experts_add\n");
}

cudaError_t launch_experts(ExpertsCall const& call, void* workspace) {
    ExpertsConfig const config = choose(call.problem, call.device.num_multiprocessors);
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, config, workspace)
                                            : launch<Fp16>(call, config, workspace);
}

}  // namespace twell

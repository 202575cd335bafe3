#include <algorithm>

#include "host/problem.h"
#include "many_tokens/gate/gate.h"
#include "training/add_rows.cuh"
#include "training/copy_rows.cuh"
#include "training/hot.cuh"
#include "training/list.cuh"
#include "training/project.cuh"
#include "training/training.h"
#include "training/transpose.cuh"
#include "training/unlisted.cuh"

namespace twell {
namespace {

namespace t = training;

// Rows whose gate results are in memory at once.
constexpr int64_t kChunkRows = t::kMostChunkRows;

template <class T>
unsigned blocks_of(int64_t count, T each) {
    return static_cast<unsigned>(ceil_div(count, each));
}

twell_problem with_tokens(twell_problem problem, int64_t tokens) {
    problem.tokens = tokens;
    return problem;
}

constexpr int kMostUnlistedCtas = 256;
unsigned unlisted_ctas(Device const& device) {
    return static_cast<unsigned>(std::min(device.num_multiprocessors, kMostUnlistedCtas));
}

struct ForwardMemory {
    uint32_t* packed;
    uint16_t* spilled;
    float* hidden;  // [capacity], of a gated block
    float2* factors;
};

ForwardMemory take_forward(twell_problem const& problem, int64_t capacity, unsigned char*& next) {
    twell_problem const chunk = with_tokens(problem, std::min(problem.tokens, kChunkRows));
    ForwardMemory memory = {};
    memory.packed = take<uint32_t>(next, chunk.tokens * num_tiles(chunk) * words_per_tile(chunk));
    memory.spilled = take<uint16_t>(next, chunk.tokens * spilled_stride(chunk));
    memory.hidden = take<float>(next, problem.variant == TWELL_GATED ? capacity : 0);
    memory.factors = take<float2>(next, int64_t{kMostUnlistedCtas} * problem.d_ff);
    return memory;
}

int64_t block_rows_of(twell_problem const& problem) {
    return std::max<int64_t>(t::kFewestBlockRows, ceil_div(problem.tokens, t::kMostRowBlocks));
}

struct BackwardMemory {
    uint32_t* block_counts;
    uint32_t* column_begin;
    uint32_t* place;
    float2* factors;
    float4* transposed;
    float2* unlisted;
};

BackwardMemory take_backward(twell_problem const& problem, int64_t capacity, unsigned char*& next) {
    BackwardMemory memory = {};
    memory.block_counts = take<uint32_t>(next, ceil_div(problem.tokens, block_rows_of(problem)) * problem.d_ff);
    memory.column_begin = take<uint32_t>(next, problem.d_ff + 1);
    memory.place = take<uint32_t>(next, capacity);
    memory.factors = take<float2>(next, capacity);
    memory.transposed = take<float4>(next, capacity);
    memory.unlisted = take<float2>(next, int64_t{kMostUnlistedCtas} * problem.d_ff);
    return memory;
}

template <class Params>
cudaError_t launch(char const* name, void (*kernel)(Params), Params const& params, dim3 grid, int threads,
                   Call const& call) {
    return launch_dependent({name}, kernel, params, grid, threads, 0, call.device, call.stream);
}

// For as many pairs as there is place for: the host does not know how many there are.
cudaError_t launch_project(void (*kernel)(t::ProjectParams), t::ProjectParams const& params, int64_t capacity,
                           Call const& call) {
    return capacity == 0
               ? cudaSuccess
               : launch("project", kernel, params, dim3(blocks_of(capacity, t::kUnit * t::kWarps)), t::kThreads, call);
}

template <class Element, bool kGated>
cudaError_t forward(Call const& call, twell_train_forward_tensors const& given, void* workspace) {
    twell_problem const& problem = call.problem;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    ForwardMemory const memory = take_forward(problem, given.pairs.capacity, next);
    for (int64_t begin = 0; begin < problem.tokens; begin += kChunkRows) {
        twell_problem const chunk = with_tokens(problem, std::min(problem.tokens - begin, kChunkRows));
        twell_tensors tensors = call.tensors;
        tensors.x = static_cast<uint16_t const*>(tensors.x) + begin * problem.d_model;
        GateOutput output;
        output.packed = memory.packed;
        output.spilled = memory.spilled;
        TWELL_TRY(launch_gate({chunk, tensors, call.device, call.stream}, output,
                              choose_gate(chunk, call.device, Kernels::kBest)));
        t::ListParams list = {};
        list.packed = memory.packed;
        list.spilled = memory.spilled;
        list.row_begin = given.pairs.row_begin;
        list.words = given.pairs.words;
        list.counts = reinterpret_cast<uint32_t*>(given.counts);
        list.neurons = given.neurons;
        list.capacity = given.pairs.capacity;
        list.tokens = problem.tokens;
        list.first_row = begin;
        list.rows = static_cast<int>(chunk.tokens);
        list.num_tiles = num_tiles(problem);
        list.words_per_tile = words_per_tile(problem);
        dim3 const rows(blocks_of(chunk.tokens, t::kWarps));
        TWELL_TRY(launch("count_pairs", t::count_pairs_kernel, list, rows, t::kThreads, call));
        TWELL_TRY(launch_dependent({"add_up_pairs"}, t::add_up_pairs_kernel, list, dim3(1), t::kScanThreads,
                                   t::kBytesScan, call.device, call.stream));
        TWELL_TRY(launch("list_pairs", t::list_pairs_kernel, list, rows, t::kThreads, call));
    }
    t::Pairs const pairs = {given.pairs.row_begin, given.pairs.words, given.pairs.ups, problem.tokens};
    if constexpr (kGated) {
        t::ProjectParams project = {};
        set_block(project, problem, call.tensors);
        project.neurons = given.neurons;
        project.pairs = pairs;
        project.hidden = memory.hidden;
        TWELL_TRY(launch_project(t::project_kernel<Element, true, false>, project, given.pairs.capacity, call));
    }
    t::AddRowsParams add = {};
    set_block(add, problem, call.tensors);
    add.neurons = given.neurons;
    add.pairs = pairs;
    add.factors = memory.hidden;
    add.first = add.w_down;
    add.bias = add.b_down;
    add.addends[0] = static_cast<uint16_t const*>(given.hot);
    add.addends[1] = add.residual;
    add.out = add.y;
    add.row_l1 = given.row_l1;
    add.width = problem.d_out;
    constexpr t::Factors kFactors = kGated ? t::Factors::kHidden : t::Factors::kWord;
    auto const kernel = t::add_rows_kernel<Element, kFactors>;
    TWELL_TRY(launch("add_rows", kernel, add,
                     dim3(blocks_of(problem.tokens, t::kWarps), blocks_of(problem.d_out, kWarpColumns)), t::kThreads,
                     call));
    t::UnlistedParams rest = {};
    set_block(rest, problem, call.tensors);
    rest.neurons = given.neurons;
    rest.pairs = pairs;
    rest.factors = memory.factors;
    rest.addends[0] = add.addends[0];
    rest.addends[1] = add.addends[1];
    rest.out = rest.y;
    rest.row_l1 = given.row_l1;
    return launch("unlisted_rows", t::unlisted_rows_kernel<Element, kGated, false>, rest,
                  dim3(unlisted_ctas(call.device)), t::kUnlistedThreads, call);
}

template <class Element, bool kGated>
cudaError_t backward(Call const& call, twell_train_backward_tensors const& given, void* workspace) {
    twell_problem const& problem = call.problem;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    BackwardMemory const memory = take_backward(problem, given.pairs.capacity, next);
    t::Pairs const pairs = {given.pairs.row_begin, given.pairs.words, given.pairs.ups, problem.tokens};
    bool const for_weights = given.w_gate != nullptr;
    if (for_weights) {
        t::TransposeParams transpose = {};
        transpose.pairs = pairs;
        transpose.block_counts = memory.block_counts;
        transpose.column_begin = memory.column_begin;
        transpose.place = memory.place;
        transpose.block_rows = block_rows_of(problem);
        transpose.num_blocks = static_cast<int>(ceil_div(problem.tokens, transpose.block_rows));
        transpose.d_ff = problem.d_ff;
        dim3 const blocks(static_cast<unsigned>(transpose.num_blocks), blocks_of(problem.d_ff, t::kRange));
        TWELL_TRY(launch("count_neurons", t::count_neurons_kernel, transpose, blocks, t::kCountThreads, call));
        TWELL_TRY(launch("add_up_neurons", t::add_up_neurons_kernel, transpose,
                         dim3(blocks_of(problem.d_ff, kWarpSize)), t::kAddUpWarps * kWarpSize, call));
        TWELL_TRY(launch("begin_neurons", t::begin_neurons_kernel, transpose, dim3(1), t::kScanThreads, call));
        TWELL_TRY(launch("place_pairs", t::place_pairs_kernel, transpose, blocks, kWarpSize, call));
    }
    t::ProjectParams project = {};
    set_block(project, problem, call.tensors);
    project.neurons = given.neurons;
    project.gate_neurons = given.neurons;
    project.pairs = pairs;
    project.dy = static_cast<uint16_t const*>(given.dy);
    project.dl1 = given.dl1;
    project.factors = memory.factors;
    project.transposed = for_weights ? memory.transposed : nullptr;
    project.transposed_place = memory.place;
    TWELL_TRY(launch_project(t::project_kernel<Element, kGated, true>, project, given.pairs.capacity, call));
    t::UnlistedParams rest = {};
    static_cast<t::TrainingBlock&>(rest) = project;
    rest.pairs = pairs;
    rest.dy = project.dy;
    rest.dl1 = given.dl1;
    rest.factors = memory.unlisted;
    rest.addends[0] = static_cast<uint16_t const*>(given.hot);
    rest.out = static_cast<uint16_t*>(given.dx);
    rest.gradients = {static_cast<uint16_t*>(given.w_gate), static_cast<uint16_t*>(given.b_gate),
                      static_cast<uint16_t*>(given.w_up), static_cast<uint16_t*>(given.b_up),
                      static_cast<uint16_t*>(given.w_down)};
    if (given.dx != nullptr) {
        t::AddRowsParams add = {};
        static_cast<t::TrainingBlock&>(add) = project;
        add.pairs = pairs;
        add.factors = memory.factors;
        add.first = kGated ? add.w_up : add.w_gate;
        add.second = add.w_gate;
        add.addends[0] = rest.addends[0];
        add.out = rest.out;
        add.width = problem.d_model;
        constexpr t::Factors kFactors = kGated ? t::Factors::kBoth : t::Factors::kGate;
        TWELL_TRY(launch("add_rows", t::add_rows_kernel<Element, kFactors>, add,
                         dim3(blocks_of(problem.tokens, t::kWarps), blocks_of(problem.d_model, kWarpColumns)),
                         t::kThreads, call));
        TWELL_TRY(launch("unlisted_rows", t::unlisted_rows_kernel<Element, kGated, true>, rest,
                         dim3(unlisted_ctas(call.device)), t::kUnlistedThreads, call));
    }
    if (!for_weights) {
        return cudaSuccess;
    }
    t::AddColumnsParams columns = {};
    static_cast<t::TrainingBlock&>(columns) = project;
    columns.dy = project.dy;
    columns.column_begin = memory.column_begin;
    columns.transposed = memory.transposed;
    columns.gradients = rest.gradients;
    int const width = std::max(problem.d_model, problem.d_out);
    TWELL_TRY(launch("add_columns", t::add_columns_kernel<Element, kGated>, columns,
                     dim3(blocks_of(problem.d_ff, t::kWarps), blocks_of(width, kWarpColumns)), t::kThreads, call));
    return launch("unlisted_weights", t::unlisted_weights_kernel<Element, kGated>, rest,
                  dim3(static_cast<unsigned>(std::min(problem.d_ff, 4 * call.device.num_multiprocessors)),
                       blocks_of(width, t::kUnlistedColumns)),
                  t::kUnlistedThreads, call);
}

template <class Element, bool kGated, bool kBackward>
cudaError_t launch_hot(Call const& call, t::HotParams params) {
    bool const has_vectors = params.hot % kVector == 0;
    params.column_tiles = ceil_div(params.hot, kWarpSize * (has_vectors ? kVector : 1));
    dim3 const grid(static_cast<unsigned>(params.column_tiles * ceil_div(params.tokens, t::kHotRows)));
    auto const kernel =
        has_vectors ? t::hot_kernel<Element, kGated, kBackward, kVector> : t::hot_kernel<Element, kGated, kBackward, 1>;
    return launch("hot", kernel, params, grid, t::kHotThreads, call);
}

template <class Element>
cudaError_t launch_hot(Call const& call, t::HotParams const& params) {
    bool const backward = params.dh != nullptr;
    if (call.problem.variant == TWELL_GATED) {
        return backward ? launch_hot<Element, true, true>(call, params)
                        : launch_hot<Element, true, false>(call, params);
    }
    return backward ? launch_hot<Element, false, true>(call, params) : launch_hot<Element, false, false>(call, params);
}

}  // namespace

size_t train_forward_bytes(twell_problem const& problem, int64_t capacity) {
    return bytes_taken([&](unsigned char*& next) { take_forward(problem, capacity, next); });
}

size_t train_backward_bytes(twell_problem const& problem, int64_t capacity) {
    return bytes_taken([&](unsigned char*& next) { take_backward(problem, capacity, next); });
}

cudaError_t launch_train_forward(Call const& call, twell_train_forward_tensors const& given, void* workspace) {
    bool const gated = call.problem.variant == TWELL_GATED;
    if (call.problem.dtype == TWELL_BF16) {
        return gated ? forward<Bf16, true>(call, given, workspace) : forward<Bf16, false>(call, given, workspace);
    }
    return gated ? forward<Fp16, true>(call, given, workspace) : forward<Fp16, false>(call, given, workspace);
}

cudaError_t launch_train_backward(Call const& call, twell_train_backward_tensors const& given, void* workspace) {
    bool const gated = call.problem.variant == TWELL_GATED;
    if (call.problem.dtype == TWELL_BF16) {
        return gated ? backward<Bf16, true>(call, given, workspace) : backward<Bf16, false>(call, given, workspace);
    }
    return gated ? backward<Fp16, true>(call, given, workspace) : backward<Fp16, false>(call, given, workspace);
}

int64_t train_hot_parts(int64_t tokens, int hot) {
    return ceil_div(hot, kWarpSize * (hot % kVector == 0 ? kVector : 1)) * ceil_div(tokens, t::kHotRows);
}

cudaError_t launch_train_hot(Call const& call, twell_train_hot_tensors const& given) {
    twell_problem const& problem = call.problem;
    t::HotParams params = {};
    params.z = static_cast<uint16_t const*>(given.z);
    params.u = static_cast<uint16_t const*>(given.u);
    params.dh = static_cast<uint16_t const*>(given.dh);
    params.h = static_cast<uint16_t*>(given.h);
    params.dz = static_cast<uint16_t*>(given.dz);
    params.du = static_cast<uint16_t*>(given.du);
    params.counts = reinterpret_cast<uint32_t*>(given.counts);
    params.neurons = given.neurons;
    params.l1_parts = given.l1_parts;
    params.dl1 = given.dl1;
    params.tokens = problem.tokens;
    params.hot = problem.d_ff;
    params.stride = given.stride;
    params.relu_on_up = problem.activation == TWELL_DRELU;
    params.act = activation_of(problem, {});
    if (given.dh == nullptr) {
    }
    return problem.dtype == TWELL_BF16 ? launch_hot<Bf16>(call, params) : launch_hot<Fp16>(call, params);
}

cudaError_t launch_copy_rows(twell_train_copy const* copies, int count, Device const& device, cudaStream_t stream) {
    t::CopyRowsParams params = {};
    int most_rows = 0;
    for (int i = 0; i < count; ++i) {
        params.copies[i] = {static_cast<uint16_t const*>(copies[i].from),
                            static_cast<uint16_t*>(copies[i].to),
                            copies[i].from_rows,
                            copies[i].to_rows,
                            copies[i].rows,
                            copies[i].width};
        most_rows = std::max(most_rows, copies[i].rows);
    }
    if (most_rows == 0) {
        return cudaSuccess;
    }
    return launch_dependent({"copy_rows"}, t::copy_rows_kernel, params,
                            dim3(blocks_of(most_rows, t::kWarps), static_cast<unsigned>(count)), t::kThreads, 0, device,
                            stream);
}

}  // namespace twell

#include <algorithm>

#include "fp8/fp8.h"
#include "host/problem.h"
#include "many_tokens/many_tokens.h"
#include "many_tokens/schedule/schedule.h"

namespace twell {
namespace {

size_t h_part_bytes(twell_problem const& problem) {
    return static_cast<size_t>(max_dense_part(problem)) * spilled_stride(problem) * sizeof(uint16_t);
}

struct Memory {
    uint32_t* packed;         // [tokens, num_tiles * words_per_tile]
    unsigned char* schedule;  // schedule_bytes
    uint16_t* spilled;        // [tokens, num_tiles * TWELL_TILE]: see pack.cuh
    uint16_t* x_part;         // [max_dense_part, d_model], of a gated block
    HiddenBytes bytes;        // h of dense rows in FP8, of a gated block
    unsigned char* shared;    // chunks, then h of a part of the rows: h of chunks are in lists before that begins
};

Memory take_memory(twell_problem const& problem, unsigned char*& next) {
    bool const gated = problem.variant == TWELL_GATED;
    Memory memory = {};
    memory.packed = take<uint32_t>(next, problem.tokens * num_tiles(problem) * words_per_tile(problem));
    memory.schedule = take<unsigned char>(next, static_cast<int64_t>(schedule_bytes(problem)));
    memory.spilled = take<uint16_t>(next, problem.tokens * spilled_stride(problem));
    memory.x_part = take<uint16_t>(next, gated ? max_dense_part(problem) * problem.d_model : 0);
    if (gated) {
        memory.bytes = take_hidden_bytes(problem, next);
    }
    memory.shared =
        take<unsigned char>(next, static_cast<int64_t>(std::max(h_part_bytes(problem), chunk_bytes(problem))));
    return memory;
}

Memory memory_at(twell_problem const& problem, void* workspace) {
    unsigned char* next = static_cast<unsigned char*>(workspace);
    return take_memory(problem, next);
}

}  // namespace

ManyTokensConfig choose_many_tokens(twell_problem const& problem, Device const& device, Kernels kernels,
                                    GuardOrder order) {
    ManyTokensConfig config = {};
    config.gate = choose_gate(problem, device, kernels);
    config.chunks = choose_chunks(problem, device, kernels);
    config.dense = choose_dense(problem, device, kernels);
    config.sparse = choose_sparse(problem, device);
    bool const with_chunks = config.chunks.exists;
    PathCosts const costs = path_costs(problem, config.dense, device, with_chunks);
    config.guard = guard_model(problem, costs, config.dense.is_sm90, with_chunks ? nonzeros_in_chunks(problem) : 0.0f,
                               config.gate.num_count_parts, order);
    config.has_direct = may_have_direct_rows(problem) && !with_chunks && config.guard.count.num_parts != 0;
    return config;
}

bool many_tokens_take_scales(twell_problem const& problem, Device const& device) {
    constexpr int kMultiple = 16;  // bytes that a lane loads at once
    GateConfig const gate = choose_gate(problem, device, Kernels::kBest);
    return gate.exists && gate.is_sm90 && problem.d_out % kMultiple == 0 && !has_block_scales(problem);
}

bool many_tokens_widen(twell_problem const& problem) { return has_scales(problem) && problem.variant == TWELL_PLAIN; }

size_t many_tokens_bytes(twell_problem const& problem) {
    return bytes_taken([&](unsigned char*& next) { take_memory(problem, next); });
}

cudaError_t launch_many_tokens(Call const& call, void* workspace, Kernels kernels, GuardOrder order) {
    twell_problem const& problem = call.problem;
    ManyTokensConfig const config = choose_many_tokens(problem, call.device, kernels, order);
    unsigned char* next = static_cast<unsigned char*>(workspace);
    Widened const widened = many_tokens_widen(problem) ? take_widened(problem, next) : Widened{};
    Quantised const rounded = take_quantised(problem, next);
    Memory const memory = take_memory(problem, next);
    Schedule const schedule = schedule_at(problem, config.has_direct, memory.schedule);
    Chunks const chunks = chunks_at(problem, config.chunks, memory.shared);

    GateOutput output;
    output.packed = memory.packed;
    output.spilled = memory.spilled;
    output.counted = schedule.counted;
    if (config.has_direct) {
        output.tile_counts = schedule.tile_counts;
    }
    if (config.chunks.has_hot) {
        output.cleared = chunks.hot.sampled;
        output.num_cleared = problem.d_ff;
    }
    if (has_scales(problem)) {
        TWELL_TRY(launch_quantise(call, rounded));
    }
    TWELL_TRY(launch_gate(call, output, config.gate, rounded));

    GuardModel guard = config.guard;
    guard.count.parts = schedule.counted;
    Gather gather = {};
    gather.gate = {memory.packed, memory.spilled, num_tiles(problem), words_per_tile(problem)};
    gather.h_part = reinterpret_cast<uint16_t*>(memory.shared);
    bool const gated = problem.variant == TWELL_GATED;
    // Of a gated block with FP8 weights dense rows are multiplied in FP8; two values are copied as one.
    bool const in_bytes = has_scales(problem) && gated;
    if (gated) {
        gather.x =
            in_bytes ? reinterpret_cast<uint16_t const*>(rounded.x) : static_cast<uint16_t const*>(call.tensors.x);
        gather.x_part = memory.x_part;
    }
    gather.d_model = in_bytes ? problem.d_model / 2 : problem.d_model;
    SparseRows const rows = {reinterpret_cast<unsigned char*>(memory.spilled),
                             spilled_stride(problem) * static_cast<int64_t>(sizeof(uint16_t))};
    TWELL_TRY(launch_schedule(call, memory.packed, memory.spilled, schedule, guard, gather, chunks, rows));

    if (config.chunks.exists) {
        TWELL_TRY(launch_chunk_up(call, schedule, chunks, config.chunks));
    }
    SparseInput const input = {memory.packed, memory.spilled, schedule, guard.count, gather, rows, chunks, rounded};
    TWELL_TRY(launch_sparse_up(call, input, config.sparse));
    bool const dense_first = config.dense.is_sm90;
    if (!dense_first) {
        TWELL_TRY(launch_sparse_down(call, input, config.sparse, false));
    }
    if (in_bytes) {
        TWELL_TRY(launch_dense_bytes(call, gather, schedule, config.dense, rounded, memory.bytes));
    } else {
        twell_problem const dense_problem = widened_problem(problem);
        twell_tensors dense_tensors = call.tensors;
        if (many_tokens_widen(problem)) {
            TWELL_TRY(launch_widen(call, widened, &schedule.header->heavy_count));
            dense_tensors = widened_tensors(call.tensors, widened);
        }
        Call const dense_call = {dense_problem, dense_tensors, call.device, call.stream};
        TWELL_TRY(launch_dense(dense_call, gather, schedule, config.dense));
    }
    return dense_first ? launch_sparse_down(call, input, config.sparse, true) : cudaSuccess;
}

void list_many_tokens(Text& text) {
    list_gate(text);
    list_schedule(text);
    list_chunks(text);
    list_sparse(text);
    list_dense(text);
}

HotNeurons hot_neurons_in(twell_problem const& problem, void* workspace, Device const& device, Kernels kernels) {
    return chunks_at(problem, choose_chunks(problem, device, kernels), memory_at(problem, workspace).shared).hot;
}

}  // namespace twell

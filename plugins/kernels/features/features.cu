#include <algorithm>

#include "features/decode.cuh"
#include "features/features.h"
#include "features/list.cuh"
#include "host/problem.h"
#include "many_tokens/gate/gate.h"

namespace twell {
namespace {

constexpr Label kListLabel = {"list_features"};
constexpr Label kScanLabel = {"scan_counts"};
constexpr Label kDecodeLabel = {"decode_features"};

// The neurons of a group of a row's list.
constexpr int kPiece = TWELL_MAX_PACKED_D_FF;
static_assert(kPiece == features::kTilesOfGroup * TWELL_TILE, "a piece is a group");

// Of a block that is computed piece by piece: rows, and neurons of a piece, at a time. Many rows make up for reading
// the weights again, so the more there are, the fewer neurons.
constexpr int64_t kFewRows = 256;
constexpr int64_t kManyRows = 1024;
constexpr int64_t kMostPairs = kFewRows * kPiece;  // of both, that memory is for

struct Extent {
    int64_t rows;
    int neurons;
};

Extent extent_of(twell_problem const& problem) {
    return problem.tokens <= kFewRows
               ? Extent{problem.tokens, kPiece}
               : Extent{std::min(problem.tokens, kManyRows), static_cast<int>(kMostPairs / kManyRows)};
}

twell_problem piece_of(twell_problem problem, int64_t rows, int first, int neurons) {
    problem.tokens = rows;
    problem.d_ff = std::min(neurons, problem.d_ff - first);
    problem.hot = 0;
    return problem;
}

// The tensors that the gate of a piece reads: rows from `row` on, neurons from `first` on.
twell_tensors tensors_of(twell_problem const& problem, twell_tensors tensors, int64_t row, int first) {
    auto const skip = [](void const* tensor, int64_t bytes) -> void const* {
        return tensor == nullptr ? nullptr : static_cast<unsigned char const*>(tensor) + bytes;
    };
    constexpr int64_t kBytes = sizeof(uint16_t);
    tensors.x = skip(tensors.x, row * problem.d_model * kBytes);
    tensors.w_gate = skip(tensors.w_gate, int64_t{first} * problem.d_model * kBytes);
    tensors.b_gate = skip(tensors.b_gate, first * kBytes);
    tensors.thresholds = skip(tensors.thresholds, first * static_cast<int64_t>(sizeof(float)));
    tensors.residual = skip(tensors.residual, row * problem.d_out * kBytes);
    tensors.y = const_cast<void*>(skip(tensors.y, row * problem.d_out * kBytes));
    return tensors;
}

int64_t packed_words(twell_problem const& problem, int64_t rows) {
    return rows * num_tiles(problem) * words_per_tile(problem);
}

PackedGate gate_at(twell_problem const& problem, uint32_t const* packed, uint16_t* spilled) {
    return {packed, spilled, num_tiles(problem), words_per_tile(problem)};
}

int num_groups(twell_problem const& problem) { return static_cast<int>(ceil_div(problem.d_ff, kPiece)); }

cudaError_t launch_lists(Call const& call, features::ListParams params) {
    params.num_groups = num_groups(call.problem);
    int const tiles = std::min(params.gate.num_tiles, features::kTilesOfGroup);
    int const threads = static_cast<int>(ceil_div(tiles, kWarpSize)) * kWarpSize;
    dim3 const grid(static_cast<unsigned>(call.problem.tokens * params.num_groups));
    return launch_dependent(kListLabel, features::list_kernel, params, grid, threads, 0, call.device, call.stream);
}

// Turns the counts of all groups into the entries before each. A part has fewer than 2^31 pairs of a row and a neuron.
cudaError_t launch_scan(Call const& call, uint32_t* counts) {
    features::ScanParams const params = {counts, call.problem.tokens * num_groups(call.problem)};
    return launch_dependent(kScanLabel, features::scan_kernel, params, dim3(1), features::kScanThreads, 0, call.device,
                            call.stream);
}

cudaError_t launch_sums(Call const& call, features::DecodeParams params) {
    twell_problem const& problem = call.problem;
    set_block(params, problem, call.tensors);
    params.tokens = problem.tokens;
    params.num_slices = static_cast<int>(ceil_div(problem.d_out, kWarpColumns));
    // As many warps as keep the device busy.
    int64_t const items = params.tokens * params.num_slices;
    int64_t const wanted = int64_t{call.device.num_multiprocessors} * features::kDecodeWarps * features::kDecodeBlocks;
    params.warps_of_row = 1;
    while (params.warps_of_row < features::kDecodeWarps && items * params.warps_of_row < wanted) {
        params.warps_of_row *= 2;
    }
    dim3 const grid(static_cast<unsigned>(ceil_div(items * params.warps_of_row, features::kDecodeWarps)));
    auto const kernel = problem.dtype == TWELL_BF16 ? features::decode_kernel<Bf16> : features::decode_kernel<Fp16>;
    return launch_dependent(kDecodeLabel, kernel, params, grid, features::kDecodeWarps * kWarpSize, 0, call.device,
                            call.stream, {{"warps", params.warps_of_row}});
}

// An encoder has the packed tiles of a part of the rows at a time: of a fifth of them, but of kFewestRows at least, and
// of kMostEncoded pairs of a row and a neuron at most. Where all is kept, which takes five times the memory, a part is
// a fifth of that.
constexpr int64_t kParts = 5;
constexpr int64_t kMemoryOfAll = 5;
constexpr int64_t kFewestRows = 128;
constexpr int64_t kMostEncoded = int64_t{1} << 30;

int64_t rows_of_part(twell_problem const& problem, bool keeps_all) {
    int64_t const factor = keeps_all ? kMemoryOfAll : 1;
    int64_t const wanted = std::min(ceil_div(problem.tokens, kParts * factor), kMostEncoded / factor / problem.d_ff);
    int64_t const parts = ceil_div(problem.tokens, std::max(wanted, kFewestRows));
    return ceil_div(problem.tokens, std::max(parts, int64_t{1}));
}

struct EncodeMemory {
    uint32_t* packed;
    uint16_t* spilled;  // null if not all is kept
    uint32_t* counts;
    Quantised rounded;  // x, if weights have scales
};

EncodeMemory take_encode(twell_problem const& problem, bool keeps_all, unsigned char*& next) {
    int64_t const rows = rows_of_part(problem, keeps_all);
    EncodeMemory memory = {};
    memory.packed = take<uint32_t>(next, packed_words(problem, rows));
    if (keeps_all) {
        memory.spilled = take<uint16_t>(next, rows * spilled_stride(problem));
    }
    memory.counts = take<uint32_t>(next, rows * num_groups(problem));
    memory.rounded = take_quantised(piece_of(problem, rows, 0, problem.d_ff), next);
    return memory;
}

struct WideMemory {
    uint32_t* packed;
    uint16_t* spilled;
    int32_t* indices;  // of each row a piece
    uint16_t* values;
    uint32_t* counts;
    float* sums;
};

WideMemory take_wide(twell_problem const& problem, unsigned char*& next) {
    int64_t const pairs = std::min(problem.tokens, kFewRows) * kPiece;
    int64_t const rows = std::min(problem.tokens, kManyRows);
    WideMemory memory = {};
    memory.packed = take<uint32_t>(next, pairs / TWELL_TILE * words_per_tile(problem));
    memory.spilled = take<uint16_t>(next, pairs);
    memory.indices = take<int32_t>(next, pairs);
    memory.values = take<uint16_t>(next, pairs);
    memory.counts = take<uint32_t>(next, rows);
    memory.sums = take<float>(next, rows * problem.d_out);
    return memory;
}

}  // namespace

size_t encode_bytes(twell_problem const& problem, bool keeps_all) {
    return bytes_taken([&](unsigned char*& next) { take_encode(problem, keeps_all, next); });
}

cudaError_t launch_encode(Call const& call, bool keeps_all, EncodedLists const& lists, void* workspace) {
    twell_problem const& problem = call.problem;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    EncodeMemory const memory = take_encode(problem, keeps_all, next);
    int64_t const rows = rows_of_part(problem, keeps_all);
    for (int64_t row = 0; row < problem.tokens; row += rows) {
        twell_problem const part = piece_of(problem, std::min(rows, problem.tokens - row), 0, problem.d_ff);
        twell_tensors const tensors = tensors_of(problem, call.tensors, row, 0);
        Call const of_part = {part, tensors, call.device, call.stream};
        GateOutput output;
        output.packed = memory.packed;
        output.spilled = memory.spilled;
        // One kernel alone reads weights with scales.
        Kernels const kernels = has_scales(problem) ? Kernels::kSm90 : Kernels::kBest;
        if (has_scales(problem)) {
            TWELL_TRY(launch_quantise(of_part, memory.rounded));
        }
        TWELL_TRY(launch_gate(of_part, output, choose_gate(part, call.device, kernels), memory.rounded));
        features::ListParams params = {};
        params.gate = gate_at(problem, memory.packed, memory.spilled);
        params.counts = memory.counts;
        params.offsets = lists.offsets + row;
        params.missing = lists.offsets + problem.tokens + 1;
        params.is_first = row == 0;
        TWELL_TRY(launch_lists(of_part, params));
        TWELL_TRY(launch_scan(of_part, memory.counts));
        params.counts = nullptr;
        params.is_first = false;
        params.before = memory.counts;
        params.indices = lists.indices;
        params.values = lists.values;
        params.capacity = lists.capacity;
        TWELL_TRY(launch_lists(of_part, params));
    }
    return cudaSuccess;
}

cudaError_t launch_decode(Call const& call, FeatureLists const& lists) {
    features::DecodeParams params = {};
    params.indices = lists.indices;
    params.values = lists.values;
    params.offsets = lists.offsets;
    params.stride = lists.offsets == nullptr ? lists.capacity / call.problem.tokens : 0;
    params.capacity = lists.capacity;
    return launch_sums(call, params);
}

bool is_wide(twell_problem const& problem) { return problem.d_ff > TWELL_MAX_PACKED_D_FF; }

size_t wide_bytes(twell_problem const& problem) {
    return bytes_taken([&](unsigned char*& next) { take_wide(problem, next); });
}

cudaError_t launch_wide(Call const& call, void* workspace) {
    twell_problem const& problem = call.problem;
    unsigned char* next = static_cast<unsigned char*>(workspace);
    WideMemory const memory = take_wide(problem, next);
    Extent const extent = extent_of(problem);
    for (int64_t row = 0; row < problem.tokens; row += extent.rows) {
        int64_t const rows = std::min(extent.rows, problem.tokens - row);
        for (int first = 0; first < problem.d_ff; first += extent.neurons) {
            twell_problem const piece = piece_of(problem, rows, first, extent.neurons);
            twell_tensors const tensors = tensors_of(problem, call.tensors, row, first);
            Call const of_piece = {piece, tensors, call.device, call.stream};
            GateOutput output;
            output.packed = memory.packed;
            output.spilled = memory.spilled;
            TWELL_TRY(launch_gate(of_piece, output, choose_gate(piece, call.device, Kernels::kBest)));
            features::ListParams lists = {};
            lists.gate = gate_at(piece, memory.packed, memory.spilled);
            lists.first_neuron = first;
            lists.counts = memory.counts;
            lists.stride = extent.neurons;
            lists.indices = memory.indices;
            lists.values = memory.values;
            lists.capacity = INT64_MAX;
            TWELL_TRY(launch_lists(of_piece, lists));
            features::DecodeParams sums = {};
            sums.indices = memory.indices;
            sums.values = memory.values;
            sums.counts = memory.counts;
            sums.stride = extent.neurons;
            sums.capacity = INT64_MAX;
            sums.sums_before = first == 0 ? nullptr : memory.sums;
            sums.sums_after = first + piece.d_ff == problem.d_ff ? nullptr : memory.sums;
            twell_problem whole = problem;  // indices are of all neurons
            whole.tokens = rows;
            TWELL_TRY(launch_sums({whole, tensors, call.device, call.stream}, sums));
        }
    }
    return cudaSuccess;
}

void list_features(Text& text) {
    add_line(text, kListLabel);  // not scan_counts, which encode alone launches: this list is for blocks
    add_line(text, kDecodeLabel);
}

}  // namespace twell

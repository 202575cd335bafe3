#include <limits.h>

#include <algorithm>
#include <iterator>

#include "fp8/fp8.h"
#include "host/problem.h"
#include "linear/choose.cuh"
#include "linear/cublas_lt.h"
#include "linear/linear.h"
#include "linear/linear_few.cuh"
#include "linear/linear_many.cuh"
#include "linear/split.cuh"
#include "norm/norm.h"

namespace twell {
namespace {

// Up to 16 or up to 8 tokens: with the longest queues beside which the rows find a place. The small ones are for the
// 99 KiB of sm_86, sm_89 and sm_120.
using Few16Long = linear_few::Config<16, 2, 3>;
using Few16 = linear_few::Config<16, 2, 2>;
using Few16Small = linear_few::Config<8, 2, 2>;
using Few8Long = linear_few::Config<16, 1, 3>;
using Few8 = linear_few::Config<16, 1, 2>;
using Few8Small = linear_few::Config<8, 1, 2>;

using Many = matmul_generic::Config<128, 2, 4, 4>;

// Up to so many tokens, by the bytes of a weight, several outputs are one product, whose result is then split: a
// product of each output would take about as long as one of all.
constexpr int64_t kMostTokensJoined = 512;
constexpr int64_t kMostTokensJoinedInBytes = 1024;

template <class Cfg>
constexpr Label label_of() {
    return {"linear_few", {{"tokens", Cfg::kTokens}, {"queue", Cfg::kWarps * Cfg::kNumStages}}};
}

bool is_scaled(twell_linear_problem const& problem) { return problem.weight_dtype == TWELL_E4M3; }

bool is_by_block(twell_linear_problem const& problem) {
    return is_scaled(problem) && problem.weight_scale == TWELL_SCALE_BLOCK;
}

// Whether linear_few computes the layer, on every device: a token's row must fit into shared memory beside all else. If
// the rows of all tokens do not fit on an H100, it would read the weights twice; a product reads them once, but not as
// bytes. Of these it reads 16 at once, and twice where they have scales of blocks, or are so few that a product, and
// the kernel that rounds x, take longer.
bool is_few(twell_linear_problem const& problem) {
    constexpr int64_t kLeastSharedBytes = 99 * 1024;
    constexpr int64_t kSharedBytes = 227 * 1024;
    constexpr int kMostOutputsTwice = 2048;
    constexpr int64_t kMostWeightsTwice = 2048 * kMostOutputsTwice;
    int64_t const row_bytes = linear_few::row_bytes<uint16_t>(problem.in);
    int64_t const rest = problem.tokens <= Few8::kTokens ? Few8::kBytesBesideRows : Few16::kBytesBesideRows;
    bool const has_few_weights =
        problem.out <= kMostOutputsTwice && int64_t{problem.in} * problem.out <= kMostWeightsTwice;
    bool const twice = is_by_block(problem) || (is_scaled(problem) && has_few_weights);
    return problem.tokens <= kMostTokensLinearFew * (twice ? 2 : 1) &&
           row_bytes <= kLeastSharedBytes - Few8Small::kBytesBesideRows &&
           (is_scaled(problem) ? problem.in % (2 * kVector) == 0 : problem.tokens * row_bytes <= kSharedBytes - rest);
}

// Whether cuBLASLt has FP8 products of the sizes and scales.
bool has_product_in_bytes(twell_linear_problem const& problem) {
    constexpr int kMultiple = 16;
    return problem.in % (is_by_block(problem) ? TWELL_SCALE_BLOCK_SIZE : kMultiple) == 0 &&
           problem.out % kMultiple == 0;
}

// Up to how many tokens several outputs are joined: any number if not each of them has a product.
int64_t most_tokens_joined(twell_linear_problem const& problem) {
    if (problem.splits[1] == 0) {
        return 0;
    }
    if (!is_scaled(problem)) {
        return kMostTokensJoined;
    }
    constexpr int kMultiple = 16;
    int32_t begin = 0;
    for (int32_t const width : problem.splits) {
        bool const begins_with_block = width == 0 || begin % TWELL_SCALE_BLOCK_SIZE == 0;
        if (width % kMultiple != 0 || (is_by_block(problem) && !begins_with_block)) {
            return INT64_MAX;
        }
        begin += width;
    }
    return kMostTokensJoinedInBytes;
}

bool is_joined(twell_linear_problem const& problem) {
    return !is_few(problem) && problem.tokens <= most_tokens_joined(problem);
}

// The places of scales that products do not take as they are: one of all outputs, and those of blocks whose rows do not
// begin on 16 bytes.
CopiedScales places_of_scales(twell_linear_problem const& problem) {
    CopiedScales places = {};
    if (is_by_block(problem)) {
        constexpr int kMultiple = cublas_lt::kBlocksMultiple;
        places.columns = places.step = static_cast<int>(scale_blocks(problem.in));
        places.stride = static_cast<int>(ceil_div(places.columns, kMultiple)) * kMultiple;
        places.rows = places.stride == places.columns ? 0 : static_cast<int>(scale_blocks(problem.out));
    } else {
        places.rows = problem.weight_scale == TWELL_SCALE_TENSOR ? problem.out : 0;
        places.columns = places.stride = 1;
    }
    return places;
}

// Rows of a weight that are widened at once, where cuBLASLt does not read its bytes: parts of equal size, with whole
// tiles, of kMostBytes if that is a tile. The workspace must do for a process without cuBLASLt, too.
int64_t rows_widened(twell_linear_problem const& problem) {
    constexpr int64_t kMostBytes = 32 << 20;
    int64_t const most = std::max<int64_t>(kMostBytes / 2 / problem.in / linear_many::BLOCK_N, 1);
    int64_t const tiles = ceil_div(problem.out, linear_many::BLOCK_N);
    return std::min<int64_t>(ceil_div(tiles, ceil_div(tiles, most)) * linear_many::BLOCK_N, problem.out);
}

struct Scratch {
    uint16_t* widened;     // [rows_widened, in]: FP8 weights in 16 bits
    uint16_t* normalised;  // [tokens, in]
    Quantised rounded;     // x, normalised
    CopiedScales weight_scales;
    void* of_cublas_lt;
    uint64_t* keys;  // [tokens, kMostKeys], of linear_few
    uint16_t* y;     // [tokens, out], of other kernels, where only the choice is stored, or outputs are joined
};

Scratch take_scratch(twell_linear_problem const& problem, unsigned char*& memory) {
    Scratch scratch = {};
    int64_t const in = problem.in;
    bool const writes_rows = !is_few(problem) && problem.norm != TWELL_NORM_NONE;
    bool const scaled = !is_few(problem) && is_scaled(problem);
    scratch.widened = take<uint16_t>(memory, scaled ? rows_widened(problem) * in : 0);
    scratch.normalised = take<uint16_t>(memory, writes_rows ? problem.tokens * in : 0);
    bool const rounds_rows = scaled && has_product_in_bytes(problem);
    scratch.rounded.x = take<uint8_t>(memory, rounds_rows ? problem.tokens * in : 0);
    scratch.rounded.by_group = is_by_block(problem);
    int64_t const scales_of_row = is_by_block(problem) ? scale_blocks(problem.in) : 1;
    scratch.rounded.scale = take<float>(memory, rounds_rows ? problem.tokens * scales_of_row : 0);
    scratch.weight_scales = places_of_scales(problem);
    int64_t const places = int64_t{scratch.weight_scales.rows} * scratch.weight_scales.stride;
    scratch.weight_scales.to = take<float>(memory, rounds_rows ? places : 0);
    scratch.of_cublas_lt = take<unsigned char>(memory, is_few(problem) ? 0 : cublas_lt::kWorkspaceBytes);
    if (problem.choose != 0 && is_few(problem)) {
        scratch.keys = take<uint64_t>(memory, problem.tokens * linear_choose::kMostKeys);
    } else if (!is_few(problem)) {  // a call of fewer tokens, which are joined, must find its place, too
        int64_t const rows =
            problem.choose != 0 ? problem.tokens : std::min(problem.tokens, most_tokens_joined(problem));
        scratch.y = take<uint16_t>(memory, rows * problem.out);
    }
    return scratch;
}

NormCall norm_call(LinearCall const& call, void* normalised) {
    twell_linear_problem const& problem = call.problem;
    return {call.tensors.x,         normalised,  call.tensors.norm_weight,
            call.tensors.norm_bias, problem.eps, problem.norm,
            problem.dtype,          problem.in,  problem.tokens};
}

linear::Outputs outputs_of(LinearCall const& call) {
    linear::Outputs outputs = {};
    int begin = 0;
    for (int i = 0; i < TWELL_MAX_SPLITS; ++i) {
        int const width = i == 0 && call.problem.splits[0] == 0 ? call.problem.out : call.problem.splits[i];
        outputs.begins[i] = width == 0 ? INT_MAX : begin;
        outputs.widths[i] = width;
        outputs.y[i] = static_cast<uint16_t*>(call.tensors.y[i]);
        begin += width;
    }
    return outputs;
}

// Rows of a call.
struct Rows {
    twell_linear_problem problem;
    twell_linear_tensors tensors;

    LinearCall of(LinearCall const& call) const { return {problem, tensors, call.device, call.stream, call.kernels}; }
};

Rows rows_of(LinearCall const& call, int64_t begin, int64_t end) {
    Rows rows = {call.problem, call.tensors};
    rows.problem.tokens = end - begin;
    rows.tensors.x = static_cast<uint16_t const*>(call.tensors.x) + begin * call.problem.in;
    if (call.tensors.residual != nullptr) {
        rows.tensors.residual = static_cast<uint16_t const*>(call.tensors.residual) + begin * call.problem.out;
    }
    linear::Outputs const outputs = outputs_of(call);
    for (int i = 0; i < TWELL_MAX_SPLITS && outputs.widths[i] != 0; ++i) {
        rows.tensors.y[i] = outputs.y[i] + begin * outputs.widths[i];
    }
    return rows;
}

int64_t num_ctas_few(LinearCall const& call) {
    int64_t const most = call.problem.choose != 0 ? linear_choose::kMostKeys : INT_MAX;
    return std::min({ceil_div(call.problem.out, MMA_M), int64_t{call.device.num_multiprocessors}, most});
}

template <class Element, class Stored, class Cfg>
cudaError_t launch_few(LinearCall const& call, uint64_t* keys, int64_t tokens) {
    twell_linear_problem const& problem = call.problem;
    twell_linear_tensors const& tensors = call.tensors;
    dim3 const grid(static_cast<unsigned>(num_ctas_few(call)));
    for (int64_t begin = 0; begin < problem.tokens; begin += tokens) {
        Rows const rows = rows_of(call, begin, std::min(begin + tokens, problem.tokens));
        linear_few::Params<Stored> params = {};
        params.x = static_cast<uint16_t const*>(rows.tensors.x);
        params.weight = static_cast<Stored const*>(tensors.weight);
        params.bias = static_cast<uint16_t const*>(tensors.bias);
        params.residual = static_cast<uint16_t const*>(rows.tensors.residual);
        params.scale = static_cast<float const*>(tensors.weight_scale);
        params.scale_step = problem.weight_scale == TWELL_SCALE_NEURON ? 1 : 0;
        params.scale_columns =
            problem.weight_scale == TWELL_SCALE_BLOCK ? static_cast<int>(scale_blocks(problem.in)) : 0;
        params.norm = norm_call(call, nullptr).norm();
        params.outputs = outputs_of(rows.of(call));
        params.keys = keys == nullptr ? nullptr : keys + begin * linear_choose::kMostKeys;
        params.tokens = static_cast<int>(rows.problem.tokens);
        params.in = problem.in;
        params.out = problem.out;
        int const bytes =
            static_cast<int>(Cfg::kBytesBesideRows + params.tokens * linear_few::row_bytes<Stored>(problem.in));
        TWELL_TRY(launch_dependent(label_of<Cfg>(), linear_few::linear_kernel<Element, Stored, Cfg>, params, grid,
                                   Cfg::kThreads, bytes, call.device, call.stream, {}, call.device.max_shared_bytes));
    }
    return cudaSuccess;
}

// Launches of Cfg, each of as many tokens as find a place beside all else.
template <class Stored, class Cfg>
int64_t launches(LinearCall const& call) {
    int64_t const left = call.device.max_shared_bytes - Cfg::kBytesBesideRows;
    int64_t const room = left / linear_few::row_bytes<Stored>(call.problem.in);
    return room < 1 ? INT_MAX : ceil_div(call.problem.tokens, std::min<int64_t>(room, Cfg::kTokens));
}

// The configuration of the fewest launches, of equals the first one.
template <class Element, class Stored, class... Configs>
cudaError_t launch_one_of(LinearCall const& call, uint64_t* keys) {
    int64_t const fewest = std::min({launches<Stored, Configs>(call)...});
    int64_t const tokens = ceil_div(call.problem.tokens, fewest);
    return with_config<Configs...>(
        [&](auto c) { return launches<Stored, decltype(c)>(call) == fewest; },
        [&](auto c) { return launch_few<Element, Stored, decltype(c)>(call, keys, tokens); });
}

template <class Element, class Stored>
cudaError_t launch_few(LinearCall const& call, uint64_t* keys) {
    return launch_one_of<Element, Stored, Few8Long, Few8, Few8Small, Few16Long, Few16, Few16Small>(call, keys);
}

// Computes columns of all outputs by cuBLASLt, those of the rows of `weight`; cudaErrorNotSupported where it cannot.
// With scales x and W are in FP8.
cudaError_t multiply_by_cublas_lt(LinearCall const& call, Scratch const& scratch, void const* x, void const* weight,
                                  int64_t begin, int64_t end, float const* x_scale = nullptr,
                                  float const* weight_scale = nullptr) {
    if (call.kernels != Kernels::kBest || cublas_lt::version() == 0) {
        return cudaErrorNotSupported;
    }
    twell_linear_problem const& problem = call.problem;
    int64_t const element_bytes = x_scale == nullptr ? 2 : 1;
    linear::Outputs const outputs = outputs_of(call);
    for (int i = 0; i < TWELL_MAX_SPLITS && outputs.widths[i] != 0; ++i) {
        int64_t const first = std::max<int64_t>(begin, outputs.begins[i]);
        int64_t const width = std::min<int64_t>(end, outputs.begins[i] + outputs.widths[i]) - first;
        if (width <= 0) {
            continue;
        }
        if (call.device.trace != nullptr) {
            add_line(*call.device.trace, {"cublas_lt", {{"bits", 8 * element_bytes}}});
            continue;
        }
        auto const* const bias = static_cast<uint16_t const*>(call.tensors.bias);
        auto const* const residual = static_cast<uint16_t const*>(call.tensors.residual);
        cublas_lt::Product product = {};
        product.x = x;
        product.weight = static_cast<unsigned char const*>(weight) + (first - begin) * problem.in * element_bytes;
        product.x_scale = x_scale;
        product.by_block = weight_scale != nullptr && is_by_block(problem);
        product.weight_scale = weight_scale == nullptr ? nullptr
                               : product.by_block
                                   ? weight_scale + first / TWELL_SCALE_BLOCK_SIZE * scratch.weight_scales.stride
                                   : weight_scale + first;
        product.bias = bias == nullptr ? nullptr : bias + first;
        product.residual = residual == nullptr ? nullptr : residual + first;
        product.y = outputs.y[i] + (first - outputs.begins[i]);
        product.tokens = problem.tokens;
        product.in = problem.in;
        product.out = width;
        product.stride = outputs.widths[i];
        product.is_bf16 = problem.dtype == TWELL_BF16;
        TWELL_TRY(cublas_lt::multiply(product, scratch.of_cublas_lt, call.stream));
    }
    return cudaSuccess;
}

// The layer as an FP8 product: x, normalised, is rounded, a scale a token, or with scales of blocks as many as these
// have. cudaErrorNotSupported: elsewhere.
cudaError_t launch_in_bytes(LinearCall const& call, Scratch const& scratch) {
    twell_linear_problem const& problem = call.problem;
    bool const good = is_sm90(call.device) && call.kernels == Kernels::kBest && problem.tokens > 0 &&
                      cublas_lt::version() >= cublas_lt::kFirstWithScales && has_product_in_bytes(problem);
    if (!good) {
        return cudaErrorNotSupported;
    }
    CopiedScales scales = scratch.weight_scales;
    scales.from = static_cast<float const*>(call.tensors.weight_scale);
    TWELL_TRY(launch_quantise(norm_call(call, nullptr), scratch.rounded, call.device, call.stream, scales));
    return multiply_by_cublas_lt(call, scratch, scratch.rounded.x, call.tensors.weight, 0, problem.out,
                                 scratch.rounded.scale, scales.rows == 0 ? scales.from : scales.to);
}

// Rows of an FP8 weight in 16 bits, where the workspace has a place for them.
cudaError_t widen_rows(LinearCall const& call, Scratch const& scratch, int64_t begin, int64_t end) {
    twell_linear_problem const& problem = call.problem;
    static_assert(linear_many::BLOCK_N % TWELL_SCALE_BLOCK_SIZE == 0, "parts begin with a block");
    int64_t const first_scale = problem.weight_scale == TWELL_SCALE_TENSOR ? 0
                                : problem.weight_scale == TWELL_SCALE_NEURON
                                    ? begin
                                    : begin / TWELL_SCALE_BLOCK_SIZE * scale_blocks(problem.in);
    return launch_widen(static_cast<unsigned char const*>(call.tensors.weight) + begin * problem.in, scratch.widened,
                        static_cast<float const*>(call.tensors.weight_scale) + first_scale, problem.weight_scale,
                        static_cast<int>(end - begin), problem.in, problem.dtype, call.device, call.stream);
}

template <class Element>
cudaError_t launch_many(LinearCall const& call, Scratch const& scratch) {
    twell_linear_problem const& problem = call.problem;
    twell_linear_tensors const& tensors = call.tensors;
    linear_many::Params params = {};
    params.x = static_cast<uint16_t const*>(tensors.x);
    if (problem.norm != TWELL_NORM_NONE) {
        TWELL_TRY(launch_norm(norm_call(call, scratch.normalised), call.device, call.stream));
        params.x = scratch.normalised;
    }
    bool const scaled = is_scaled(problem);
    params.weight = scaled ? scratch.widened : static_cast<uint16_t const*>(tensors.weight);
    params.bias = static_cast<uint16_t const*>(tensors.bias);
    params.residual = static_cast<uint16_t const*>(tensors.residual);
    params.outputs = outputs_of(call);
    params.tokens = problem.tokens;
    params.in = problem.in;
    params.out = problem.out;
    int64_t const rows = scaled ? rows_widened(problem) : problem.out;
    for (int64_t begin = 0; begin < problem.out; begin += rows) {
        int64_t const end = std::min<int64_t>(begin + rows, problem.out);
        if (scaled) {
            TWELL_TRY(widen_rows(call, scratch, begin, end));
        }
        cudaError_t status = multiply_by_cublas_lt(call, scratch, params.x, params.weight, begin, end);
        if (status == cudaErrorNotSupported) {
            params.begin = static_cast<int>(begin);
            params.end = static_cast<int>(end);
            params.num_tiles = static_cast<int>(ceil_div(end - begin, linear_many::BLOCK_N));
            int64_t const tiles = ceil_div(problem.tokens, Many::BLOCK_M) * params.num_tiles;
            dim3 const grid(static_cast<unsigned>(std::min<int64_t>(tiles, call.device.num_multiprocessors)));
            status = launch_dependent({"linear_many"}, linear_many::product_kernel<Element, Many>, params, grid,
                                      Many::kThreads, Many::kSharedBytes, call.device, call.stream);
        }
        TWELL_TRY(status);
    }
    return cudaSuccess;
}

template <class Element>
cudaError_t launch_product(LinearCall const& call, Scratch const& scratch) {
    if (is_few(call.problem)) {
        return is_scaled(call.problem) ? launch_few<Element, E4m3>(call, scratch.keys)
                                       : launch_few<Element, uint16_t>(call, scratch.keys);
    }
    if (is_scaled(call.problem)) {
        // Of scales of blocks there are products of so many tokens.
        int64_t const multiple = is_by_block(call.problem) ? cublas_lt::kBlocksMultiple : 1;
        int64_t const end = call.problem.tokens / multiple * multiple;
        cudaError_t const status = launch_in_bytes(rows_of(call, 0, end).of(call), scratch);
        if (status == cudaSuccess && end != call.problem.tokens) {
            return launch_product<Element>(rows_of(call, end, call.problem.tokens).of(call), scratch);
        }
        if (status != cudaErrorNotSupported) {
            return status;
        }
    }
    return launch_many<Element>(call, scratch);
}

cudaError_t launch_split(linear_split::Params const& params, LinearCall const& call) {
    constexpr int64_t kCtasEach = 8;
    int64_t const ctas = ceil_div(params.tokens * (params.out / kVector), linear_split::kThreads);
    dim3 const grid(static_cast<unsigned>(std::min(ctas, kCtasEach * call.device.num_multiprocessors)));
    return launch_dependent({"linear_split"}, linear_split::split_kernel, params, grid, linear_split::kThreads, 0,
                            call.device, call.stream);
}

template <class Element>
cudaError_t launch(LinearCall const& call, Scratch const& scratch) {
    twell_linear_problem const& problem = call.problem;
    Rows rows = {problem, call.tensors};
    if (is_joined(problem) && call.kernels == Kernels::kBest && cublas_lt::version() != 0) {
        std::fill(std::begin(rows.problem.splits), std::end(rows.problem.splits), 0);
        rows.tensors.y[0] = scratch.y;
        TWELL_TRY(launch_product<Element>(rows.of(call), scratch));
        return launch_split({scratch.y, outputs_of(call), problem.tokens, problem.out}, call);
    }
    if (problem.choose == 0) {
        return launch_product<Element>(call, scratch);
    }
    if (!is_few(problem)) {
        rows.problem.choose = 0;
        rows.tensors.y[0] = scratch.y;
    }
    TWELL_TRY(launch_product<Element>(rows.of(call), scratch));
    linear_choose::Params const params = {scratch.keys, scratch.y, static_cast<int64_t*>(call.tensors.y[0]),
                                          static_cast<int>(num_ctas_few(call)), problem.out};
    return launch_dependent({"linear_choose"}, linear_choose::choose_kernel<Element>, params,
                            dim3(static_cast<unsigned>(problem.tokens)), linear_choose::kThreads, 0, call.device,
                            call.stream);
}

template <class... Configs>
void list_few(Text& text, Configs...) {
    (add_line(text, label_of<Configs>()), ...);
}

}  // namespace

size_t linear_bytes(twell_linear_problem const& problem) {
    return bytes_taken([&](unsigned char*& end) { take_scratch(problem, end); });
}

void list_linear(Text& text) {
    list_few(text, Few8Long(), Few8(), Few8Small(), Few16Long(), Few16(), Few16Small());
    add_line(text, {"linear_many"});
    add_line(text, {"linear_split"});
    add_line(text, {"linear_choose"});
}

cudaError_t launch_linear(LinearCall const& call, void* workspace) {
    unsigned char* next = static_cast<unsigned char*>(workspace);
    Scratch const scratch = take_scratch(call.problem, next);
    return call.problem.dtype == TWELL_BF16 ? launch<Bf16>(call, scratch) : launch<Fp16>(call, scratch);
}

}  // namespace twell

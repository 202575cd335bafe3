// Host side of dense_sm90.cuh: the up and down projections of rows whose neurons are all multiplied, on compute
// capability 9.0. The dense path of many tokens and dense blocks share them.
#pragma once

#include "device/block.cuh"
#include "format/active.cuh"
#include "format/pack.cuh"
#include "format/schedule.cuh"
#include "host/launch.h"
#include "host/problem.h"
#include "matmul/tiling_sm90.h"
#include "twell/twell.h"

namespace twell {

// Scratch memory for a down projection of whose sums several clusters compute a part: see parts_sm90.cuh.
struct PartSums {
    float4* sums;      // [most_sums / 4]
    uint32_t* states;  // [num_states]
    int64_t most_sums;
    int num_states;
};

// A projection of all rows, and how it is cut.
struct DenseShape {
    matmul_sm90::Product product;
    int clusters;  // that the device holds
    matmul_sm90::Tiling tiling;
};

// most_part_sums: that there is memory for.
DenseShape choose_dense_up_sm90(twell_problem const& problem, Device const& device);
DenseShape choose_dense_down_sm90(twell_problem const& problem, int64_t most_part_sums, Device const& device);

// Whether there are kernels for the problem, in 16 bits.
bool dense_sm90_supports(twell_problem const& problem);

// h in FP8, each row with a scale for 128 neurons: see hidden_sm90.cuh.
struct HiddenBytes {
    uint8_t* values;       // [tokens, spilled_stride(problem)]
    float* scales;         // [parts of all tiles of d_ff, tokens], rows scale_stride apart
    int64_t scale_stride;  // a multiple of 4
};

// A piece of memory for it.
inline HiddenBytes take_hidden_bytes(twell_problem const& problem, unsigned char*& memory) {
    constexpr int64_t kMultiple = 4;
    HiddenBytes h = {};
    if (has_scales(problem)) {
        h.scale_stride = ceil_div(problem.tokens, kMultiple) * kMultiple;
        h.values = take<uint8_t>(memory, problem.tokens * spilled_stride(problem));
        // A tile has two parts, of which the last one may lie beyond d_ff: kernels leave scales for it, too.
        h.scales = take<float>(memory, int64_t{num_tiles(problem)} * kClusterSize * h.scale_stride);
    }
    return h;
}

// The rows that are multiplied, and where their h lies.
struct DenseRows {
    PackedGate gate;          // spilled: g of all rows, in whose place comes h if all rows are dense
    uint16_t const* x_part;   // [part, d_model]: x of the dense rows, if not all are dense
    uint16_t* h_part;         // [part, spilled_stride(problem)]: their h
    int64_t part;             // rows that there is memory for in these
    Schedule schedule;        // says which rows are dense, unless all_rows
    bool all_rows;            // are dense, as the host knows
    PartSums parts;           // then
    SkippingLimits skipping;  // then: masks are null if no launch behind may skip neurons
    // With FP8 weights:
    HiddenBytes bytes;       // in the place of h in 16 bits
    uint8_t const* x_bytes;  // [tokens, d_model]: x in FP8, as is x_part
    float const* x_scale;    // [tokens]
};

// Enqueue a projection; the kernels do nothing if no row is dense. The next launch may overlap these: if there are
// dense rows, it starts only after all launches before these have ended.
cudaError_t launch_dense_up_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape);
cudaError_t launch_dense_down_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape);

// The same with FP8 weights.
DenseShape choose_dense_up_bytes_sm90(twell_problem const& problem, Device const& device);
DenseShape choose_dense_down_bytes_sm90(twell_problem const& problem, int64_t most_part_sums, Device const& device);
cudaError_t launch_dense_up_bytes_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape);
cudaError_t launch_dense_down_bytes_sm90(Call const& call, DenseRows const& rows, DenseShape const& shape);

// The rows of the configurations, a line each.
void list_dense_sm90(Text& text);
void list_dense_bytes_sm90(Text& text);

}  // namespace twell

// The guard: which rows are too dense for the sparse kernels, by what either path would cost.
#pragma once

#include <stdint.h>

namespace twell {

// One dense projection, which computes tiles of all neurons and a block of tokens in rounds.
struct DenseRounds {
    float blocks_per_token;
    float rounds_per_block;
    float round_ns;
};

// What the gate has counted, see gate.h. The sum tells that all rows are dense if it comes to all_dense_from, and that
// they may well be if it comes to some_sparse_to.
struct GateCount {
    uint32_t const* parts;
    int num_parts;  // 0: it has not
    uint32_t all_dense_from;
    uint32_t some_sparse_to;
};

// What the decision needs beside the rows' non-zeros.
struct GuardModel {
    int64_t forced;     // so many rows are dense, whatever it costs; negative: decide. For tests
    uint32_t max_part;  // unless all are, no more rows may be dense
    float nonzero_ns;   // the sparse path's time: for each non-zero by throughput,
    float excess_ns;    // so much more for each that sparse rows have beyond excess_begin on average,
    float excess_begin;
    float heaviest_ns;  // for each of the heaviest row by latency
    float part_row_ns;  // the dense path's time for each row if not all are dense, beside its projections
    float part_ns;      // and so much more
    DenseRounds up;     // round_ns is 0 in a plain block
    DenseRounds down;
    // Whether the dense down projection overlaps the sparse one, unless all rows are dense. Then a round that is not
    // full costs less, if the sparse one lasts as long: it has such a share of the sparse path's time.
    bool down_overlaps;
    float down_share;
    GateCount count;
};

}  // namespace twell

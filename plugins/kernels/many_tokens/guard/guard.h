// The guard: which rows are too dense for the sparse kernels, by what either path would cost.
#pragma once

#include <stdint.h>

#include "twell/twell.h"

namespace twell {

// One dense projection, which computes tiles of all neurons and a block of tokens in rounds.
struct DenseRounds {
    float blocks_per_token;
    float rounds_per_block;
    float round_ns;
};

// The most parts of the count that a gate kernel leaves.
constexpr int kMostCountParts = 160;

// The gate's count, see gate.h. All rows are dense if the sum is all_dense_from or more, and may well be if it is
// some_sparse_to or more.
struct GateCount {
    uint32_t const* parts;
    int num_parts;  // 0: it has not
    uint32_t all_dense_from;
    uint32_t some_sparse_to;
};

constexpr int64_t kGuardDecides = -1;

// Numbers that the decision needs beside the rows' non-zeros.
struct GuardModel {
    int64_t forced;     // that many rows are dense, whatever it costs; or kGuardDecides
    uint32_t max_part;  // the most rows that may be dense while others are not
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

// The speed of a device on either path.
struct PathCosts {
    float gathered_bytes_per_ns;  // of weights, sparse
    float copied_bytes_per_ns;    // of rows that the dense path wants to be neighbours
    DenseRounds up;               // of a gated block
    DenseRounds down;
};

// Which rows the guard takes for dense. For tests all but kDecides.
struct GuardOrder {
    enum Kind { kDecides, kEarly, kRows } kind = kDecides;  // kEarly: all rows, as decided by the gate's count
    int64_t rows = 0;  // of kRows: up to max_dense_part(problem), or all. With others, or with rows that have no list,
                       // more rows are dense
};

// The most rows that may be dense while others are not.
int64_t max_dense_part(twell_problem const& problem);

// Makes the guard's model. `dense_first`: the dense path comes before the sparse down projection and overlaps it;
// `nonzeros_in_chunks`: the non-zeros of a row that find a place in chunks on average, 0 without chunks;
// `num_count_parts`: of the gate's count.
GuardModel guard_model(twell_problem const& problem, PathCosts const& costs, bool dense_first, float nonzeros_in_chunks,
                       int num_count_parts, GuardOrder order);

}  // namespace twell

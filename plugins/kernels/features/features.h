// Features of a row: its active neurons with g, as lists; what they decode to; and plain blocks of more neurons than
// the packed format counts, which are both, piece by piece.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Parts of a row that are listed apart, in order: up to TWELL_MAX_PACKED_D_FF neurons each.
int num_feature_groups(twell_problem const& problem);

// What launch_encode leaves. keeps_all: no tile overflows.
size_t encode_bytes(twell_problem const& problem, bool keeps_all);

// Enqueues the gate, and how many features each group of each row has: [tokens, groups], -1 where a tile has
// overflowed.
cudaError_t launch_encode(Call const& call, bool keeps_all, int64_t* counts, void* workspace);

// Enqueues the lists, each group's from its place in `begins` on. The workspace is that of launch_encode.
cudaError_t launch_list(Call const& call, bool keeps_all, int64_t const* begins, int32_t* indices, uint16_t* values,
                        void* workspace);

// Where lists are: of row r from offsets[r] up to offsets[r + 1], or of no offsets per_row entries from r * per_row on.
struct FeatureLists {
    int32_t const* indices;
    uint16_t const* values;
    int64_t const* offsets;
    int64_t per_row;
};

cudaError_t launch_decode(Call const& call, FeatureLists const& lists);

// A plain block of more than TWELL_MAX_PACKED_D_FF neurons, with weights of 16 bits.
bool is_wide(twell_problem const& problem);
size_t wide_bytes(twell_problem const& problem);
cudaError_t launch_wide(Call const& call, void* workspace);

// The rows of the configurations, a line each.
void list_features(Text& text);

}  // namespace twell

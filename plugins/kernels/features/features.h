// Features of a row: its active neurons with g, as lists; what they decode to; and plain blocks of more neurons than
// the packed format counts, which are both, piece by piece.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// Bytes of workspace of launch_encode. keeps_all: no tile overflows.
size_t encode_bytes(twell_problem const& problem, bool keeps_all);

// Where lists go: of row r from offsets[r] up to offsets[r + 1], and behind the offsets how many entries are missing.
struct EncodedLists {
    int32_t* indices;  // [capacity]
    uint16_t* values;
    int64_t* offsets;  // [tokens + 2]
    int64_t capacity;
};

cudaError_t launch_encode(Call const& call, bool keeps_all, EncodedLists const& lists, void* workspace);

// Where lists are: as above, or without offsets as many entries of each row, one row behind the other.
struct FeatureLists {
    int32_t const* indices;  // [capacity]
    uint16_t const* values;
    int64_t const* offsets;  // [tokens + 1] or null
    int64_t capacity;
};

cudaError_t launch_decode(Call const& call, FeatureLists const& lists);

// A plain block of more than TWELL_MAX_PACKED_D_FF neurons, with weights of 16 bits.
bool is_wide(twell_problem const& problem);
size_t wide_bytes(twell_problem const& problem);
cudaError_t launch_wide(Call const& call, void* workspace);

// The rows of the configurations, a line each.
void list_features(Text& text);

}  // namespace twell

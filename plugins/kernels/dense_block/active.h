// Which neurons of a dense block are active: what the kernel of the hidden activations leaves for the down projection.
#pragma once

#include <stdint.h>

namespace twell {

// Calls for more tokens do not ask for it.
constexpr int64_t kMostTokensSkipping = 64;

// More than a row can have of the neurons of one count.
constexpr uint32_t kMostCountedOfRow = 256;

struct Active {
    uint32_t* masks;  // [rows, num_words]: a bit for each neuron, 0 from d_ff on
    int num_words;    // for whole tiles of TWELL_TILE
    // [num_groups of rows, counts_of_group], a count for each CTA's part of a tile: active pairs of a row and a neuron,
    // times kMostCountedOfRow, plus the most that a row has. The latter, added up over a group, bounds what a row has.
    uint32_t* counted;
    int num_groups;
    int counts_of_group;
};

}  // namespace twell

// Data from the sparse up projection for the down projection: for each row a list of active neurons and their h.
#pragma once

#include <stdint.h>

#include "device/gather_rows.cuh"
#include "format/schedule.cuh"
#include "twell/twell.h"

namespace twell {

using SparseEntry = RowFactor;

// Lists, in the place of the spilled matrix: a row that has a list no longer needs its part of that.
struct SparseRows {
    unsigned char* memory;
    int64_t stride;  // bytes of a row

    __device__ __forceinline__ SparseEntry* list(int64_t row) const {
        return reinterpret_cast<SparseEntry*>(memory + row * stride);
    }
};

// The list of h of a row that needs no list of words. NOTE: not where the spilled matrix is, which is still to be read.
__device__ __forceinline__ SparseEntry* list_in_words(Schedule const& schedule, int num_tiles, int64_t row) {
    return reinterpret_cast<SparseEntry*>(schedule.words + row * max_listed(num_tiles));
}

static_assert(kListedPerTile * sizeof(SparseEntry) <= TWELL_TILE * sizeof(uint16_t),
              "a list fits a row's spilled part");

}  // namespace twell

// Packing of one row of one TwELL tile, for every gate kernel.
#pragma once

#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell {

static_assert(TWELL_TILE == kWarpSize * kVector, "a lane owns one 16-byte vector of a tile's row");

// The spilled matrix holds g densely, in the element type: [tokens, num_tiles * TWELL_TILE]. Only (row, tile)s with
// more non-zeros than this are written. A tile that overflows is one of those at any compression; of all others the
// count and the entries are one 16-byte vector.
constexpr uint32_t kMostUnspilled = 3;

// It takes packers long to write entries. So where tiles are spilled, those with kFewestUnpacked non-zeros or more have
// none if the rows that a warp packs together have kDenseTotal on average. A bit beside the count says so, and makes it
// larger than any number of slots. Single heavy rows have their entries: listing spilled tiles takes the schedule long.
constexpr int kFewestUnpacked = 8;
constexpr int kDenseTotal = 16;
constexpr uint32_t kHasNoEntries = 1u << 16;
static_assert(kFewestUnpacked > static_cast<int>(kMostUnspilled), "else no kernel would have them");

__device__ __forceinline__ uint32_t count_of(uint32_t head) { return head & (kHasNoEntries - 1); }

// The most non-zeros that are counted of each tile of a row, for the guard: so a few heavy rows do not hide many light
// ones.
constexpr uint32_t kMostCounted = 8;

// Eight neighbouring activated elements, two a word, the lower index in the low half.
struct Octet {
    uint32_t pairs[kVector / 2];
    uint32_t mask;  // bit i: the i-th is a non-zero
};

// Packs rows of a tile with one warp, several at once, since each alone would wait for its own latencies. Lane i has
// the columns from 8 i on. `words` and `spilled` are the first row's parts of those matrices, the next ones' are so
// many words or elements on; the second may be null. One lane calls count_tile(row_words, count) for a row. Only the
// first num_rows exist. Ballots tell lanes where their non-zeros go, so these come out in ascending order, without
// atomics. Gives the sum of the rows' non-zeros, of each kMostCounted at most.
template <int kRows, class CountTile>
__device__ __forceinline__ uint32_t pack_rows(Octet const (&octets)[kRows], int num_rows, uint32_t* words,
                                              int words_step, uint16_t* spilled, int spilled_step, int first_column,
                                              int num_slots, CountTile count_tile) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const lanes_below = (1u << lane) - 1;
    uint32_t masks[kRows];
    int slots[kRows] = {};  // where this lane's non-zeros go
    int totals[kRows] = {};
    uint32_t counted = 0;
    bool has_several = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        masks[r] = octets[r].mask;
        has_several |= (masks[r] & (masks[r] - 1)) != 0;
    }
    if (!__any_sync(0xffffffffu, has_several)) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            uint32_t const lanes = __ballot_sync(0xffffffffu, masks[r] != 0);
            slots[r] = __popc(lanes & lanes_below);
            totals[r] = __popc(lanes);
        }
    } else {
        // The lanes' counts, 0 to 8, are summed bit by bit: one ballot a bit, and no ballot waits for another.
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            uint32_t const count = __popc(masks[r]);
#pragma unroll
            for (int bit = 0; bit < 4; ++bit) {
                uint32_t const lanes = __ballot_sync(0xffffffffu, (count >> bit & 1) != 0);
                slots[r] += __popc(lanes & lanes_below) << bit;
                totals[r] += __popc(lanes) << bit;
            }
        }
    }
    int all = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        all += r < num_rows ? totals[r] : 0;
    }
    bool const are_dense = spilled != nullptr && all >= kRows * kDenseTotal;
    // The first lanes store a count each.
    int own_total = totals[0];
#pragma unroll
    for (int r = 1; r < kRows; ++r) {
        own_total = lane == r ? totals[r] : own_total;
    }
    if (lane < min(kRows, num_rows)) {
        uint32_t* const row_words = words + lane * words_step;
        row_words[0] =
            static_cast<uint32_t>(own_total) | (are_dense && own_total >= kFewestUnpacked ? kHasNoEntries : 0);
        count_tile(row_words, own_total);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (r >= num_rows) {
            break;
        }
        counted += min(static_cast<uint32_t>(totals[r]), kMostCounted);
        uint32_t* const row_words = words + r * words_step;
        bool const is_spilled = spilled != nullptr && totals[r] > static_cast<int>(kMostUnspilled);
        bool const has_no_entries = are_dense && totals[r] >= kFewestUnpacked;
        if (is_spilled) {
            reinterpret_cast<uint4*>(spilled + r * spilled_step)[lane] =
                make_uint4(octets[r].pairs[0], octets[r].pairs[1], octets[r].pairs[2], octets[r].pairs[3]);
        }
        if (totals[r] > num_slots || has_no_entries) {
            continue;  // no kernel reads the slots
        }
        for (; masks[r] != 0; masks[r] &= masks[r] - 1) {
            int const i = __ffs(masks[r]) - 1;
            uint32_t const low = (i & 2) != 0 ? octets[r].pairs[1] : octets[r].pairs[0];
            uint32_t const high = (i & 2) != 0 ? octets[r].pairs[3] : octets[r].pairs[2];
            uint32_t const pair = (i & 4) != 0 ? high : low;
            uint32_t const bits = (i & 1) != 0 ? pair & 0xffff0000u : pair << 16;
            row_words[1 + slots[r]] = static_cast<uint32_t>(first_column + lane * kVector + i) | bits;
            ++slots[r];
        }
    }
    return counted;
}

// The packed matrix and the spilled one, which together hold g.
struct PackedGate {
    uint32_t const* packed;  // [tokens, num_tiles * words_per_tile]
    uint16_t* spilled;       // [tokens, num_tiles * TWELL_TILE]
    int num_tiles;
    int words_per_tile;

    __device__ __forceinline__ int64_t stride() const { return static_cast<int64_t>(num_tiles) * TWELL_TILE; }

    // The count and the first entries of a tile.
    __device__ __forceinline__ uint4 const* head(int64_t row, int tile_idx) const {
        return reinterpret_cast<uint4 const*>(packed + (row * num_tiles + tile_idx) * words_per_tile);
    }
};

// Eight columns of a tile that has not been spilled, from the chunk-th eight on.
__device__ __forceinline__ uint4 expand(uint4 head, int chunk) {
    uint32_t const entries[kMostUnspilled] = {head.y, head.z, head.w};
    uint32_t pairs[kVector / 2] = {};
#pragma unroll
    for (uint32_t e = 0; e < kMostUnspilled; ++e) {
        int const column = static_cast<int>(entries[e] % TWELL_TILE);
        uint32_t const value = (column & 1) != 0 ? entries[e] & 0xffff0000u : entries[e] >> 16;
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            // NOTE: entries past the last one have not been written.
            pairs[i] |= e < head.x && column / 2 == chunk * (kVector / 2) + i ? value : 0u;
        }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace twell

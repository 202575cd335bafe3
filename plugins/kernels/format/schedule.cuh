// The order in which step 2 of many tokens takes rows, those with the most non-zeros first, and which kernel takes
// which. Written by the kernels of many_tokens/schedule/.
#pragma once

#include <stdint.h>

namespace twell {

// In device memory.
struct ScheduleHeader {
    uint32_t heavy_count;  // rows at the front of the order that take the dense path, not the sparse kernels
    uint32_t split_end;    // rows before this place of the order, that are not heavy, have kSplitNonzeros or more
    uint32_t unit_count;   // units of the sparse up projection
    uint32_t left_count;   // with chunks: rows that are sparse, but in none
    uint32_t is_early;     // 1: all rows are dense by the gate's count; then none is ordered
};

// From that many non-zeros on, several warps of the sparse down projection share a row's.
constexpr int kSplitNonzeros = 64;

// A row's place in the order.
struct RowWork {
    uint32_t row;
    uint32_t count;  // non-zeros
};

// Rows that have more non-zeros than kListedPerTile for each tile have no list, and are dense.
constexpr int kListedPerTile = 64;

// A piece of work of the sparse up projection: neighbouring non-zeros of a row.
constexpr uint32_t kUnitNonzeros = 32;
struct Unit {
    static constexpr uint32_t kIsListed = 1u << 31;

    uint32_t row;
    // The first one, a multiple of kUnitNonzeros, plus how many, less one, plus kIsListed if rows may be direct, but
    // this one has a list of words; or kNoRange.
    uint32_t range;

    __device__ __forceinline__ int begin() const { return static_cast<int>(range & ~(kUnitNonzeros - 1) & ~kIsListed); }
    __device__ __forceinline__ int count() const { return static_cast<int>(range % kUnitNonzeros) + 1; }
};
constexpr uint32_t kNoRange = 0xffffffffu;  // nothing to do

// Where a schedule lies in a piece of device memory.
struct Schedule {
    ScheduleHeader* header;
    RowWork* row_order;       // [tokens]: every row once, heaviest bucket first; in no order within a bucket
    uint32_t* place;          // [tokens]: bucket and rank of a row, see many_tokens/schedule/
    uint32_t* counts;         // [tokens]: non-zeros of a row
    uint32_t* block_buckets;  // [blocks, kBuckets]: rows of each bucket in each block of rows
    uint32_t* words;          // [tokens, max_listed]: packed words of the rows that have a list, one after the other
    Unit* units;              // [tokens * max_units]: the first unit_count count, of the heaviest rows first
    uint16_t* tile_counts;  // [tokens, num_tiles]: where rows may be direct, their non-zeros; in the place of the units
    uint32_t* counted;      // [kMostCountParts]: what the gate has counted, see many_tokens/gate/
    // Where rows may be direct: the up projection takes those with fewer non-zeros than direct_below without waiting
    // for the schedule. Those with fewer than listed_from need no list of words, since it takes them as the gate has
    // left them; their list of h is in the place of that. Buckets begin at both. Else 0.
    int direct_below;
    int listed_from;
};
constexpr int kMostDirectBelow = 512;

// The most words of a row.
__host__ __device__ inline int max_listed(int num_tiles) { return num_tiles * kListedPerTile; }

// The most units of a row.
__host__ __device__ inline int max_units(int num_tiles) {
    return max_listed(num_tiles) / static_cast<int>(kUnitNonzeros);
}
static_assert(kListedPerTile % kUnitNonzeros == 0, "max_units rounds down");

// Whether the gate's count tells that no row is for the sparse kernels. NOTE: order_kernel lets the next kernel start
// when count_kernel has ended, so that may ask before wait_for_previous_launch().
__device__ __forceinline__ bool is_early(Schedule const& schedule) { return __ldcg(&schedule.header->is_early) != 0; }

}  // namespace twell

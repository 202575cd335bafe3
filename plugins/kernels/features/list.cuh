// Lists of features out of packed and spilled tiles: of each row the active neurons in ascending order, with g.
//
// A CTA has a group: up to kTilesOfGroup tiles of a row, one a thread. Its entries come after those of the groups
// before, so a row's list is in order without atomics.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"
#include "format/pack.cuh"

namespace twell::features {

constexpr int kTilesOfGroup = 256;

// Packed matrices of pieces, one behind the other, all but the last of tiles_of_piece tiles; and spilled ones.
struct Pieces {
    uint32_t const* packed;   // of each piece [tokens, its tiles * words_per_tile]
    uint16_t const* spilled;  // of each piece [tokens, its tiles * TWELL_TILE]; or null: then tiles may overflow
    int64_t tokens;
    int num_tiles;  // of all
    int tiles_of_piece;
    int words_per_tile;

    // A tile's place among all of them.
    __device__ __forceinline__ int64_t place_of(int64_t row, int tile_idx) const {
        int const first = tile_idx / tiles_of_piece * tiles_of_piece;
        return tokens * first + row * min(tiles_of_piece, num_tiles - first) + (tile_idx - first);
    }
};

struct ListParams {
    Pieces pieces;
    int num_groups;         // of a row; a group is within a piece
    int first_neuron;       // is added to all
    int64_t* counts;        // [tokens, num_groups]: entries, -1 where a tile has overflowed; or null: not wanted
    int64_t const* begins;  // [tokens, num_groups]: where a group's entries go; null: at its number times `stride`
    int64_t stride;
    int32_t* indices;  // null: not wanted
    uint16_t* values;
};

// Entries of a tile that has spilled, by one warp.
__device__ __forceinline__ void list_spilled(ListParams const& params, int64_t place, int64_t begin, int column) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    uint4 const values = load_written_vector(params.pieces.spilled + place * TWELL_TILE + lane * kVector);
    uint32_t mask = find_nonzeros(values);
    uint32_t const own = __popc(mask);
    int64_t to = begin + sum_up_to(own) - own;
    uint32_t const pairs[kVector / 2] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if ((mask >> i & 1) != 0) {
            params.indices[to] = column + lane * kVector + i;
            params.values[to] = static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16);
            ++to;
        }
    }
}

// Four CTAs a multiprocessor: with eight, registers would be spilled on 8.0.
__global__ void __launch_bounds__(kTilesOfGroup, 4) list_kernel(ListParams const params) {
    __shared__ uint32_t totals[kTilesOfGroup / kWarpSize];
    wait_for_previous_launch();
    allow_dependent_launch();
    Pieces const& pieces = params.pieces;
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int64_t const row = blockIdx.x / static_cast<unsigned>(params.num_groups);
    int const group = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.num_groups));
    int const tile_idx = group * kTilesOfGroup + static_cast<int>(threadIdx.x);
    bool const exists = tile_idx < pieces.num_tiles;
    int64_t const place = exists ? pieces.place_of(row, tile_idx) : 0;
    uint32_t const* const words = pieces.packed + place * pieces.words_per_tile;
    uint32_t const head = exists ? words[0] : 0;
    uint32_t const count = count_of(head);
    bool const has_entries = head < static_cast<uint32_t>(pieces.words_per_tile);
    bool const is_lost = __syncthreads_or(!has_entries && pieces.spilled == nullptr) != 0;

    uint32_t const up_to = sum_up_to(count);
    if (lane == kWarpSize - 1) {
        totals[warp] = up_to;
    }
    __syncthreads();
    int64_t below = up_to - count;
    int64_t total = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
        below += w < warp ? totals[w] : 0;
        total += totals[w];
    }
    if (params.counts != nullptr && threadIdx.x == 0) {
        params.counts[blockIdx.x] = is_lost ? -1 : total;
    }
    if (params.indices == nullptr || is_lost) {
        return;
    }
    int64_t const begin = (params.begins == nullptr ? blockIdx.x * params.stride : params.begins[blockIdx.x]) + below;
    int const piece_begin = tile_idx / pieces.tiles_of_piece * pieces.tiles_of_piece * TWELL_TILE + params.first_neuron;
    if (has_entries) {
        for (uint32_t i = 0; i < count; ++i) {
            uint32_t const word = words[1 + i];
            params.indices[begin + i] = piece_begin + static_cast<int>(word & 0xffffu);
            params.values[begin + i] = static_cast<uint16_t>(word >> 16);
        }
    }
    for (uint32_t rest = __ballot_sync(0xffffffffu, !has_entries); rest != 0; rest &= rest - 1) {
        int const owner = __ffs(rest) - 1;
        list_spilled(params, __shfl_sync(0xffffffffu, place, owner), __shfl_sync(0xffffffffu, begin, owner),
                     __shfl_sync(0xffffffffu, tile_idx, owner) * TWELL_TILE + params.first_neuron);
    }
}

}  // namespace twell::features

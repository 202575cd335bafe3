// Gate projection with packing for every GPU from sm_80 on. See matmul_generic.cuh for the product.
//
// One CTA computes [BLOCK_M rows, one TwELL tile of 256 neurons] and packs it, so each (row, tile) has one writer and
// its entries come out in column order without atomics.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "format/pack.cuh"
#include "matmul/matmul_generic.cuh"

namespace twell::gate_generic {

using namespace matmul_generic;
static_assert(BLOCK_N == TWELL_TILE, "a CTA packs whole tiles");

struct Params : BlockTensors {
    uint32_t* packed;   // [tokens, num_tiles * words_per_tile]
    uint16_t* spilled;  // [tokens, num_tiles * TWELL_TILE] or null: see pack.cuh
    int64_t tokens;
    int num_tiles;
    int words_per_tile;
};

// g of this lane's eight columns; the first `count` exist. NOTE: a NaN or infinity in x makes even zero-filled weights
// give NaN, so columns outside are masked by index.
template <class Element>
__device__ __forceinline__ Octet activate_octet(uint4 z, bool square, uint4 cuts, int count) {
    uint32_t const pairs[kVector / 2] = {z.x, z.y, z.z, z.w};
    uint32_t const cuts_of_pairs[kVector / 2] = {cuts.x, cuts.y, cuts.z, cuts.w};
    Octet octet;
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
        uint32_t const mask = (2 * i < count ? 0xffffu : 0u) | (2 * i + 1 < count ? 0xffff0000u : 0u);
        octet.pairs[i] = activate_pair<Element>(pairs[i], square, cuts_of_pairs[i]) & mask;
    }
    octet.mask = find_nonzeros(make_uint4(octet.pairs[0], octet.pairs[1], octet.pairs[2], octet.pairs[3]));
    return octet;
}

// The 1: shared memory allows few blocks a multiprocessor anyway, so registers need not be saved for more.
template <class Element, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) gate_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char shared[];

    wait_for_previous_launch();
    // Tiles of one row block are neighbours in launch order, so the rows of x stay in L2 while they are reused.
    int const tile_idx = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.num_tiles));
    int64_t const row_begin = static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(params.num_tiles)) * Cfg::BLOCK_M;
    int const column_begin = tile_idx * BLOCK_N;
    int const num_rows = static_cast<int>(min(params.tokens - row_begin, static_cast<int64_t>(Cfg::BLOCK_M)));
    int const num_columns = min(params.d_ff - column_begin, BLOCK_N);
    int64_t const d_model = params.d_model;

    Accumulators<Cfg> accumulators;
    multiply<Element, Cfg, Weights::kByNeuron>(
        accumulators, shared, {params.x + row_begin * d_model, d_model, num_rows, params.d_model},
        {params.w_gate + column_begin * d_model, d_model, num_columns, params.d_model},
        (params.d_model + BLOCK_K - 1) / BLOCK_K);
    store_result<Element, Cfg>(shared, accumulators, params.b_gate == nullptr ? nullptr : params.b_gate + column_begin,
                               num_columns);

    // Epilogue: rows of the tile are activated and packed.
    int const words_per_row = params.num_tiles * params.words_per_tile;
    int const spilled_per_row = params.num_tiles * TWELL_TILE;
    uint16_t* const spilled =
        params.spilled == nullptr ? nullptr : params.spilled + row_begin * spilled_per_row + column_begin;
    uint32_t* const words = params.packed + row_begin * words_per_row + tile_idx * params.words_per_tile;
    int const own_begin = static_cast<int>(threadIdx.x) % kWarpSize * kVector;
    int const count = num_columns - own_begin;
    int const column = column_begin + own_begin;
    auto const cuts_of = [&](int i) {
        return cuts_of_pair<Element>(params.act.cut, params.act.cuts, column + 2 * i, params.d_ff);
    };
    uint4 const cuts = make_uint4(cuts_of(0), cuts_of(1), cuts_of(2), cuts_of(3));
    constexpr int kWarps = Cfg::kWarps;
    constexpr int kRowsAtOnce = Cfg::kRowsAtOnce;
    for (int begin = static_cast<int>(threadIdx.x) / kWarpSize; begin < num_rows; begin += kWarps * kRowsAtOnce) {
        Octet octets[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            octets[r] =
                activate_octet<Element>(*result_of<Cfg>(shared, begin + r * kWarps), params.act.square, cuts, count);
        }
        pack_rows(octets, (num_rows - begin + kWarps - 1) / kWarps, words + begin * words_per_row,
                  kWarps * words_per_row, spilled == nullptr ? nullptr : spilled + begin * spilled_per_row,
                  kWarps * spilled_per_row, column_begin & (TWELL_MAX_PACKED_D_FF - 1), params.words_per_tile - 1,
                  [](uint32_t const*, int) {});
    }
}

}  // namespace twell::gate_generic

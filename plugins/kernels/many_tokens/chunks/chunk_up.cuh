// Up projection of chunks: parts of x . Wu[n] over kSlabColumns columns each, for the pairs of chunk.h.
//
// A CTA holds a slab of Wu in shared memory: kSlabColumns columns of a block of neurons. Its warps take chunks: a
// lane's 16-byte pieces of the rows of x are the second operand of the tensor cores, those of the pairs' rows of Wu,
// gathered from shared memory, the first. Of the 16 x 8 products of a pair of octets those are kept that are wanted,
// one for each row of Wu; no other row or column enters a sum, so a NaN stays where it belongs, and no sum depends on
// its place.
//
// The columns of a step of the tensor cores may come in any order, if it is the same in both operands. Here lane 4 g +
// q has columns 8 q to 8 q + 7 of either half of the slab, for row g. Rows of Wu lie 128 bytes apart; lanes with
// an odd g read the second half first, so that the eight lanes that are served together hit all banks, whatever the
// rows.
#pragma once

#include "device/block.cuh"
#include "device/cp_async.cuh"
#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "format/schedule.cuh"
#include "many_tokens/chunks/chunk.h"

namespace twell::chunk_up {

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kRowBytes = kSlabColumns * static_cast<int>(sizeof(uint16_t));
constexpr int kHalfBytes = kRowBytes / 2;
// Data that a warp has under way: chunks, and behind them the pieces of x of their rows.
constexpr int kChunkStages = 4;
constexpr int kPieceStages = 2;
constexpr int kPieceBytes = kWarpSize * 2 * static_cast<int>(sizeof(uint4));
constexpr int kRingBytes = kChunkStages * kChunkFrontBytes + kPieceStages * kPieceBytes;

constexpr int shared_bytes_for(int block_neurons) { return block_neurons * kRowBytes + kWarps * kRingBytes; }

constexpr int kMostSharedBytes = shared_bytes_for(kMostBlockNeurons);
static_assert(kMostSharedBytes <= 227 * 1024, "what a CTA can have on Hopper");

struct Params : BlockTensors {
    Schedule schedule;
    Chunks chunks;
    int num_parts;  // in which the chunks of a block are shared out
};

__device__ __forceinline__ uint4 choose(bool first, uint4 a, uint4 b) {
    return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Two vectors of a row, one from either half of the slab.
struct Piece {
    uint4 low;
    uint4 high;
};

// A lane's part of a row of Wu in shared memory.
__device__ __forceinline__ Piece gather(uint32_t lane_address, uint32_t entry) {
    // NOTE: kSecondRow leaves a 32-bit address.
    uint32_t const address = lane_address + entry * kRowBytes;
    uint4 const one = load_chunk(address);
    uint4 const other = load_chunk(address ^ kHalfBytes);
    bool const even = threadIdx.x / 4 % 2 == 0;
    return {choose(even, one, other), choose(even, other, one)};
}

// products = a (rows 0 to 7), b (rows 8 to 15) times x.
template <class Element>
__device__ __forceinline__ void multiply(float (&products)[4], Piece const& a, Piece const& b, Piece const& x) {
    uint32_t const operands[4][4] = {{a.low.x, b.low.x, a.low.y, b.low.y},
                                     {a.low.z, b.low.z, a.low.w, b.low.w},
                                     {a.high.x, b.high.x, a.high.y, b.high.y},
                                     {a.high.z, b.high.z, a.high.w, b.high.w}};
    Element::mma(products, operands[0], x.low.x, x.low.y);
    Element::mma(products, operands[1], x.low.z, x.low.w);
    Element::mma(products, operands[2], x.high.x, x.high.y);
    Element::mma(products, operands[3], x.high.z, x.high.w);
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) up_kernel(Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    Chunks const& chunks = params.chunks;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const g = lane / 4;
    int const q = lane % 4;
    uint32_t const slab_address = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes));
    uint32_t const lane_address = slab_address + q * sizeof(uint4) + g % 2 * kHalfBytes;
    uint32_t const ring = slab_address + chunks.block_neurons * kRowBytes + warp * kRingBytes;
    uint32_t const pieces = ring + kChunkStages * kChunkFrontBytes + lane * sizeof(uint4);
    auto const block_of = [&](int unit) { return unit % chunks.num_blocks; };
    auto const slab_of = [&](int unit) { return unit / chunks.num_blocks % chunks.num_slabs; };
    auto const load_weights = [&](int unit) {
        int const first_neuron = block_of(unit) * chunks.block_neurons;
        int const num_neurons = min(chunks.block_neurons, params.d_ff - first_neuron);
        constexpr int kVectorsPerRow = kSlabColumns / kVector;
        uint16_t const* const w_up =
            params.w_up + static_cast<int64_t>(first_neuron) * params.d_model + slab_of(unit) * kSlabColumns;
        for (int i = threadIdx.x; i < num_neurons * kVectorsPerRow; i += kThreads) {
            copy_async(slab_address + i * sizeof(uint4),
                       w_up + static_cast<int64_t>(i / kVectorsPerRow) * params.d_model + i % kVectorsPerRow * kVector);
        }
        commit_async();
    };
    int const units = chunks.num_blocks * chunks.num_slabs * params.num_parts;
    if (ends_early(is_early(params.schedule))) {
        return;
    }
    // While chunks are built. NOTE: the launch that may have written Wu has ended, or count_kernel had let none start.
    load_weights(static_cast<int>(blockIdx.x));
    wait_for_previous_launch();
    allow_dependent_launch();
    for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
        int const block = block_of(unit);
        int const slab = slab_of(unit);
        uint32_t const part = unit / (chunks.num_blocks * chunks.num_slabs);
        uint32_t const count = __ldcg(&chunks.counts[block]);
        uint32_t const begin = static_cast<uint32_t>(static_cast<uint64_t>(count) * part / params.num_parts);
        uint32_t const end = static_cast<uint32_t>(static_cast<uint64_t>(count) * (part + 1) / params.num_parts);
        if (begin == end) {
            wait_async<0>();  // the next unit's weights go to the same place
            continue;
        }
        Chunk const* const own = chunks.chunks + static_cast<int64_t>(block) * chunks.block_capacity;
        uint32_t before = 0;  // chunks of other blocks
        for (int b = 0; b < block; ++b) {
            before += __ldcg(&chunks.counts[b]);
        }
        uint16_t const* const x = params.x + slab * kSlabColumns + q * kVector;
        float* const sums =
            chunks.sums + (static_cast<int64_t>(before) * chunks.num_slabs + slab) * kChunkPairs + q * kOctetPairs + g;
        // Past the last chunk that is copied again.
        auto const copy_chunk = [&](int stage, uint32_t chunk) {
            if (lane < kChunkFrontBytes / static_cast<int>(sizeof(uint4))) {
                copy_async(ring + stage * kChunkFrontBytes + lane * sizeof(uint4),
                           reinterpret_cast<uint4 const*>(own + min(chunk, end - 1)) + lane);
            }
        };
        auto const copy_piece = [&](int stage, uint32_t row) {
            uint16_t const* const source = x + static_cast<int64_t>(row) * params.d_model;
            copy_async(pieces + stage * kPieceBytes, source);
            copy_async(pieces + stage * kPieceBytes + kPieceBytes / 2, source + kSlabColumns / 2);
        };
        auto const row_of = [&](int stage) {
            return load_shared_word(ring + stage * kChunkFrontBytes + offsetof(Chunk, rows) + g * sizeof(uint32_t));
        };
        __syncthreads();  // the slab before has been read
        uint32_t chunk = begin + warp;
#pragma unroll
        for (int s = 0; s < kChunkStages; ++s) {
            copy_chunk(s, chunk + s * kWarps);
        }
        commit_async();
        if (unit == static_cast<int>(blockIdx.x)) {
            wait_async<0>();
        } else {
            load_weights(unit);
            wait_async<1>();
        }
        __syncwarp();
#pragma unroll
        for (int s = 0; s < kPieceStages; ++s) {
            copy_piece(s, row_of(s));
        }
        commit_async();
        wait_async<0>();
        __syncthreads();
        while (chunk < end) {
#pragma unroll
            for (int s = 0; s < kChunkStages; ++s) {
                if (chunk >= end) {
                    break;
                }
                int const piece_stage = s % kPieceStages;
                wait_async<1>();
                __syncwarp();
                uint32_t const own_chunk = ring + s * kChunkFrontBytes;
                uint4 const entries = load_chunk(own_chunk + g * sizeof(uint4));
                uint32_t const row = row_of((s + kPieceStages) % kChunkStages);
                Piece const piece = {load_chunk(pieces + piece_stage * kPieceBytes),
                                     load_chunk(pieces + piece_stage * kPieceBytes + kPieceBytes / 2)};
                __syncwarp();
                copy_piece(piece_stage, row);
                copy_chunk(s, chunk + kChunkStages * kWarps);
                commit_async();
                float products[2][4] = {};
                multiply<Element>(products[0], gather(lane_address, entries.x), gather(lane_address, entries.y), piece);
                multiply<Element>(products[1], gather(lane_address, entries.z), gather(lane_address, entries.w), piece);
                // Pair g of octet q: this lane has columns 2 q and 2 q + 1 of the products, its octet's rows.
                uint32_t const upper = q < 2 ? entries.x : entries.z;
                uint32_t const lower = q < 2 ? entries.y : entries.w;
                bool const is_second = ((q % 2 == 0 ? upper : lower) & kSecondRow) != 0;
                float const(&half)[4] = products[0];
                float const(&other)[4] = products[1];
                float const first = q < 2 ? (q == 0 ? half[0] : half[2]) : (q == 2 ? other[0] : other[2]);
                float const second = q < 2 ? (q == 0 ? half[1] : half[3]) : (q == 2 ? other[1] : other[3]);
                __stcg(sums + static_cast<int64_t>(chunk) * (chunks.num_slabs * kChunkPairs),
                       is_second ? second : first);
                chunk += kWarps;
            }
        }
        wait_async<0>();
    }
#else
    (void)params;
#endif
}

}  // namespace twell::chunk_up

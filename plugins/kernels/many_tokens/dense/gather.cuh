// Gathers the heavy rows for the dense path (dense.h), so that its products read and write neighbouring rows.
#pragma once

#include "format/pack.cuh"

namespace twell {

// From where to where. If all rows are heavy, they stay where they are: x is read there, h comes in the place of g.
struct Gather {
    PackedGate gate;    // g: what was spilled, and packed tiles
    uint16_t const* x;  // [tokens, d_model]; null in a plain block
    uint16_t* x_part;   // [heavy rows, d_model]; null in a plain block
    uint16_t* h_part;   // [heavy rows, num_tiles * TWELL_TILE]; of a plain block h is g
    int d_model;
};

namespace gather {

constexpr int kPiecesAtOnce = 4;  // of kWarpSize vectors, that a warp moves

// By one warp.
__device__ __forceinline__ void copy_vectors(uint4* destination, uint4 const* source, int count) {
    int const lane = threadIdx.x % kWarpSize;
    for (int begin = lane; begin < count; begin += kPiecesAtOnce * kWarpSize) {
        uint4 pieces[kPiecesAtOnce];
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; ++i) {
            pieces[i] = source[min(begin + i * kWarpSize, count - 1)];
        }
#pragma unroll
        for (int i = 0; i < kPiecesAtOnce; ++i) {
            if (begin + i * kWarpSize < count) {
                destination[begin + i * kWarpSize] = pieces[i];
            }
        }
    }
}

// A plain block's h, by one warp: tiles that have not been spilled are expanded, the others copied if they have to
// move.
__device__ __forceinline__ void gather_g(Gather const& params, bool all, int64_t row, int64_t position) {
    int const lane = threadIdx.x % kWarpSize;
    PackedGate const& gate = params.gate;
    uint4 const* const source = reinterpret_cast<uint4 const*>(gate.spilled + row * gate.stride()) + lane;
    uint4* const destination =
        reinterpret_cast<uint4*>(all ? gate.spilled + row * gate.stride() : params.h_part + position * gate.stride()) +
        lane;
    for (int tile_begin = 0; tile_begin < gate.num_tiles; tile_begin += kWarpSize) {
        int const tile_idx = tile_begin + lane;
        uint4 const head = tile_idx < gate.num_tiles ? *gate.head(row, tile_idx) : make_uint4(0, 0, 0, 0);
        uint32_t const inside = __ballot_sync(0xffffffffu, tile_idx < gate.num_tiles);
        uint32_t const spilled = __ballot_sync(0xffffffffu, head.x > kMostUnspilled);
        for (uint32_t rest = inside & ~spilled; rest != 0; rest &= rest - 1) {
            int const owner = __ffs(rest) - 1;
            uint4 const entries =
                make_uint4(__shfl_sync(0xffffffffu, head.x, owner), __shfl_sync(0xffffffffu, head.y, owner),
                           __shfl_sync(0xffffffffu, head.z, owner), __shfl_sync(0xffffffffu, head.w, owner));
            destination[(tile_begin + owner) * kWarpSize] = expand(entries, lane);
        }
        if (!all) {
            for (uint32_t rest = spilled; rest != 0;) {
                uint4 pieces[kPiecesAtOnce];
                int owners[kPiecesAtOnce];
                int count = 0;
#pragma unroll
                for (int i = 0; i < kPiecesAtOnce; ++i) {
                    owners[i] = rest != 0 ? __ffs(rest) - 1 : owners[0];
                    count += rest != 0 ? 1 : 0;
                    rest &= rest - 1;
                    pieces[i] = source[(tile_begin + owners[i]) * kWarpSize];
                }
#pragma unroll
                for (int i = 0; i < kPiecesAtOnce; ++i) {
                    if (i < count) {
                        destination[(tile_begin + owners[i]) * kWarpSize] = pieces[i];
                    }
                }
            }
        }
    }
}

// Whether gather_row does anything. `all`: all rows are heavy.
__device__ __forceinline__ bool is_needed(Gather const& gather, bool all) { return gather.x == nullptr || !all; }

// By one warp, for the heavy row at this position of the parts. With an up projection x is copied if it has to move;
// without one h is g, which is completed, or copied too.
__device__ __forceinline__ void gather_row(Gather const& params, bool all, int64_t row, int64_t position) {
    if (params.x == nullptr) {
        gather_g(params, all, row, position);
    } else if (!all) {
        copy_vectors(reinterpret_cast<uint4*>(params.x_part + position * params.d_model),
                     reinterpret_cast<uint4 const*>(params.x + row * params.d_model), params.d_model / kVector);
    }
}

}  // namespace gather
}  // namespace twell

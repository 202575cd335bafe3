// Up and gate projections of groups on tensor cores, the activation, and which neurons are active for any token.
#pragma once

#include <algorithm>

#include "device/element.cuh"
#include "device/load.cuh"
#include "device/vector.cuh"
#include "experts/groups.cuh"

namespace twell::experts {

// Tokens of a tile of the product, and of a vector of h.
constexpr int kTile = MMA_N;

struct Matrix {
    void const* values;
    int64_t expert_stride;  // in elements
    int64_t row_stride;
    float const* scale;   // of FP8 weights
    int scale_of_expert;  // the scale of row r of expert e at e * scale_of_expert + r * scale_of_row
    int scale_of_row;
};

struct UpParams {
    Groups groups;
    uint16_t const* x;  // [tokens, d_model]
    Matrix up;
    Matrix gate;
    float const* thresholds;  // [experts, d_ff] or null
    uint16_t* h;              // [groups, d_ff, width]
    uint16_t* masks;          // [groups, tiles of 16 neurons], a bit a neuron
    uint32_t cut;
    int d_model;
    int d_ff;
    int top;
    bool square;
    bool relu_on_up;
};

// Four elements in FP8, times a scale, in 16 bits.
template <class Element>
__device__ __forceinline__ uint2 widen4(uint32_t four, float scale = 1.0f) {
    uint2 const halves = e4m3_to_fp16(four);
    float2 const low = Fp16::to_float2(halves.x);
    float2 const high = Fp16::to_float2(halves.y);
    return make_uint2(Element::from_float2(low.x * scale, low.y * scale),
                      Element::from_float2(high.x * scale, high.y * scale));
}

// h of two activated gates.
template <class Element>
__device__ __forceinline__ uint32_t times_up(uint32_t gates, float2 u, bool relu_on_up) {
    float2 const g = Element::to_float2(gates);
    if (relu_on_up) {  // NaN is kept
        u = make_float2(u.x < 0.0f ? 0.0f : u.x, u.y < 0.0f ? 0.0f : u.y);
    }
    return Element::from_float2(g.x == 0.0f ? 0.0f : g.x * u.x, g.y == 0.0f ? 0.0f : g.y * u.y);
}

// A group's tokens times 16 or 32 neurons, by kWarps warps that share d_model: lane (r, c) of each loads 16 bytes of
// row r at a time, in an order of the columns that x has, too.
//   kTiles: of kTile tokens. kMatrices: 2 with a gate.
template <class Element, class Stored, int kMatrices, int kTiles, int kWarps>
struct Up {
    // Tiles of 16 neurons. Two of them use each value of x that was read twice. With one tile of tokens there are few
    // such values, and with eight of them there are not enough registers.
    static constexpr int kRowTiles = kTiles == 2 || (kTiles == 4 && kMatrices == 1) ? 2 : 1;
    static constexpr int kHalves = 2 * kRowTiles;                            // of eight neurons
    static constexpr int kElements = 16 / static_cast<int>(sizeof(Stored));  // of one load
    static constexpr int kPiece = 4 * kElements;                             // columns of a warp's load
    static constexpr int kWords = kElements / 2;                             // of a lane's load in 16 bits
    static constexpr int kVectors = kElements / kVector;                     // of x
    // Loads in flight, with what they are multiplied by: as many as registers allow.
    static constexpr int kRegisters = 4 * (kTiles * kVectors + kHalves * kMatrices);  // of one
    static constexpr int kDepth = std::clamp(72 / kRegisters, 1, 6);

    static __device__ __forceinline__ void widen(uint32_t (&words)[kWords], uint4 const& vector) {
        uint32_t const given[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (sizeof(Stored) == 1) {
                uint2 const two = widen4<Element>(given[i]);
                words[2 * i] = two.x;
                words[2 * i + 1] = two.y;
            } else {
                words[i] = given[i];
            }
        }
    }
};

template <class Element, class Stored, int kMatrices, int kTiles, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize) up_kernel(UpParams const params) {
    using Shape = Up<Element, Stored, kMatrices, kTiles, kWarps>;
    constexpr int kDepth = Shape::kDepth;
    constexpr int kRowTiles = Shape::kRowTiles;
    constexpr int kHalves = Shape::kHalves;
    __shared__ float parts[kWarps][kMatrices][kRowTiles][kTiles][4][kWarpSize];
    __shared__ uint32_t active[kRowTiles];
    wait_for_previous_launch();
    allow_dependent_launch();
    int const number = static_cast<int>(blockIdx.y);
    Group const group = group_of(params.groups, number);
    if (group.count == 0) {
        return;
    }
    int const warp = threadIdx.x / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    int const r = lane / 4;
    int const c = lane % 4;
    int const neuron = static_cast<int>(blockIdx.x) * kRowTiles * MMA_M + r;
    int const last = params.d_ff - 1;
    if (threadIdx.x < kRowTiles) {
        active[threadIdx.x] = 0;
    }

    Stored const* rows[kMatrices][kHalves];
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
        Matrix const& matrix = m == 0 && kMatrices == 2 ? params.gate : params.up;
        auto const* const values = static_cast<Stored const*>(matrix.values) + group.expert * matrix.expert_stride;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            rows[m][half] = values + min(neuron + half * 8, last) * matrix.row_stride;
        }
    }
    int const column = warp * Shape::kPiece + c * Shape::kElements;  // of the first load
    constexpr int kStep = kWarps * Shape::kPiece;
    uint4 ahead[kDepth][kMatrices][kHalves];
    auto const load = [&](uint4(&loaded)[kMatrices][kHalves], int at) {
#pragma unroll
        for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                loaded[m][half] = load_weights_if(rows[m][half] + at, at < params.d_model);
            }
        }
    };
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
        load(ahead[i], column + i * kStep);
    }

    uint16_t const* tokens[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        int const slot = tile * kTile + r;
        tokens[tile] = slot < group.count
                           ? params.x + static_cast<int64_t>(pair_of(params.groups, group.begin + slot) / params.top) *
                                            params.d_model
                           : nullptr;
    }
    float sums[kMatrices][kRowTiles][kTiles][4] = {};
    for (int first = column; first - c * Shape::kElements < params.d_model; first += kDepth * kStep) {
        uint4 x[kDepth][kTiles][Shape::kVectors];
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int v = 0; v < Shape::kVectors; ++v) {
                    int const at = first + i * kStep + v * kVector;
                    x[i][tile][v] =
                        load_written_vector_if(tokens[tile] + at, tokens[tile] != nullptr && at < params.d_model);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            uint32_t words[kMatrices][kHalves][Shape::kWords];
#pragma unroll
            for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    Shape::widen(words[m][half], ahead[i][m][half]);
                }
            }
            load(ahead[i], first + (kDepth + i) * kStep);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int v = 0; v < Shape::kVectors; ++v) {
                    uint4 const b = x[i][tile][v];
#pragma unroll
                    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
                        for (int row = 0; row < kRowTiles; ++row) {
                            uint32_t const(&first)[Shape::kWords] = words[m][2 * row];
                            uint32_t const(&second)[Shape::kWords] = words[m][2 * row + 1];
                            int const w = 4 * v;
                            uint32_t const low[4] = {first[w], second[w], first[w + 1], second[w + 1]};
                            uint32_t const high[4] = {first[w + 2], second[w + 2], first[w + 3], second[w + 3]};
                            Element::mma(sums[m][row][tile], low, b.x, b.y);
                            Element::mma(sums[m][row][tile], high, b.z, b.w);
                        }
                    }
                }
            }
        }
    }

#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
#pragma unroll
        for (int row = 0; row < kRowTiles; ++row) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    parts[warp][m][row][tile][j][lane] = sums[m][row][tile][j];
                }
            }
        }
    }
    __syncthreads();
    for (int i = warp; i < kRowTiles * kTiles; i += kWarps) {
        int const row_tile = i / kTiles;
        int const tile = i % kTiles;
        uint32_t found = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const row = neuron + row_tile * MMA_M + half * 8;
            int const in = min(row, last);
            float2 z[kMatrices];
#pragma unroll
            for (int m = 0; m < kMatrices; ++m) {
                z[m] = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int w = 0; w < kWarps; ++w) {
                    z[m].x += parts[w][m][row_tile][tile][2 * half][lane];
                    z[m].y += parts[w][m][row_tile][tile][2 * half + 1][lane];
                }
                if constexpr (sizeof(Stored) == 1) {
                    Matrix const& matrix = m == 0 && kMatrices == 2 ? params.gate : params.up;
                    float const scale = __ldg(matrix.scale + int64_t{group.expert} * matrix.scale_of_expert +
                                              int64_t{in} * matrix.scale_of_row);
                    z[m].x *= scale;
                    z[m].y *= scale;
                }
            }
            float const* const cuts =
                params.thresholds == nullptr ? nullptr : params.thresholds + int64_t{group.expert} * params.d_ff;
            uint32_t pair =
                activate2<Element>(z[0].x, z[0].y, params.square, cut_of<Element>(params.cut, cuts, in, params.d_ff));
            if constexpr (kMatrices == 2) {
                pair = times_up<Element>(pair, z[1], params.relu_on_up);
            }
            pair = row < params.d_ff ? pair : 0;
            if (row < params.d_ff) {
                int64_t const at = (int64_t{number} * params.d_ff + row) * (kTiles * kTile) + tile * kTile + 2 * c;
                *reinterpret_cast<uint32_t*>(params.h + at) = pair;
            }
            uint32_t const lanes = __ballot_sync(kAllLanes, pair != 0);
            uint32_t const neurons = __ballot_sync(kAllLanes, lane < 8 && (lanes >> (4 * (lane & 7)) & 0xfu) != 0);
            found |= neurons << (8 * half);
        }
        if (lane == 0) {
            atomicOr(active + row_tile, found);
        }
    }
    __syncthreads();
    int const mask = static_cast<int>(blockIdx.x) * kRowTiles + static_cast<int>(threadIdx.x);
    int const num_masks = (params.d_ff + MMA_M - 1) / MMA_M;
    if (threadIdx.x < kRowTiles && mask < num_masks) {
        params.masks[int64_t{number} * num_masks + mask] = static_cast<uint16_t>(active[threadIdx.x]);
    }
}

}  // namespace twell::experts

// Down projections of groups on tensor cores: rows of w_down of neurons that are active for any token of the group.
#pragma once

#include "device/element.cuh"
#include "device/load.cuh"
#include "device/vector.cuh"
#include "experts/groups.cuh"
#include "experts/up.cuh"

namespace twell::experts {

struct DownParams {
    Groups groups;
    Matrix down;            // its scale: of row or of column, below
    uint16_t const* h;      // [groups, d_ff, width]
    uint16_t const* masks;  // [groups, tiles of 16 neurons]
    float const* weights;   // [pairs]
    float* y;               // [pairs, d_out]: of each pair
    int d_ff;
    int d_out;
    int scale_of_column;  // 1: of FP8 weights, at e * scale_of_expert + column
};

constexpr int kDownThreads = 256;
constexpr int kDownWarps = kDownThreads / kWarpSize;
constexpr int kWarpOut = 64;  // columns of a warp: 8 lanes with 8 each
constexpr int kNeurons = 16;  // of a step: 4 lanes with 4 each
constexpr int kPadding = 16;  // elements of a row of h in shared memory: lanes read 8 bytes from different banks
constexpr int kSums = 32;     // of a lane and 16 tokens

// kTiles: of kTile tokens. kColumnWarps: warps with columns of their own, 64 each; the others share neurons.
template <int kTiles, int kColumnWarps>
struct Down {
    static constexpr int kWidth = kTiles * kTile;
    static constexpr int kProducts = (kTiles + 1) / 2;  // of 16 tokens
    static constexpr int kRows = kProducts * MMA_M;
    static constexpr int kShares = kDownWarps / kColumnWarps;
    static constexpr int kListed = kTiles <= 2 ? 1024 : 256;  // neurons whose h is in shared memory at once
    static constexpr int kPitch = kListed + kPadding;
    // Steps whose rows are in flight.
    static constexpr int kDepth = kTiles <= 2 ? 3 : kTiles == 4 ? 2 : 1;
    static constexpr int kHiddenBytes = kWidth * kPitch * 2;
    static constexpr int kSumBytes = kDownWarps * kSums * kWarpSize * 4;
    static constexpr int kScratchBytes = kHiddenBytes > kSumBytes ? kHiddenBytes : kSumBytes;

    static int shared_bytes(int d_ff) { return kScratchBytes + (d_ff + 15) / 16 * 16 * 2; }
};

template <class Element, class Stored>
__device__ __forceinline__ float element_of(Stored const* pointer) {
    if constexpr (sizeof(Stored) == 1) {
        return Fp16::to_float(static_cast<uint16_t>(e4m3_to_fp16_pair(pointer->bits)));
    } else {
        return Element::to_float(*pointer);
    }
}

// A sum again, of the neurons that are active for a token alone: tokens of a group multiply what others need, and
// 0 * infinity is NaN.
//   h: of the token's first neuron; step: from one neuron to the next.
template <class Element, class Stored>
__device__ __forceinline__ float sum_of_active(DownParams const& params, int64_t expert, uint16_t const* h, int step,
                                               int column) {
    auto const* const values =
        static_cast<Stored const*>(params.down.values) + expert * params.down.expert_stride + column;
    float sum = 0.0f;
#pragma unroll 1
    for (int neuron = 0; neuron < params.d_ff; ++neuron) {
        float const active = Element::to_float(__ldcg(h + int64_t{neuron} * step));
        if (active != 0.0f) {
            float weight = element_of<Element>(values + neuron * params.down.row_stride);
            if constexpr (sizeof(Stored) == 1) {
                if (params.down.scale_of_row != 0) {
                    weight *= __ldg(params.down.scale + expert * params.down.scale_of_expert + neuron);
                }
            }
            sum = fmaf(active, weight, sum);
        }
    }
    return sum;
}

template <class Element, class Stored, int kTiles, int kColumnWarps>
__global__ void __launch_bounds__(kDownThreads) down_kernel(DownParams const params) {
    using Shape = Down<kTiles, kColumnWarps>;
    constexpr int kWidth = Shape::kWidth;
    constexpr int kShares = Shape::kShares;
    // Scales take registers, too.
    constexpr int kDepth = sizeof(Stored) == 1 && Shape::kDepth > 2 ? 2 : Shape::kDepth;
    constexpr int kPitch = Shape::kPitch;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ uint32_t of_warps[kDownWarps];
    auto* const hidden = reinterpret_cast<uint16_t*>(memory);  // [kWidth, kPitch]
    auto* const sums_of_warps = reinterpret_cast<float*>(memory);
    auto* const list = reinterpret_cast<uint16_t*>(memory + Shape::kScratchBytes);
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
    int const share = warp / kColumnWarps;

    // The list of active neurons.
    int const num_masks = (params.d_ff + MMA_M - 1) / MMA_M;
    int num_active = 0;
    for (int first = 0; first < num_masks; first += kDownThreads) {
        int const i = first + static_cast<int>(threadIdx.x);
        uint32_t mask = i < num_masks ? __ldcg(params.masks + int64_t{number} * num_masks + i) : 0;
        uint2 const before = sum_before<kDownThreads>(__popc(mask), of_warps);
        int at = num_active + static_cast<int>(before.x);
        for (; mask != 0; mask &= mask - 1) {
            list[at++] = static_cast<uint16_t>(i * MMA_M + __ffs(static_cast<int>(mask)) - 1);
        }
        num_active += static_cast<int>(before.y);
    }
    __syncthreads();

    int const first_column = (static_cast<int>(blockIdx.x) * kColumnWarps + warp % kColumnWarps) * kWarpOut;
    int const column = first_column + r * kVector;
    auto const* const rows =
        static_cast<Stored const*>(params.down.values) + group.expert * params.down.expert_stride + column;
    bool const has_column = column < params.d_out;
    float const* const scales =
        sizeof(Stored) == 1 ? params.down.scale + int64_t{group.expert} * params.down.scale_of_expert : nullptr;
    float sums[Shape::kProducts][8][4] = {};
    for (int first = 0; first < num_active; first += Shape::kListed) {
        int const listed = min(Shape::kListed, num_active - first);
        Vector<Stored> ahead[kDepth][4];
        float ahead_scales[kDepth][4];
        auto const load = [&](int slot, int step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int const at = step * kNeurons + c * 4 + i;
                bool const exists = at < listed && has_column;
                int const neuron = exists ? list[first + at] : 0;
                auto const* const row = rows + neuron * params.down.row_stride;
                if constexpr (sizeof(Stored) == 1) {
                    ahead[slot][i] = half_weights_if(row, exists);
                    ahead_scales[slot][i] = params.down.scale_of_row != 0 ? __ldg(scales + neuron) : 1.0f;
                } else {
                    ahead[slot][i] = load_weights_if(row, exists);
                }
            }
        };
#pragma unroll
        for (int i = 0; i < kDepth; ++i) {
            load(i, share + i * kShares);
        }
        // h of the listed neurons, token by token.
        int const rounded = (listed + kNeurons - 1) / kNeurons * kNeurons;
        for (int i = threadIdx.x; i < rounded; i += kDownThreads) {
            uint16_t const* const of_neuron =
                params.h + (int64_t{number} * params.d_ff + (i < listed ? list[first + i] : 0)) * kWidth;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                uint4 const eight =
                    i < listed ? __ldcg(reinterpret_cast<uint4 const*>(of_neuron + tile * kTile)) : uint4{};
                uint32_t const words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                for (int k = 0; k < kTile; ++k) {
                    hidden[(tile * kTile + k) * kPitch + i] = static_cast<uint16_t>(words[k / 2] >> (16 * (k % 2)));
                }
            }
        }
        __syncthreads();
        int const num_steps = rounded / kNeurons;
        for (int step0 = share; step0 < num_steps; step0 += kDepth * kShares) {
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                int const step = step0 + i * kShares;
                if (step < num_steps) {  // the same for all lanes of a warp
                    uint32_t w[4][4];
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        if constexpr (sizeof(Stored) == 1) {
                            float const scale = ahead_scales[i][k];
                            uint2 const low = widen4<Element>(ahead[i][k].x, scale);
                            uint2 const high = widen4<Element>(ahead[i][k].y, scale);
                            w[k][0] = low.x, w[k][1] = low.y, w[k][2] = high.x, w[k][3] = high.y;
                        } else {
                            uint4 const v = ahead[i][k];
                            w[k][0] = v.x, w[k][1] = v.y, w[k][2] = v.z, w[k][3] = v.w;
                        }
                    }
                    load(i, step + kDepth * kShares);
                    uint32_t a[Shape::kProducts][4];
#pragma unroll
                    for (int p = 0; p < Shape::kProducts; ++p) {
                        uint16_t const* const at = hidden + (p * MMA_M + r) * kPitch + step * kNeurons + c * 4;
                        uint2 const low = *reinterpret_cast<uint2 const*>(at);
                        uint2 high = make_uint2(0, 0);
                        if (p * 2 + 1 < kTiles) {
                            high = *reinterpret_cast<uint2 const*>(at + 8 * kPitch);
                        }
                        a[p][0] = low.x, a[p][1] = high.x, a[p][2] = low.y, a[p][3] = high.y;
                    }
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        uint32_t const selector = j % 2 == 0 ? 0x5410u : 0x7632u;
                        uint32_t const b0 = __byte_perm(w[0][j / 2], w[1][j / 2], selector);
                        uint32_t const b1 = __byte_perm(w[2][j / 2], w[3][j / 2], selector);
#pragma unroll
                        for (int p = 0; p < Shape::kProducts; ++p) {
                            Element::mma(sums[p][j], a[p], b0, b1);
                        }
                    }
                }
            }
        }
        __syncthreads();
    }

    // Sums of the shares, in their order. Lane (r, c) has tokens r and r + 8, and columns 16 c to 16 c + 15.
    constexpr int kOfShare = kSums / kShares;
    static_assert(kOfShare % 4 == 0, "a lane stores four columns at once");
#pragma unroll
    for (int p = 0; p < Shape::kProducts; ++p) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sums_of_warps[(warp * kSums + q * 8 + j) * kWarpSize + lane] = sums[p][j][q];
            }
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < kOfShare; k += 4) {
            int const sum = share * kOfShare + k;  // its quarter: the token, and which eight columns
            int const quarter = sum / 8;
            int const token = p * MMA_M + r + 8 * (quarter / 2);
            int const out = first_column + 16 * c + 8 * (quarter % 2) + sum % 8;
            float values[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int s = 0; s < kShares; ++s) {
                    int const from = s * kColumnWarps + warp % kColumnWarps;
                    values[i] += sums_of_warps[(from * kSums + sum + i) * kWarpSize + lane];
                }
            }
            if (token < group.count && out < params.d_out) {
                int const pair = pair_of(params.groups, group.begin + token);
                float const weight = __ldg(params.weights + pair);
                bool are_finite = true;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    are_finite = are_finite && isfinite(values[i]);
                }
                if (!are_finite) {  // 0 * infinity of a neuron that is active for another token?
#pragma unroll 1
                    for (int k = 0; k < 4; ++k) {
                        float const again = sum_of_active<Element, Stored>(
                            params, group.expert, params.h + int64_t{number} * params.d_ff * kWidth + token, kWidth,
                            out + k);
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            values[i] = i == k && !isfinite(values[i]) ? again : values[i];
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if constexpr (sizeof(Stored) == 1) {
                        if (params.down.scale_of_row == 0) {
                            values[i] *= __ldg(scales + (out + i) * params.scale_of_column);
                        }
                    }
                    values[i] *= weight;
                }
                *reinterpret_cast<float4*>(params.y + int64_t{pair} * params.d_out + out) =
                    make_float4(values[0], values[1], values[2], values[3]);
            }
        }
        __syncthreads();
    }
}

struct AddParams {
    Ids ids;
    float const* y_of_pairs;  // [tokens * top, d_out]
    uint16_t* y;              // [tokens, d_out]
    int top;
    int d_out;
};

constexpr int kAddThreads = 128;

// y of a token: the sum over its experts, in their order.
template <class Element>
__global__ void __launch_bounds__(kAddThreads) add_kernel(AddParams const params) {
    wait_for_previous_launch();
    allow_dependent_launch();
    int const token = static_cast<int>(blockIdx.x);
    int const column = (static_cast<int>(blockIdx.y) * kAddThreads + static_cast<int>(threadIdx.x)) * kVector;
    if (column >= params.d_out) {
        return;
    }
    float sums[kVector] = {};
    for (int i = 0; i < params.top; ++i) {
        int const pair = token * params.top + i;
        if (expert_of(params.ids, pair) >= 0) {
            auto const* const from =
                reinterpret_cast<float4 const*>(params.y_of_pairs + int64_t{pair} * params.d_out + column);
            float4 const low = __ldcg(from);
            float4 const high = __ldcg(from + 1);
            float const values[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sums[k] += values[k];
            }
        }
    }
    store_vector<Element>(params.y + int64_t{token} * params.d_out + column, sums);
}

}  // namespace twell::experts

// Experts with many tokens, where hardly a row of w_down is one that no token needs: dense products of groups, for
// every GPU from sm_80 on.
#pragma once

#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/load.cuh"
#include "device/shared.cuh"
#include "experts/down.cuh"
#include "experts/up.cuh"

namespace twell::experts {

constexpr int kManyThreads = 256;
constexpr int kManyWarpsN = 4;
constexpr int kManyWarpsM = kManyThreads / kWarpSize / kManyWarpsN;

// kM: tokens of a tile, and of a group. Rows of 16 bytes of a tile are in different banks.
template <int kM>
struct Many {
    static constexpr int kN = 128;  // columns: neurons, with one each for gate and up, or outputs
    static constexpr int kK = 32;
    static constexpr int kStages = 4;
    static constexpr int kPitch = kK * 2 + 16;      // of tokens, and of neurons
    static constexpr int kWidePitch = kN * 2 + 16;  // of rows of w_down
    static constexpr int kTokenBytes = kM * kPitch;
    static constexpr int kStageBytes = kTokenBytes + kN * kPitch;
    static constexpr int kWarpM = kM / kManyWarpsM;
    static constexpr int kWarpN = kN / kManyWarpsN;
    static constexpr int kTilesM = kWarpM / MMA_M;
    static constexpr int kTilesN = kWarpN / MMA_N;
    static_assert(kK * kWidePitch <= kN * kPitch, "a slice of w_down has the place of one of w_up");
};

// Elements of a row of h, which ends in zeros.
__host__ __device__ constexpr int many_pitch(int d_ff) { return (d_ff + 15) / 16 * 16; }

// The row of a tile of w_gate and w_up that a column of it is: eight of one, eight of the other.
template <int kMatrices>
__device__ __forceinline__ int neuron_of(int column) {
    return kMatrices == 2 ? column / 16 * 8 + column % 8 : column;
}

// kMatrices: 1, or 2 with a gate, and 0 for the down projection.
template <class Element, class Stored, int kMatrices, int kM>
__device__ __forceinline__ void multiply_group(float (&sums)[Many<kM>::kTilesM][Many<kM>::kTilesN][4],
                                               unsigned char* memory, uint16_t const* const (&tokens)[kM / 64],
                                               Matrix const& first_matrix, Matrix const& second_matrix, int expert,
                                               int first, int rows, int columns) {
    using Shape = Many<kM>;
    constexpr bool kIsDown = kMatrices == 0;
    constexpr int kCopies = kM / 64;
    uint32_t const base = shared_address(memory);
    int const thread = static_cast<int>(threadIdx.x);
    int const lane = thread % kWarpSize;
    int const warp_m = thread / kWarpSize / kManyWarpsN;
    int const warp_n = thread / kWarpSize % kManyWarpsN;
    int const depth = kIsDown ? rows : columns;  // of the sums
    auto const* const first_values =
        static_cast<Stored const*>(first_matrix.values) + expert * first_matrix.expert_stride;
    auto const* const second_values =
        static_cast<Stored const*>(second_matrix.values) + expert * second_matrix.expert_stride;
    // Where vector `index` of a slice of weights lies, how many elements it has, and whether it is there.
    constexpr int kElements = 16 / static_cast<int>(sizeof(Stored));
    constexpr int kInRow = (kIsDown ? Shape::kN : Shape::kK) / kElements;
    constexpr int kVectors = Shape::kN * Shape::kK / kElements / kManyThreads;
    auto const find = [&](int index, int at, Stored const*& source, uint32_t& destination) {
        int const row = index / kInRow;
        int const in_row = index % kInRow * kElements;
        if constexpr (kIsDown) {
            bool const exists = at + row < rows && first + in_row < columns;
            source = first_values + (exists ? (at + row) * first_matrix.row_stride + first + in_row : 0);
            destination = row * Shape::kWidePitch + in_row * 2;
            return exists;
        } else {
            bool const is_second = kMatrices == 2 && row / 8 % 2 == 1;
            int const neuron = first + neuron_of<kMatrices>(row);
            bool const exists = neuron < rows && at + in_row < columns;
            source = (is_second ? second_values : first_values) +
                     (exists ? neuron * (is_second ? second_matrix : first_matrix).row_stride + at + in_row : 0);
            destination = row * Shape::kPitch + in_row * 2;
            return exists;
        }
    };
    uint4 held[kVectors];  // of FP8 weights, on their way
    auto const load = [&](int slice) {
        int const at = slice * Shape::kK;
        uint32_t const stage = base + slice % Shape::kStages * Shape::kStageBytes;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            int const in_row = at + thread % 4 * kVector;
            // h has zeros behind its d_ff.
            bool const exists = tokens[i] != nullptr && in_row < (kIsDown ? many_pitch(depth) : depth);
            copy_async(stage + (thread / 4 + i * 64) * Shape::kPitch + thread % 4 * 16,
                       exists ? tokens[i] + in_row : nullptr, exists);
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            Stored const* source;
            uint32_t destination;
            bool const exists = find(i * kManyThreads + thread, at, source, destination);
            if constexpr (sizeof(Stored) == 1) {
                held[i] = load_weights_if(source, exists);
            } else {
                copy_async(stage + Shape::kTokenBytes + destination, source, exists);
            }
        }
    };
    auto const store_held = [&](int slice) {
        if constexpr (sizeof(Stored) == 1) {
            int const at = slice * Shape::kK;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                Stored const* source;
                uint32_t destination;
                int const index = i * kManyThreads + thread;
                bool const exists = find(index, at, source, destination);
                float scale = 1.0f;
                if constexpr (kIsDown) {
                    if (first_matrix.scale_of_row != 0 && exists) {
                        scale = __ldg(first_matrix.scale + int64_t{expert} * first_matrix.scale_of_expert + at +
                                      index / kInRow);
                    }
                }
                uint2 const a = widen4<Element>(held[i].x, scale);
                uint2 const b = widen4<Element>(held[i].y, scale);
                uint2 const c = widen4<Element>(held[i].z, scale);
                uint2 const d = widen4<Element>(held[i].w, scale);
                auto* const to = reinterpret_cast<uint4*>(memory + slice % Shape::kStages * Shape::kStageBytes +
                                                          Shape::kTokenBytes + destination);
                to[0] = make_uint4(a.x, a.y, b.x, b.y);
                to[1] = make_uint4(c.x, c.y, d.x, d.y);
            }
        }
    };
    int const slices = (depth + Shape::kK - 1) / Shape::kK;
#pragma unroll
    for (int i = 0; i < Shape::kStages - 1; ++i) {
        if (i < slices) {
            load(i);
            store_held(i);
        }
        commit_async();
    }
    for (int slice = 0; slice < slices; ++slice) {
        wait_async<Shape::kStages - 2>();
        __syncthreads();
        int const ahead = slice + Shape::kStages - 1;
        if (ahead < slices) {
            load(ahead);
        }
        commit_async();
        uint32_t const stage = base + slice % Shape::kStages * Shape::kStageBytes;
#pragma unroll
        for (int k = 0; k < Shape::kK / MMA_K; ++k) {
            uint32_t a[Shape::kTilesM][4];
#pragma unroll
            for (int i = 0; i < Shape::kTilesM; ++i) {
                int const row = warp_m * Shape::kWarpM + i * MMA_M + lane % 16;
                load_matrix_x4<false>(a[i], stage + row * Shape::kPitch + k * 32 + lane / 16 * 16);
            }
            uint32_t const weights = stage + Shape::kTokenBytes;
#pragma unroll
            for (int j = 0; j < Shape::kTilesN; j += 2) {
                int const column = warp_n * Shape::kWarpN + j * MMA_N;
                uint32_t b[4];
                if constexpr (kIsDown) {
                    load_matrix_x4<true>(
                        b, weights + (k * MMA_K + lane % 16) * Shape::kWidePitch + (column + lane / 16 * 8) * 2);
                } else {
                    load_matrix_x4<false>(
                        b, weights + (column + lane / 16 * 8 + lane % 8) * Shape::kPitch + k * 32 + lane / 8 % 2 * 16);
                }
#pragma unroll
                for (int i = 0; i < Shape::kTilesM; ++i) {
                    Element::mma(sums[i][j], a[i], b[0], b[1]);
                    Element::mma(sums[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
        if (ahead < slices) {
            store_held(ahead);
        }
    }
    wait_async<0>();
}

template <class Element, class Stored, int kMatrices, int kM>
__global__ void __launch_bounds__(kManyThreads, 2) many_up_kernel(UpParams const params) {
    using Shape = Many<kM>;
    extern __shared__ __align__(16) unsigned char memory[];
    wait_for_previous_launch();
    allow_dependent_launch();
    Group const group = group_of(params.groups, static_cast<int>(blockIdx.y));
    if (group.count == 0) {
        return;
    }
    int const thread = static_cast<int>(threadIdx.x);
    int const first = static_cast<int>(blockIdx.x) * Shape::kN / kMatrices;
    uint16_t const* tokens[kM / 64];
#pragma unroll
    for (int i = 0; i < kM / 64; ++i) {
        int const slot = thread / 4 + i * 64;
        tokens[i] = slot < group.count
                        ? params.x + static_cast<int64_t>(pair_of(params.groups, group.begin + slot) / params.top) *
                                         params.d_model
                        : nullptr;
    }
    float sums[Shape::kTilesM][Shape::kTilesN][4] = {};
    multiply_group<Element, Stored, kMatrices, kM>(sums, memory, tokens, kMatrices == 2 ? params.gate : params.up,
                                                   params.up, group.expert, first, params.d_ff, params.d_model);
    int const lane = thread % kWarpSize;
    int const warp_m = thread / kWarpSize / kManyWarpsN;
    int const warp_n = thread / kWarpSize % kManyWarpsN;
    int const pitch = many_pitch(params.d_ff);
    float const* const cuts =
        params.thresholds == nullptr ? nullptr : params.thresholds + int64_t{group.expert} * params.d_ff;
#pragma unroll
    for (int j = 0; j < Shape::kTilesN; j += kMatrices) {
        int const neuron = first + neuron_of<kMatrices>(warp_n * Shape::kWarpN + j * MMA_N) + 2 * (lane % 4);
        if (neuron >= pitch) {
            continue;
        }
#pragma unroll
        for (int i = 0; i < Shape::kTilesM; ++i) {
            uint32_t of_neurons[2];  // of two tokens each
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int const in = min(neuron + k, params.d_ff - 1);
                float2 z = make_float2(sums[i][j][k], sums[i][j][k + 2]);
                float2 u = make_float2(sums[i][j + kMatrices - 1][k], sums[i][j + kMatrices - 1][k + 2]);
                if constexpr (sizeof(Stored) == 1) {
                    Matrix const& matrix = kMatrices == 2 ? params.gate : params.up;
                    float const scale = __ldg(matrix.scale + int64_t{group.expert} * matrix.scale_of_expert +
                                              int64_t{in} * matrix.scale_of_row);
                    z.x *= scale, z.y *= scale;
                    float const scale_of_up =
                        __ldg(params.up.scale + int64_t{group.expert} * params.up.scale_of_expert +
                              int64_t{in} * params.up.scale_of_row);
                    u.x *= scale_of_up, u.y *= scale_of_up;
                }
                uint32_t pair =
                    activate2<Element>(z.x, z.y, params.square, cut_of<Element>(params.cut, cuts, in, params.d_ff));
                if constexpr (kMatrices == 2) {
                    pair = times_up<Element>(pair, u, params.relu_on_up);
                }
                of_neurons[k] = neuron + k < params.d_ff ? pair : 0;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const slot = warp_m * Shape::kWarpM + i * MMA_M + half * 8 + lane / 4;
                if (slot < group.count) {
                    *reinterpret_cast<uint32_t*>(params.h + int64_t{group.begin + slot} * pitch + neuron) =
                        __byte_perm(of_neurons[0], of_neurons[1], half == 0 ? 0x5410u : 0x7632u);
                }
            }
        }
    }
}

// The factor of a sum of FP8 weights; 1 if each term had one.
__device__ __forceinline__ float scale_of_output(DownParams const& params, int expert, int column) {
    return params.down.scale_of_row != 0 ? 1.0f
                                         : __ldg(params.down.scale + int64_t{expert} * params.down.scale_of_expert +
                                                 int64_t{column} * params.scale_of_column);
}

template <class Element, class Stored, int kM>
__global__ void __launch_bounds__(kManyThreads, 2) many_down_kernel(DownParams const params) {
    using Shape = Many<kM>;
    extern __shared__ __align__(16) unsigned char memory[];
    wait_for_previous_launch();
    allow_dependent_launch();
    Group const group = group_of(params.groups, static_cast<int>(blockIdx.y));
    if (group.count == 0) {
        return;
    }
    int const thread = static_cast<int>(threadIdx.x);
    int const first = static_cast<int>(blockIdx.x) * Shape::kN;
    int const pitch = many_pitch(params.d_ff);
    uint16_t const* tokens[kM / 64];
#pragma unroll
    for (int i = 0; i < kM / 64; ++i) {
        int const slot = thread / 4 + i * 64;
        tokens[i] = slot < group.count ? params.h + int64_t{group.begin + slot} * pitch : nullptr;
    }
    float sums[Shape::kTilesM][Shape::kTilesN][4] = {};
    multiply_group<Element, Stored, 0, kM>(sums, memory, tokens, params.down, params.down, group.expert, first,
                                           params.d_ff, params.d_out);
    int const lane = thread % kWarpSize;
    int const warp_m = thread / kWarpSize / kManyWarpsN;
    int const warp_n = thread / kWarpSize % kManyWarpsN;
    int const column = first + warp_n * Shape::kWarpN + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < Shape::kTilesM; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int const slot = warp_m * Shape::kWarpM + i * MMA_M + half * 8 + lane / 4;
            if (slot >= group.count) {
                continue;
            }
            int const pair = pair_of(params.groups, group.begin + slot);
            float const weight = __ldg(params.weights + pair);
            float* const y = params.y + int64_t{pair} * params.d_out;
            bool are_finite = true;
#pragma unroll
            for (int j = 0; j < Shape::kTilesN; ++j) {
                int const at = column + j * MMA_N;
                if (at < params.d_out) {
                    float2 values = make_float2(sums[i][j][2 * half] * weight, sums[i][j][2 * half + 1] * weight);
                    if constexpr (sizeof(Stored) == 1) {
                        values.x *= scale_of_output(params, group.expert, at);
                        values.y *= scale_of_output(params, group.expert, at + 1);
                    }
                    are_finite = are_finite && isfinite(values.x) && isfinite(values.y);
                    *reinterpret_cast<float2*>(y + at) = values;
                }
            }
            if (!are_finite) {
#pragma unroll 1
                for (int j = 0; j < 2 * Shape::kTilesN; ++j) {
                    int const at = column + j / 2 * MMA_N + j % 2;
                    if (at < params.d_out && !isfinite(y[at])) {
                        uint16_t const* const h = params.h + int64_t{group.begin + slot} * pitch;
                        y[at] = weight * sum_of_active<Element, Stored>(params, group.expert, h, 1, at);
                        if constexpr (sizeof(Stored) == 1) {
                            y[at] *= scale_of_output(params, group.expert, at);
                        }
                    }
                }
            }
        }
    }
}

}  // namespace twell::experts

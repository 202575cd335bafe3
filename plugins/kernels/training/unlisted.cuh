// Rows that are not listed, as their pairs have found no place: everything is computed again, row by row. Slow, and
// there to be right: twellc/plugins/training.py gives enough place for them to be rare.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "training/add_rows.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kUnlistedWarps = 8;
constexpr int kUnlistedThreads = kUnlistedWarps * kWarpSize;
constexpr int kUnlistedColumns = kUnlistedThreads * kVector;
constexpr int kUnlistedRows = 64;  // whose pairs with a neuron are computed at once
constexpr int kUnlistedLoads = 2;

struct UnlistedParams : TrainingBlock {
    Pairs pairs;
    uint16_t const* dy;
    float const* dl1;
    float2* factors;             // [CTAs, d_ff]: of a forward h, of a backward du and dz
    uint16_t const* addends[2];  // [tokens, width] or null
    uint16_t* out;               // y of a forward, dx of a backward
    float* row_l1;
    WeightGradients gradients;
};

// By one warp; all zeros if the neuron is not active. A forward leaves du and dz out.
template <class Element, bool kGated, bool kBackward>
__device__ __forceinline__ PairGradients compute_pair(UnlistedParams const& params, int64_t row, uint32_t neuron) {
    auto const bias_of = [](uint16_t const* bias, int64_t n) {
        return bias == nullptr ? 0.0f : Element::to_float(bias[n]);
    };
    int64_t const gate = params.gate_row_of(neuron);
    uint16_t const* const x = params.x + row * params.d_model;
    float const z = dot_row<Element, kUnlistedLoads>(x, params.w_gate + gate * params.d_model, params.d_model);
    uint16_t const bits = activate<Element>(z + bias_of(params.b_gate, gate), params.act.square, params.act.cut);
    if (!is_nonzero(bits)) {
        return {};
    }
    int64_t const n = params.row_of(neuron);
    float const g = Element::to_float(bits);
    float u = 0.0f;
    if constexpr (kGated) {
        float const sum = dot_row<Element, kUnlistedLoads>(x, params.w_up + n * params.d_model, params.d_model);
        u = up_of(sum + bias_of(params.b_up, n), params.relu_on_up);
    }
    if constexpr (!kBackward) {
        return {kGated ? g * u : g, 0.0f, 0.0f};
    }
    float const product = dot_row<Element, kUnlistedLoads>(params.dy + row * params.d_out,
                                                           params.w_down + n * params.d_out, params.d_out);
    float const l1_factor = params.dl1 == nullptr ? 0.0f : *params.dl1 / static_cast<float>(params.pairs.tokens);
    return differentiate<kGated>(g, u, product, l1_factor, params.act.square, params.relu_on_up);
}

// y, or dx.
template <class Element, bool kGated, bool kBackward>
__global__ __launch_bounds__(kUnlistedThreads,
                             2) void unlisted_rows_kernel(__grid_constant__ UnlistedParams const params) {
    wait_for_previous_launch();
    int const warp = threadIdx.x / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    int const width = kBackward ? params.d_model : params.d_out;
    float2* const factors = params.factors + static_cast<int64_t>(blockIdx.x) * params.d_ff;
    for (int64_t row = params.pairs.listed_rows() + blockIdx.x; row < params.pairs.tokens; row += gridDim.x) {
        for (int j = warp; j < params.d_ff; j += kUnlistedWarps) {
            PairGradients const found = compute_pair<Element, kGated, kBackward>(params, row, static_cast<uint32_t>(j));
            if (lane == 0) {
                factors[j] = kBackward ? make_float2(found.du, found.dz) : make_float2(found.h, 0.0f);
            }
        }
        __syncthreads();
        for (int column = static_cast<int>(threadIdx.x) * kVector; column < width; column += kUnlistedColumns) {
            float sums[kVector] = {};
            for (int j = 0; j < params.d_ff; ++j) {
                float2 const factor = factors[j];
                if (factor.x != 0.0f) {
                    int64_t const n = params.row_of(static_cast<uint32_t>(j));
                    add_row<Element>(sums, factor.x,
                                     load_vector((kBackward ? params.w_up : params.w_down) + n * width + column));
                }
                if (kBackward && factor.y != 0.0f) {
                    int64_t const n = params.gate_row_of(static_cast<uint32_t>(j));
                    add_row<Element>(sums, factor.y, load_vector(params.w_gate + n * width + column));
                }
            }
            for (uint16_t const* const addend : params.addends) {
                if (addend != nullptr) {
                    add_vector<Element>(sums, addend + row * width + column);
                }
            }
            if (!kBackward && params.b_down != nullptr) {
                add_vector<Element>(sums, params.b_down + column);
            }
            store_vector<Element>(params.out + row * width + column, sums);
        }
        if (!kBackward && warp == 0) {
            float l1 = 0.0f;
            for (int j = lane; j < params.d_ff; j += kWarpSize) {
                l1 += fabsf(factors[j].x);
            }
            l1 = sum_of_warp(l1);
            if (lane == 0) {
                params.row_l1[row] = l1;
            }
        }
        __syncthreads();
    }
}

// Adds to the gradients of weights and biases, after add_columns_kernel.
template <class Element, bool kGated>
__global__ __launch_bounds__(kUnlistedThreads,
                             2) void unlisted_weights_kernel(__grid_constant__ UnlistedParams const params) {
    wait_for_previous_launch();
    __shared__ PairGradients found[kUnlistedRows];
    int64_t const listed = params.pairs.listed_rows();
    int64_t const tokens = params.pairs.tokens;
    if (listed >= tokens) {
        return;
    }
    int const warp = threadIdx.x / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    int const column = static_cast<int>(blockIdx.y) * kUnlistedColumns + static_cast<int>(threadIdx.x) * kVector;
    bool const has_x = column < params.d_model;
    bool const has_y = column < params.d_out;
    for (int j = static_cast<int>(blockIdx.x); j < params.d_ff; j += static_cast<int>(gridDim.x)) {
        float down[kVector] = {};
        float up[kVector] = {};
        float gate[kVector] = {};
        float bias_up = 0.0f;
        float bias_gate = 0.0f;
        for (int64_t begin = listed; begin < tokens; begin += kUnlistedRows) {
            int const count = static_cast<int>(min(tokens - begin, static_cast<int64_t>(kUnlistedRows)));
            for (int r = warp; r < count; r += kUnlistedWarps) {
                PairGradients const pair =
                    compute_pair<Element, kGated, true>(params, begin + r, static_cast<uint32_t>(j));
                if (lane == 0) {
                    found[r] = pair;
                }
            }
            __syncthreads();
            for (int r = 0; r < count; ++r) {
                PairGradients const pair = found[r];
                if (pair.h == 0.0f && pair.du == 0.0f && pair.dz == 0.0f) {
                    continue;
                }
                bias_up += pair.du;
                bias_gate += pair.dz;
                if (has_y) {
                    add_row<Element>(down, pair.h, load_vector(params.dy + (begin + r) * params.d_out + column));
                }
                if (has_x) {
                    uint4 const x = load_vector(params.x + (begin + r) * params.d_model + column);
                    add_row<Element>(gate, pair.dz, x);
                    if constexpr (kGated) {
                        add_row<Element>(up, pair.du, x);
                    }
                }
            }
            __syncthreads();
        }
        auto const add_to = [](uint16_t* vector, float(&sums)[kVector]) {
            add_vector<Element>(sums, vector);
            store_vector<Element>(vector, sums);
        };
        auto const add_to_bias = [](uint16_t* bias, float sum) {
            *bias = Element::from_float(Element::to_float(*bias) + sum);
        };
        WeightGradients const& gradients = params.gradients;
        int64_t const row = params.row_of(static_cast<uint32_t>(j));
        int64_t const gate_row = params.gate_row_of(static_cast<uint32_t>(j));
        if (has_y) {
            add_to(gradients.w_down + row * params.d_out + column, down);
        }
        if (has_x) {
            add_to(gradients.w_gate + gate_row * params.d_model + column, gate);
            if constexpr (kGated) {
                add_to(gradients.w_up + row * params.d_model + column, up);
            }
        }
        if (blockIdx.y == 0 && threadIdx.x == 0) {
            if (gradients.b_gate != nullptr) {
                add_to_bias(gradients.b_gate + gate_row, bias_gate);
            }
            if (kGated && gradients.b_up != nullptr) {
                add_to_bias(gradients.b_up + row, bias_up);
            }
        }
    }
}

}  // namespace twell::training

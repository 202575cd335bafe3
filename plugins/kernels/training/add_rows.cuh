// Sums of gathered rows, each times a factor: y of a token over its neurons, dx likewise, and the gradients of a
// neuron's weights over its tokens.
//
// A warp has one result in kWarpColumns columns, a vector a lane. All results of these columns come before those of the
// next ones, so that the L2 cache holds the columns in use.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/gather_rows.cuh"
#include "training/pairs.cuh"

namespace twell::training {

constexpr int kRowsAtOnce = 4;  // of each matrix

// The factors of a pair's rows.
enum class Factors {
    kWord,    // g, of the pair's word: h of a plain block
    kHidden,  // a float: h
    kGate,    // dz of a float2
    kBoth     // du and dz
};

struct AddRowsParams : TrainingBlock {
    Pairs pairs;
    void const* factors;         // float or float2 [capacity]
    uint16_t const* first;       // [d_ff, width]: of the only factor, or of du
    uint16_t const* second;      // of dz: w_gate
    uint16_t const* bias;        // [width] or null
    uint16_t const* addends[2];  // [tokens, width] or null
    uint16_t* out;               // [tokens, width]
    float* row_l1;               // [tokens] or null: the sum of the only factors' absolute values
    int width;
};

template <class Element>
__device__ __forceinline__ void add_vector(float (&sums)[kVector], uint16_t const* vector) {
    float values[kVector];
    unpack<Element>(values, *reinterpret_cast<uint4 const*>(vector));
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        sums[i] += values[i];
    }
}

template <class Element, Factors kFactors>
__global__ __launch_bounds__(kThreads) void add_rows_kernel(__grid_constant__ AddRowsParams const params) {
    wait_for_previous_launch();
    constexpr bool kTwo = kFactors == Factors::kBoth;
    int const lane = threadIdx.x % kWarpSize;
    int64_t const row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
    if (row >= params.pairs.listed_rows()) {
        return;
    }
    int const column = static_cast<int>(blockIdx.y) * kWarpColumns + lane * kVector;
    bool const has_column = column < params.width;
    int const read_column = has_column ? column : 0;
    int64_t const end = params.pairs.row_begin[row + 1];
    float sums[kVector] = {};
    float l1 = 0.0f;
    for (int64_t begin = params.pairs.row_begin[row]; begin < end; begin += kWarpSize) {
        int const count = static_cast<int>(min(end - begin, static_cast<int64_t>(kWarpSize)));
        int64_t const pair = begin + min(lane, count - 1);
        uint32_t const word = params.pairs.words[pair];
        uint32_t const own = static_cast<uint32_t>(params.row_of(neuron_of(word)));
        uint32_t const own_gate = kTwo ? static_cast<uint32_t>(params.gate_row_of(neuron_of(word))) : 0;
        float2 factor = {};
        if constexpr (kTwo) {
            factor = static_cast<float2 const*>(params.factors)[pair];
        } else if constexpr (kFactors == Factors::kGate) {
            factor.x = static_cast<float2 const*>(params.factors)[pair].y;
        } else if constexpr (kFactors == Factors::kHidden) {
            factor.x = static_cast<float const*>(params.factors)[pair];
        } else {
            factor.x = g_of<Element>(word);
        }
        l1 += lane < count ? fabsf(factor.x) : 0.0f;
        for (int i = 0; i < count; i += kRowsAtOnce) {
            uint4 vectors[kTwo ? 2 : 1][kRowsAtOnce];
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                int const source = min(i + r, count - 1);
                int64_t const n = __shfl_sync(0xffffffffu, own, source);
                vectors[0][r] = load_vector(params.first + n * params.width + read_column);
                if constexpr (kTwo) {
                    int64_t const gate = __shfl_sync(0xffffffffu, own_gate, source);
                    vectors[1][r] = load_vector(params.second + gate * params.width + read_column);
                }
            }
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                float const x = __shfl_sync(0xffffffffu, factor.x, min(i + r, count - 1));
                if (i + r < count) {
                    add_row<Element>(sums, x, vectors[0][r]);
                }
                if constexpr (kTwo) {
                    float const y = __shfl_sync(0xffffffffu, factor.y, min(i + r, count - 1));
                    if (i + r < count) {
                        add_row<Element>(sums, y, vectors[1][r]);
                    }
                }
            }
        }
    }
    if (params.row_l1 != nullptr && blockIdx.y == 0) {
        l1 = sum_of_warp(l1);
        if (lane == 0) {
            params.row_l1[row] = l1;
        }
    }
    if (!has_column) {
        return;
    }
    for (uint16_t const* const addend : params.addends) {
        if (addend != nullptr) {
            add_vector<Element>(sums, addend + row * params.width + column);
        }
    }
    if (params.bias != nullptr) {
        add_vector<Element>(sums, params.bias + column);
    }
    store_vector<Element>(params.out + row * params.width + column, sums);
}

// The gradients of weights and biases, a row for each neuron of the pairs.
struct WeightGradients {
    uint16_t* w_gate;  // [d_ff, d_model], row gate_neurons[j]; in a plain block that of the only projection
    uint16_t* b_gate;  // [d_ff] or null
    uint16_t* w_up;    // [d_ff, d_model], row neurons[j]
    uint16_t* b_up;
    uint16_t* w_down;  // [d_ff, d_out]
};

struct AddColumnsParams : TrainingBlock {
    uint16_t const* dy;            // [tokens, d_out]
    uint32_t const* column_begin;  // [d_ff + 1]: where each neuron's pairs begin
    float4 const* transposed;      // [capacity], see ProjectParams
    WeightGradients gradients;
};

template <class Element, bool kGated>
__global__ __launch_bounds__(kThreads) void add_columns_kernel(__grid_constant__ AddColumnsParams const params) {
    wait_for_previous_launch();
    int const lane = threadIdx.x % kWarpSize;
    int const neuron = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / kWarpSize;
    if (neuron >= params.d_ff) {
        return;
    }
    int const column = static_cast<int>(blockIdx.y) * kWarpColumns + lane * kVector;
    bool const has_x = column < params.d_model;
    bool const has_y = column < params.d_out;
    uint32_t const end = params.column_begin[neuron + 1];
    float down[kVector] = {};
    float up[kVector] = {};
    float gate[kVector] = {};
    float bias_up = 0.0f;
    float bias_gate = 0.0f;
    for (uint32_t begin = params.column_begin[neuron]; begin < end; begin += kWarpSize) {
        int const count = static_cast<int>(min(end - begin, static_cast<uint32_t>(kWarpSize)));
        float4 const own = params.transposed[begin + min(lane, count - 1)];
        bias_up += lane < count ? own.y : 0.0f;
        bias_gate += lane < count ? own.z : 0.0f;
        for (int i = 0; i < count; i += kRowsAtOnce) {
            uint4 x[kRowsAtOnce];
            uint4 y[kRowsAtOnce];
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                int64_t const row = __float_as_int(__shfl_sync(0xffffffffu, own.w, min(i + r, count - 1)));
                x[r] = load_vector_if(params.x + row * params.d_model + column, has_x);
                y[r] = load_vector_if(params.dy + row * params.d_out + column, has_y);
            }
#pragma unroll
            for (int r = 0; r < kRowsAtOnce; ++r) {
                int const source = min(i + r, count - 1);
                float const h = __shfl_sync(0xffffffffu, own.x, source);
                float const du = __shfl_sync(0xffffffffu, own.y, source);
                float const dz = __shfl_sync(0xffffffffu, own.z, source);
                if (i + r < count) {
                    add_row<Element>(down, h, y[r]);
                    add_row<Element>(gate, dz, x[r]);
                    if constexpr (kGated) {
                        add_row<Element>(up, du, x[r]);
                    }
                }
            }
        }
    }
    WeightGradients const& gradients = params.gradients;
    int64_t const row = params.row_of(static_cast<uint32_t>(neuron));
    int64_t const gate_row = params.gate_row_of(static_cast<uint32_t>(neuron));
    if (has_y) {
        store_vector<Element>(gradients.w_down + row * params.d_out + column, down);
    }
    if (has_x) {
        store_vector<Element>(gradients.w_gate + gate_row * params.d_model + column, gate);
        if constexpr (kGated) {
            store_vector<Element>(gradients.w_up + row * params.d_model + column, up);
        }
    }
    if (blockIdx.y == 0) {
        bias_up = sum_of_warp(bias_up);
        bias_gate = sum_of_warp(bias_gate);
        if (lane == 0 && gradients.b_gate != nullptr) {
            gradients.b_gate[gate_row] = Element::from_float(bias_gate);
        }
        if (lane == 0 && kGated && gradients.b_up != nullptr) {
            gradients.b_up[row] = Element::from_float(bias_up);
        }
    }
}

}  // namespace twell::training

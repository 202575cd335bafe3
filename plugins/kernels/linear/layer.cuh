// What the kernels of a linear layer have in common: where results go, and the norm of rows.
#pragma once

#include <stdint.h>

#include "device/element.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell::linear {

// The outputs, one beside the other: output i has the columns from begins[i] on, of those of the weight's rows. An
// output that is not there begins behind all columns.
struct Outputs {
    uint16_t* y[TWELL_MAX_SPLITS];  // [tokens, widths[i]]
    int begins[TWELL_MAX_SPLITS];
    int widths[TWELL_MAX_SPLITS];

    // Of a token and one of all columns.
    __device__ __forceinline__ uint16_t* place(int64_t token, int column) const {
        uint16_t* pointer = y[0];
        int begin = 0;
        int width = widths[0];
#pragma unroll
        for (int i = 1; i < TWELL_MAX_SPLITS; ++i) {
            if (column >= begins[i]) {
                pointer = y[i], begin = begins[i], width = widths[i];
            }
        }
        return pointer + token * width + (column - begin);
    }
};

struct Norm {
    uint16_t const* weight;  // [columns], or null: ones
    uint16_t const* bias;    // [columns], or null: zeros
    float eps;
    int kind;  // twell_norm
};

// Of a row: what is taken from its elements, and what multiplies them then.
struct Moments {
    float mean;
    float factor;
};

// Copies one row and finds its moments, by threads of which this one has the vectors `first`, `first` + `step`, ...
// below `vectors`. It may read again what it has written. sum_of_row(value) adds up a number of all of the row's
// threads; it is called equally often whatever there is to do, so that it may hold a barrier.
template <class Element, class SumOfRow>
__device__ __forceinline__ Moments copy_row(uint16_t* to, uint16_t const* from, Norm const& norm, int vectors,
                                            int first, int step, SumOfRow sum_of_row) {
    constexpr int kAtOnce = 4;  // loads in flight
    float const count = static_cast<float>(vectors) * kVector;
    float sum = 0.0f;
#pragma unroll 1
    for (int begin = first; begin < vectors; begin += kAtOnce * step) {
        uint4 held[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int const v = begin + i * step;
            held[i] = load_written_vector_if(from + int64_t{v} * kVector, v < vectors);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int const v = begin + i * step;
            if (v < vectors) {
                reinterpret_cast<uint4*>(to)[v] = held[i];
            }
            float values[kVector];
            unpack<Element>(values, held[i]);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sum += norm.kind == TWELL_NORM_LAYER ? values[k] : values[k] * values[k];
            }
        }
    }
    Moments moments = {0.0f, 1.0f};
    if (norm.kind == TWELL_NORM_NONE) {
        return moments;
    }
    if (norm.kind == TWELL_NORM_LAYER) {
        moments.mean = sum_of_row(sum) / count;
        sum = 0.0f;
#pragma unroll 2
        for (int v = first; v < vectors; v += step) {
            float values[kVector];
            unpack<Element>(values, reinterpret_cast<uint4 const*>(to)[v]);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sum += (values[k] - moments.mean) * (values[k] - moments.mean);
            }
        }
    }
    moments.factor = rsqrtf(sum_of_row(sum) / count + norm.eps);
    return moments;
}

// The norm's weight and bias of eight columns.
struct NormVector {
    uint4 weight;
    uint4 bias;
};

__device__ __forceinline__ NormVector load_norm(Norm const& norm, int v, int vectors) {
    int64_t const column = int64_t{v} * kVector;
    return {load_vector_if(norm.weight + column, norm.weight != nullptr && v < vectors),
            load_vector_if(norm.bias + column, norm.bias != nullptr && v < vectors)};
}

// Normalises eight columns of a row, rounded once.
template <class Element>
__device__ __forceinline__ void normalise(uint16_t* place, Norm const& norm, NormVector const& of_columns,
                                          Moments const& moments) {
    float values[kVector];
    float weights[kVector];
    float biases[kVector];
    unpack<Element>(values, *reinterpret_cast<uint4 const*>(place));
    unpack<Element>(weights, of_columns.weight);
    unpack<Element>(biases, of_columns.bias);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        float const value = (values[k] - moments.mean) * moments.factor;
        values[k] = (norm.weight == nullptr ? value : value * weights[k]) + biases[k];
    }
    store_vector<Element>(place, values);
}

}  // namespace twell::linear

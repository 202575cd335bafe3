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

// Writes the norm of one row, rounded once, by threads of which this one has the vectors `first`, `first` + `step`, ...
// below `vectors`. It may read again what it has written. sum_of_row(value) adds up a number of all of the row's
// threads; it is called equally often whatever there is to do, so that it may hold a barrier.
template <class Element, class SumOfRow>
__device__ __forceinline__ void normalise(uint16_t* to, uint16_t const* from, Norm const& norm, int vectors, int first,
                                          int step, SumOfRow sum_of_row) {
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
    if (norm.kind == TWELL_NORM_NONE) {
        return;
    }
    float mean = 0.0f;
    if (norm.kind == TWELL_NORM_LAYER) {
        mean = sum_of_row(sum) / count;
        sum = 0.0f;
#pragma unroll 2
        for (int v = first; v < vectors; v += step) {
            float values[kVector];
            unpack<Element>(values, reinterpret_cast<uint4 const*>(to)[v]);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sum += (values[k] - mean) * (values[k] - mean);
            }
        }
    }
    float const factor = rsqrtf(sum_of_row(sum) / count + norm.eps);
#pragma unroll 2
    for (int v = first; v < vectors; v += step) {
        float values[kVector];
        unpack<Element>(values, reinterpret_cast<uint4 const*>(to)[v]);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            values[k] = (values[k] - mean) * factor;
        }
        if (norm.weight != nullptr) {
            float weights[kVector];
            unpack<Element>(weights, load_vector(norm.weight + int64_t{v} * kVector));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                values[k] *= weights[k];
            }
        }
        if (norm.bias != nullptr) {
            float biases[kVector];
            unpack<Element>(biases, load_vector(norm.bias + int64_t{v} * kVector));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                values[k] += biases[k];
            }
        }
        store_vector<Element>(to + int64_t{v} * kVector, values);
    }
}

}  // namespace twell::linear

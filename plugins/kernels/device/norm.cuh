// The norm of rows: RMS norm and layer norm, computed in fp32 and rounded once.
#pragma once

#include <stdint.h>

#include "device/element.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell::norm {

struct Norm {
    uint16_t const* weight;  // [columns], or null: ones
    uint16_t const* bias;    // [columns], or null: zeros
    float eps;
    int kind;  // twell_norm
};

// Of a row: the number that is subtracted from the elements, and the factor that then multiplies them.
struct Moments {
    float mean;
    float factor;
};

// Adds up a number of each thread of a CTA, which has a row. The sums are kept in turns, so one barrier is enough.
template <int kThreads>
struct SumOfRow {
    float (&sums)[2][kThreads / kWarpSize];  // in shared memory
    int turn = 0;

    __device__ __forceinline__ float operator()(float value) {
        float* const mine = sums[turn];
        turn ^= 1;
        float const sum = sum_of_warp(value);
        if (threadIdx.x % kWarpSize == 0) {
            mine[threadIdx.x / kWarpSize] = sum;
        }
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kThreads / kWarpSize; ++i) {
            total += mine[i];
        }
        return total;
    }
};

// Finds the moments of a row, by several threads. This one has the vectors `first`, `first` + `step`, ... below
// `vectors`. load(v) gives a vector, zeros behind the last one; keep(v, vector) is called when kAtOnce of them are
// under way. again(v) gives the vector once more, in a layer norm. sum_of_row(value) adds up a number of all of the
// row's threads; it is called equally often whatever there is to do, so that it may hold a barrier.
template <class Element, int kAtOnce, class Load, class Keep, class Again, class Sum>
__device__ __forceinline__ Moments find_moments(Norm const& norm, int vectors, int first, int step, Load load,
                                                Keep keep, Again again, Sum&& sum_of_row) {
    float const count = static_cast<float>(vectors) * kVector;
    float sum = 0.0f;
#pragma unroll 1
    for (int begin = first; begin < vectors; begin += kAtOnce * step) {
        uint4 held[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            held[i] = load(begin + i * step);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            keep(begin + i * step, held[i]);
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
            unpack<Element>(values, again(v));
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sum += (values[k] - moments.mean) * (values[k] - moments.mean);
            }
        }
    }
    moments.factor = rsqrtf(sum_of_row(sum) / count + norm.eps);
    return moments;
}

// The same where for_each(use) calls use(v, vector) for this thread's vectors, twice in a layer norm.
template <class Element, class ForEach, class Sum>
__device__ __forceinline__ Moments find_moments(Norm const& norm, int vectors, ForEach for_each, Sum&& sum_of_row) {
    float const count = static_cast<float>(vectors) * kVector;
    Moments moments = {0.0f, 1.0f};
    float sum = 0.0f;
    auto const add = [&](auto of) {
        for_each([&](int, uint4 vector) {
            float values[kVector];
            unpack<Element>(values, vector);
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                sum += of(values[k]);
            }
        });
    };
    auto const square = [&](float value) { return (value - moments.mean) * (value - moments.mean); };
    if (norm.kind == TWELL_NORM_LAYER) {
        add([](float value) { return value; });
        moments.mean = sum_of_row(sum) / count;
        sum = 0.0f;
    }
    add(square);
    moments.factor = rsqrtf(sum_of_row(sum) / count + norm.eps);
    return moments;
}

// Copies a row and finds its moments: see find_moments.
template <class Element, class Sum>
__device__ __forceinline__ Moments copy_row(uint16_t* to, uint16_t const* from, Norm const& norm, int vectors,
                                            int first, int step, Sum&& sum_of_row) {
    auto* const places = reinterpret_cast<uint4*>(to);
    auto const load = [&](int v) { return load_written_vector_if(from + int64_t{v} * kVector, v < vectors); };
    auto const keep = [&](int v, uint4 vector) {
        if (v < vectors) {
            places[v] = vector;
        }
    };
    auto const again = [&](int v) { return places[v]; };
    return find_moments<Element, 4>(norm, vectors, first, step, load, keep, again, sum_of_row);
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
__device__ __forceinline__ uint4 normalise(uint4 columns, Norm const& norm, NormVector const& of_columns,
                                           Moments const& moments) {
    float values[kVector];
    float weights[kVector];
    float biases[kVector];
    unpack<Element>(values, columns);
    unpack<Element>(weights, of_columns.weight);
    unpack<Element>(biases, of_columns.bias);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        float const value = (values[k] - moments.mean) * moments.factor;
        values[k] = (norm.weight == nullptr ? value : value * weights[k]) + biases[k];
    }
    return pack<Element>(values);
}

}  // namespace twell::norm

// The terms of y besides the product: the bias and the residual.
#pragma once

#include <stdint.h>

#include <type_traits>

#include "device/block.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"

namespace twell {

// 1, 2, 4 or 8 neighbouring elements by one access, to which the pointer is aligned.
template <class Element, int kCount>
__device__ __forceinline__ void load_elements(float (&values)[kCount], uint16_t const* pointer) {
    static_assert(kCount == 1 || kCount == 2 || kCount == 4 || kCount == kVector, "what is loaded at once");
    if constexpr (kCount == 1) {
        values[0] = Element::to_float(*pointer);
    } else if constexpr (kCount == kVector) {
        unpack<Element>(values, load_vector(pointer));
    } else if constexpr (kCount == 2) {
        float2 const pair = Element::to_float2(*reinterpret_cast<uint32_t const*>(pointer));
        values[0] = pair.x;
        values[1] = pair.y;
    } else {
        uint2 const words = *reinterpret_cast<uint2 const*>(pointer);
        float2 const low = Element::to_float2(words.x);
        float2 const high = Element::to_float2(words.y);
        values[0] = low.x;
        values[1] = low.y;
        values[2] = high.x;
        values[3] = high.y;
    }
}

template <class Element, int kCount>
__device__ __forceinline__ void add_elements(float (&sums)[kCount], uint16_t const* pointer) {
    float values[kCount];
    load_elements<Element>(values, pointer);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
        sums[k] += values[k];
    }
}

template <class Params, class = void>
constexpr bool kScalesOutputs = false;
template <class Params>
constexpr bool kScalesOutputs<Params, std::void_t<decltype(Params::kHasScales)>> = Params::kHasScales;

// Adds what `params` has of it to sums of a row of y, those of `column` and its neighbours, before they are rounded.
template <class Element, int kCount, class Params>
__device__ __forceinline__ void add_bias(float (&sums)[kCount], Params const& params, int column) {
    if constexpr (kScalesOutputs<Params>) {
        scale_outputs(sums, params, column);
    }
    if (params.b_down != nullptr) {
        add_elements<Element>(sums, params.b_down + column);
    }
}

// The same with the residual.
template <class Element, int kCount, class Params>
__device__ __forceinline__ void add_bias_and_residual(float (&sums)[kCount], Params const& params, int64_t row,
                                                      int column) {
    add_bias<Element>(sums, params, column);
    if (params.residual != nullptr) {
        add_elements<Element>(sums, params.residual + row * params.d_out + column);
    }
}

}  // namespace twell

// Eight neighbouring elements of a row, one 16-byte access; what a warp adds up.
#pragma once

#include "device/element.cuh"
#include "device/load.cuh"
#include "device/shared.cuh"

namespace twell {

constexpr int kWarpSize = 32;
// Columns that a warp covers with one vector a lane.
constexpr int kWarpColumns = kWarpSize * kVector;
// Bytes that a warp moves at once, a vector a lane.
constexpr int kBytesPiece = kWarpSize * kVector * static_cast<int>(sizeof(uint16_t));

// By one warp: the sum of the values of this lane and the ones below. Only the first kLanes lanes get it.
template <int kLanes = kWarpSize>
__device__ __forceinline__ uint32_t sum_up_to(uint32_t value) {
    int const lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
        uint32_t const below = __shfl_up_sync(0xffffffffu, value, distance);
        value += lane >= distance ? below : 0;
    }
    return value;
}

// By one warp: the sum of all lanes' values, which every lane gets.
__device__ __forceinline__ float sum_of_warp(float value) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// The result of load_vector for eight elements that are stored as Stored: uint16_t, those of the element type, or E4m3.
template <class Stored>
struct VectorOf {
    using Type = uint4;
};
template <>
struct VectorOf<E4m3> {
    using Type = uint2;
};
template <class Stored>
using Vector = typename VectorOf<Stored>::Type;

// The same from shared memory, where copy_vector_async has brought them.
template <class Stored>
__device__ __forceinline__ Vector<Stored> load_shared_vector(uint32_t address) {
    if constexpr (sizeof(Stored) == 1) {
        return load_half_chunk(address);
    } else {
        return load_chunk(address);
    }
}

template <class Element>
__device__ __forceinline__ void unpack(float (&values)[kVector], uint4 vector) {
    uint32_t const words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 const pair = Element::to_float2(words[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

template <class Element>
__device__ __forceinline__ void unpack(float (&values)[kVector], uint2 vector) {
    uint2 const pairs[2] = {e4m3_to_fp16(vector.x), e4m3_to_fp16(vector.y)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float2 const low = Fp16::to_float2(pairs[i].x);
        float2 const high = Fp16::to_float2(pairs[i].y);
        values[4 * i] = low.x;
        values[4 * i + 1] = low.y;
        values[4 * i + 2] = high.x;
        values[4 * i + 3] = high.y;
    }
}

// Of four: uint4, float4.
template <class Four>
__device__ __forceinline__ void add(Four& sum, Four values) {
    sum.x += values.x;
    sum.y += values.y;
    sum.z += values.z;
    sum.w += values.w;
}

// Rounds each value once.
template <class Element>
__device__ __forceinline__ uint4 pack(float const (&values)[kVector]) {
    return make_uint4(Element::from_float2(values[0], values[1]), Element::from_float2(values[2], values[3]),
                      Element::from_float2(values[4], values[5]), Element::from_float2(values[6], values[7]));
}

template <class Element>
__device__ __forceinline__ void store_vector(uint16_t* pointer, float const (&values)[kVector]) {
    *reinterpret_cast<uint4*>(pointer) = pack<Element>(values);
}

// A vector of weights as the tensor cores take them, in the element type.
template <class Element>
__device__ __forceinline__ uint4 as_elements(uint4 vector) {
    return vector;
}
template <class Element>
__device__ __forceinline__ uint4 as_elements(uint2 vector) {
    float values[kVector];
    unpack<Element>(values, vector);
    return pack<Element>(values);
}

// Brings a row into L2, by one warp.
template <class Stored>
__device__ __forceinline__ void prefetch_row(Stored const* row, int length) {
    constexpr int kLine = 128 / static_cast<int>(sizeof(Stored));  // elements
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % kWarpSize * kLine; i < length; i += kWarpSize * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
    }
}

}  // namespace twell

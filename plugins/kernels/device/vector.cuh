// Eight neighbouring elements of a row, one 16-byte access; what a warp adds up.
#pragma once

#include "device/element.cuh"

namespace twell {

constexpr int kWarpSize = 32;
// Columns that a warp covers with one vector a lane.
constexpr int kWarpColumns = kWarpSize * kVector;

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

// Volatile, so loads keep the order of the source: then the compiler neither delays them to their use nor keeps many
// addresses. Only for what no kernel of the call has written: see dependent_launch.cuh.
__device__ __forceinline__ uint4 load_vector(uint16_t const* pointer) {
    uint4 vector;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(pointer));
    return vector;
}

// The same of what may be another kernel's of the call.
__device__ __forceinline__ uint4 load_written_vector(uint16_t const* pointer) {
    uint4 vector;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "l"(pointer));
    return vector;
}

// load_vector, or zeros.
__device__ __forceinline__ uint4 load_vector_if(uint16_t const* pointer, bool exists) {
    uint4 vector;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@exists ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&r"(vector.x), "=&r"(vector.y), "=&r"(vector.z), "=&r"(vector.w)
        : "l"(pointer), "r"(static_cast<int>(exists)));
    return vector;
}

// load_written_vector, or zeros.
__device__ __forceinline__ uint4 load_written_vector_if(uint16_t const* pointer, bool exists) {
    uint4 vector;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@exists ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&r"(vector.x), "=&r"(vector.y), "=&r"(vector.z), "=&r"(vector.w)
        : "l"(pointer), "r"(static_cast<int>(exists)));
    return vector;
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

// sum += x . w
template <class Element>
__device__ __forceinline__ void accumulate(float& sum, uint4 x_vector, uint4 w_vector) {
    float x_values[kVector];
    float w_values[kVector];
    unpack<Element>(x_values, x_vector);
    unpack<Element>(w_values, w_vector);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        sum = fmaf(x_values[i], w_values[i], sum);
    }
}

// x . row, by one warp; every lane gets the sum. Its order is the same for any kLoads from the row at once.
template <class Element, int kLoads>
__device__ __forceinline__ float dot_row(uint16_t const* x, uint16_t const* row, int d_model) {
    int const lane = threadIdx.x % kWarpSize;
    float sum = 0.0f;
    // NOTE: loads are issued together, without a condition between them; else each waits for the one before.
    constexpr int kStep = kWarpSize * kVector;
    int begin = 0;
    for (; begin + kLoads * kStep <= d_model; begin += kLoads * kStep) {
        uint4 x_vectors[kLoads];
        uint4 w_vectors[kLoads];
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
            int const column = begin + u * kStep + lane * kVector;
            x_vectors[u] = load_vector(x + column);
            w_vectors[u] = load_vector(row + column);
        }
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
            accumulate<Element>(sum, x_vectors[u], w_vectors[u]);
        }
    }
#pragma unroll 1
    for (int column = begin + lane * kVector; column < d_model; column += kStep) {
        accumulate<Element>(sum, load_vector(x + column), load_vector(row + column));
    }
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    }
    return sum;
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
__device__ __forceinline__ void store_vector(uint16_t* pointer, float const (&values)[kVector]) {
    *reinterpret_cast<uint4*>(pointer) =
        make_uint4(Element::from_float2(values[0], values[1]), Element::from_float2(values[2], values[3]),
                   Element::from_float2(values[4], values[5]), Element::from_float2(values[6], values[7]));
}

}  // namespace twell

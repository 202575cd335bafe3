// Sums of gathered rows of a matrix, each times a factor: sums += h[n] W[n, columns] for the rows n of a list.
#pragma once

#include <type_traits>

#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell {

// A factor in fp32, or in the element type.
template <class Element>
__device__ __forceinline__ float to_float(float h) {
    return h;
}

template <class Element>
__device__ __forceinline__ float to_float(uint16_t h) {
    return Element::to_float(h);
}

// sums += h * row
template <class Element, class H, class RowVector>
__device__ __forceinline__ void add_row(float (&sums)[kVector], H h, RowVector row) {
    float values[kVector];
    unpack<Element>(values, row);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        sums[k] = fmaf(to_float<Element>(h), values[k], sums[k]);
    }
}

// Factors of rows, h[n], times the scales of the blocks that a thread's columns have a part of.
template <class Factors>
struct BlockScaled {
    Factors h;
    float const* scales;  // of the first rows
    int step;             // to those of the next ones

    __device__ __forceinline__ float operator[](uint32_t n) const {
        return h[n] * scales[static_cast<int64_t>(n / TWELL_SCALE_BLOCK_SIZE) * step];
    }
};

// Adds kRows rows, each by one thread: those at `position` of the list, at position + slots and so on, as far as the
// list's `count` goes. `matrix` is that of the thread's columns, h[n] a row's factor. NOTE: all loads are issued
// together and under no condition; else the compiler delays each to its use.
template <class Element, int kRows, class Factors, class Stored>
__device__ __forceinline__ void gather_some(float (&sums)[kVector], uint16_t const* list, int position, int slots,
                                            int count, Factors h, Stored const* matrix, int row_length) {
    Vector<Stored> vectors[kRows];
    std::decay_t<decltype(h[0])> values[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        uint32_t const n = list[min(position + r * slots, count - 1)];
        vectors[r] = load_vector(matrix + static_cast<uint64_t>(n) * static_cast<uint32_t>(row_length));
        values[r] = h[n];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        if (position + r * slots < count) {
            add_row<Element>(sums, values[r], vectors[r]);
        }
    }
}

// The same for all rows of the list from `position` on in steps of `slots`, up to kMostRows at once.
template <class Element, int kMostRows, class Factors, class Stored>
__device__ __forceinline__ void gather_listed(float (&sums)[kVector], uint16_t const* list, int position, int slots,
                                              int count, Factors h, Stored const* matrix, int row_length) {
    for (; position + 3 * slots < count; position += kMostRows * slots) {
        gather_some<Element, kMostRows>(sums, list, position, slots, count, h, matrix, row_length);
    }
    if (position + slots < count) {
        gather_some<Element, 3>(sums, list, position, slots, count, h, matrix, row_length);
    } else if (position < count) {
        gather_some<Element, 1>(sums, list, position, slots, count, h, matrix, row_length);
    }
}

// Copies of a warp that gather_queued has in flight, 16 bytes a lane.
constexpr int kQueuedRows = 8;

// The same by way of shared memory, kQueuedRows * kBytesPiece bytes from `queue` on for each warp: for kernels that
// leave little of it for L1, where loads in flight would not find a place. A row is read by kLanes lanes; the other
// lanes of the warp are slots, which have other rows: those of the list at first + slot, and every `stride` from there
// on.
template <class Element, int kLanes, class H>
__device__ __forceinline__ void gather_queued(float (&sums)[kVector], uint16_t const* list, int first, int stride,
                                              int count, H const* h, uint16_t const* matrix, int row_length,
                                              uint32_t queue) {
    constexpr int kSlots = kWarpSize / kLanes;
    constexpr int kWindow = kWarpSize / kSlots;  // rows of a slot for which each lane knows one neuron
    constexpr int kAtOnce = kQueuedRows / 2;
    static_assert(kWindow % kAtOnce == 0, "a lane for each row of fetch()");
    int const lane = threadIdx.x % kWarpSize;
    int const slot = lane / kLanes;
    uint32_t const row_bytes = static_cast<uint32_t>(row_length) * 2;
    char const* rows = reinterpret_cast<char const*>(matrix);
    asm volatile("" : "+l"(rows));  // else each row's address takes five instructions, not one
    queue += lane * 16;
    for (; first < count; first += kWindow * stride) {
        int const position = first + lane / kSlots * stride + lane % kSlots;
        uint32_t const neuron = list[min(position, count - 1)];
        float const value = position < count ? to_float<Element>(h[neuron]) : 0.0f;
        // Of a slot that has one row less than the other the last row is copied again, but not added.
        int const num_rows = (__popc(__ballot_sync(0xffffffffu, position < count)) + kSlots - 1) / kSlots;
        auto const fetch = [&](int begin, uint32_t half) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                uint32_t const n = __shfl_sync(0xffffffffu, neuron, (begin + i) * kSlots + slot);
                if (begin + i < num_rows) {
                    copy_async(half + i * kBytesPiece, rows + uint64_t{n} * row_bytes, true);
                }
            }
            commit_async();
        };
        fetch(0, queue);
        fetch(kAtOnce, queue + kAtOnce * kBytesPiece);
        uint32_t half = queue;
        uint32_t other = queue + kAtOnce * kBytesPiece;
#pragma unroll 1
        for (int begin = 0; begin < num_rows; begin += kAtOnce) {
            wait_async<1>();
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                uint4 const vector = load_chunk(half + i * kBytesPiece);
                float const factor = __shfl_sync(0xffffffffu, value, (begin + i) * kSlots + slot);
                if (begin + i < num_rows && (kSlots == 1 || first + (begin + i) * stride + slot < count)) {
                    add_row<Element>(sums, factor, vector);
                }
            }
            fetch(begin + 2 * kAtOnce, half);
            uint32_t const next = other;
            other = half;
            half = next;
        }
    }
    wait_async<0>();
}

// A row of a matrix and its factor.
struct RowFactor {
    uint32_t neuron;
    float h;
};

// Adds the rows that the lanes from `begin` on have, `count` <= kRows of them, each by one lane with its factor. All
// loads are issued together: past the last row they repeat it, and the values are not used.
template <class Element, int kRows, class Stored>
__device__ __forceinline__ void gather_of_lanes(float (&sums)[kVector], Stored const* matrix, int row_length,
                                                RowFactor row, int begin, int count) {
    Vector<Stored> vectors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        uint32_t const n = __shfl_sync(0xffffffffu, row.neuron, begin + min(r, count - 1));
        vectors[r] = load_vector(matrix + static_cast<int64_t>(n) * row_length);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        float const factor = __shfl_sync(0xffffffffu, row.h, begin + min(r, count - 1));
        float w_values[kVector];
        unpack<Element>(w_values, vectors[r]);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            float const sum = fmaf(factor, w_values[i], sums[i]);
            sums[i] = r < count ? sum : sums[i];
        }
    }
}

// Rows of bytes are multiplied and added up in fp16, which holds their numbers, kRows at a time; for that the factors
// of a warp are scaled together, so that the largest is from 1 up to 2.
struct ScaledFactors {
    uint32_t pair;  // this lane's factor, twice
    float unit;     // the value of 1

    __device__ __forceinline__ explicit ScaledFactors(float factor) {
        constexpr uint32_t kMantissaBits = 23;
        constexpr uint32_t kBias = 127;
        uint32_t const largest = __reduce_max_sync(0xffffffffu, __float_as_uint(factor) & 0x7fffffffu);
        // The result for an infinity or a NaN is not finite.
        uint32_t const exponent = min(max(largest >> kMantissaBits, 1u), 2 * kBias - 1);
        unit = __uint_as_float(exponent << kMantissaBits);
        float const scaled = factor * __uint_as_float((2 * kBias - exponent) << kMantissaBits);
        pair = Fp16::from_float2(scaled, scaled);
    }
};

// gather_of_lanes for rows of bytes: `neuron` is a lane's row, `factors` are those of all lanes.
template <int kRows>
__device__ __forceinline__ void gather_bytes_of_lanes(float (&sums)[kVector], E4m3 const* matrix, int row_length,
                                                      uint32_t neuron, ScaledFactors const& factors, int begin,
                                                      int count) {
    uint2 vectors[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        uint32_t const n = __shfl_sync(0xffffffffu, neuron, begin + min(r, count - 1));
        vectors[r] = load_vector(matrix + static_cast<int64_t>(n) * row_length);
    }
    __half2 parts[kVector / 2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        uint32_t const bits = __shfl_sync(0xffffffffu, factors.pair, begin + min(r, count - 1));
        uint32_t const kept = r < count ? bits : 0;  // the last row again: it has a NaN by now where this gives one
        __half2 const factor = *reinterpret_cast<__half2 const*>(&kept);
        uint2 const low = e4m3_to_fp16(vectors[r].x);
        uint2 const high = e4m3_to_fp16(vectors[r].y);
        uint32_t const words[kVector / 2] = {low.x, low.y, high.x, high.y};
#pragma unroll
        for (int i = 0; i < kVector / 2; ++i) {
            __half2 const values = *reinterpret_cast<__half2 const*>(&words[i]);
            parts[i] = r == 0 ? __hmul2(factor, values) : __hfma2(factor, values, parts[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
        float2 const part = __half22float2(parts[i]);
        sums[2 * i] = fmaf(part.x, factors.unit, sums[2 * i]);
        sums[2 * i + 1] = fmaf(part.y, factors.unit, sums[2 * i + 1]);
    }
}

// Sends for this thread's vector of each row of a set, given as bits: the i-th to pieces + i * kBytesPiece in shared
// memory. `matrix` is that of the thread's columns.
template <class Stored>
__device__ __forceinline__ void send_for_set(uint32_t pieces, Stored const* matrix, int row_length, uint32_t set) {
    for (uint32_t rest = set; rest != 0; rest &= rest - 1, pieces += kBytesPiece) {
        copy_vector_async(pieces, matrix + static_cast<int64_t>(__ffs(rest) - 1) * row_length, true);
    }
    commit_async();
}

// Calls use(row, vector) for each of them, when they have come.
template <class Stored, class Use>
__device__ __forceinline__ void use_set(uint32_t pieces, uint32_t set, Use use) {
    for (uint32_t rest = set; rest != 0; rest &= rest - 1, pieces += kBytesPiece) {
        use(__ffs(rest) - 1, load_shared_vector<Stored>(pieces));
    }
}

}  // namespace twell

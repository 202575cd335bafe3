// Products of a row of x and rows of a matrix, x . row, by warps.
#pragma once

#include <type_traits>

#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell {

// sum += x . w
template <class Element, class WVector>
__device__ __forceinline__ void accumulate(float& sum, uint4 x_vector, WVector w_vector) {
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
    for (; kLoads > 1 && begin + kLoads * kStep <= d_model; begin += kLoads * kStep) {
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
    return sum_of_warp(sum);
}

// dot_products fetches kDotSteps 16-byte vectors a lane of both rows at once.
constexpr int kDotSteps = 8;
constexpr int kBytesDot = kDotSteps * 2 * kBytesPiece;

// Calls emit(i, x_of(i) . w_of(i)) in one lane for i = 0 ... count - 1, by one warp. `queue` is kSlots x kBytesDot
// bytes of shared memory of this warp's own: there the rows of kSlots products are under way at once, and no compiler
// can delay a load to its use. The order of a sum depends on d_model only. `block_scales`: see block_scales_of; of all
// rows, which lie in one block.
template <class Element, int kSlots, class XOf, class WOf, class Emit>
__device__ __forceinline__ void dot_products(int count, int d_model, uint32_t queue, XOf x_of, WOf w_of, Emit emit,
                                             float const* block_scales = nullptr) {
    using Stored = std::remove_const_t<std::remove_pointer_t<decltype(w_of(0))>>;
    int const lane = threadIdx.x % kWarpSize;
    int const num_vectors = d_model / kVector;
    int const num_chunks = (num_vectors + kDotSteps * kWarpSize - 1) / (kDotSteps * kWarpSize);
    int const num_items = count * num_chunks;
    bool const has_block_scales = sizeof(Stored) == 1 && block_scales != nullptr;
    queue += lane * 16;

    auto const fetch = [&](int item, uint32_t slot) {
        if (item < num_items) {
            int const i = item / num_chunks;
            int const first = (item - i * num_chunks) * (kDotSteps * kWarpSize) + lane;
            Stored const* const w = w_of(i) + first * kVector;
            uint16_t const* const x = x_of(i) + first * kVector;
            // A vector past the end is zero in both rows.
#pragma unroll
            for (int k = 0; k < kDotSteps; ++k) {
                copy_vector_async(slot + k * kBytesPiece, w + k * kWarpSize * kVector,
                                  first + k * kWarpSize < num_vectors);
            }
#pragma unroll
            for (int k = 0; k < kDotSteps; ++k) {
                copy_async_cached(slot + (kDotSteps + k) * kBytesPiece, x + k * kWarpSize * kVector,
                                  first + k * kWarpSize < num_vectors);
            }
        }
        commit_async();
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        fetch(slot, queue + slot * kBytesDot);
    }
    uint32_t slot = queue;
    for (int i = 0, item = 0; i < count; ++i) {
        float parts[4] = {};  // shorter chains of dependent additions
        for (int chunk = 0; chunk < num_chunks; ++chunk, ++item) {
            wait_async<kSlots - 1>();
            if (has_block_scales) {
                int const first = chunk * (kDotSteps * kWarpSize) + lane;
#pragma unroll
                for (int k = 0; k < kDotSteps; ++k) {
                    float sum = 0.0f;
                    accumulate<Element>(sum, load_chunk(slot + (kDotSteps + k) * kBytesPiece),
                                        load_shared_vector<Stored>(slot + k * kBytesPiece));
                    int const vector = min(first + k * kWarpSize, num_vectors - 1);  // those behind it are zeros
                    parts[k % 4] = fmaf(sum, block_scales[vector / (TWELL_SCALE_BLOCK_SIZE / kVector)], parts[k % 4]);
                }
            } else {
#pragma unroll
                for (int k = 0; k < kDotSteps; ++k) {
                    accumulate<Element>(parts[k % 4], load_chunk(slot + (kDotSteps + k) * kBytesPiece),
                                        load_shared_vector<Stored>(slot + k * kBytesPiece));
                }
            }
            fetch(item + kSlots, slot);
            slot = slot == queue + (kSlots - 1) * kBytesDot ? queue : slot + kBytesDot;
        }
        float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (lane == 0) {
            emit(i, sum);
        }
    }
    wait_async<0>();
}

// sums[i] += x . matrix[row of lane i], over kSteps pieces of one vector a lane, from `column` on; the loads of kAtOnce
// rows are issued together. Past `count` the last row is repeated, and the sums are not used.
template <class Element, int kAtOnce, int kSteps, int kRows, class Stored>
__device__ __forceinline__ void add_products(float (&sums)[kRows], uint16_t const* x_row, Stored const* const& matrix,
                                             int const& row_length, int column, uint32_t row, int count) {
    uint4 x_vectors[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        x_vectors[s] = load_vector(x_row + column + s * kWarpColumns);
    }
#pragma unroll
    for (int begin = 0; begin < kRows; begin += kAtOnce) {
        if (begin >= count) {
            break;
        }
        Vector<Stored> w_vectors[kAtOnce][kSteps];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            uint32_t const n = __shfl_sync(0xffffffffu, row, min(begin + r, count - 1));
            Stored const* const w_row = matrix + static_cast<int64_t>(n) * row_length + column;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                w_vectors[r][s] = load_vector(w_row + s * kWarpColumns);
            }
        }
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            float x_values[kVector];
            unpack<Element>(x_values, x_vectors[s]);
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                float w_values[kVector];
                unpack<Element>(w_values, w_vectors[r][s]);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    sums[begin + r] = fmaf(x_values[i], w_values[i], sums[begin + r]);
                }
            }
        }
    }
}

// The sum over the warp of sums[i], given to the lanes from i * (kWarpSize / kRows) on: half of the sums leave a
// lane in each step.
template <int kRows>
__device__ __forceinline__ float reduce_rows(float (&sums)[kRows]) {
    int const lane = threadIdx.x % kWarpSize;
    int distance = kWarpSize / 2;
#pragma unroll
    for (int half = kRows / 2; half > 0; half /= 2, distance /= 2) {
        bool const upper = (lane & distance) != 0;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            float const kept = upper ? sums[i + half] : sums[i];
            float const sent = upper ? sums[i] : sums[i + half];
            sums[i] = kept + __shfl_xor_sync(0xffffffffu, sent, distance);
        }
    }
#pragma unroll
    for (; distance > 0; distance /= 2) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], distance);
    }
    return sums[0];
}

// Columns of dot_rows: a sum over several calls is the same if all but the last have a multiple of that many.
constexpr int kLeastDotColumns = 2 * kWarpColumns;

// By one warp: x . matrix[row] over the columns from `begin` to `end`, for the rows of the first `count` lanes, at most
// kRows, given as reduce_rows says. NOTE: a kernel's parameters come by reference, or the compiler keeps them in
// registers.
template <class Element, int kRows, class Stored>
__device__ __forceinline__ float dot_rows(uint16_t const* x_row, Stored const* const& matrix, int const& row_length,
                                          int begin, int const& end, uint32_t row, int count) {
    int const lane = threadIdx.x % kWarpSize;
    float sums[kRows] = {};
    constexpr int kAtOnce = 4 / static_cast<int>(sizeof(Stored));  // rows, of as many bytes together
    constexpr int kSteps = 2;
    static_assert(kLeastDotColumns == kSteps * kWarpColumns, "else the order of a sum is another one");
    int column = lane * kVector;
    for (; begin + kSteps * kWarpColumns <= end; begin += kSteps * kWarpColumns) {
        add_products<Element, kAtOnce, kSteps>(sums, x_row, matrix, row_length, begin + column, row, count);
    }
#pragma unroll 1
    for (; begin + kWarpColumns <= end; begin += kWarpColumns) {
        add_products<Element, kRows, 1>(sums, x_row, matrix, row_length, begin + column, row, count);
    }
    if (begin < end) {
        // The last piece is not a whole one. A lane that has no vector of it takes another's and forgets the products.
        float kept[kRows];
        bool const inside = begin + column < end;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            kept[i] = sums[i];
        }
        add_products<Element, kRows, 1>(sums, x_row, matrix, row_length, inside ? begin + column : begin, row, count);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            sums[i] = inside ? sums[i] : kept[i];
        }
    }
    return reduce_rows(sums);
}

// The unit of dot products of rows of bytes.
constexpr float kUnitOfBytes = 256.0f;

// dot_rows of a row of x in bytes, in units of kUnitOfBytes: sixteen products at a time are added up in fp16, and for
// that x is scaled by 2^-8, so that no sum of these overflows. Rows are multiples of 16 long.
template <int kRows>
__device__ __forceinline__ float dot_rows_of_bytes(E4m3 const* x_row, E4m3 const* const& matrix, int const& row_length,
                                                   int begin, int const& end, uint32_t row, int count) {
    constexpr int kAtOnce = 4;               // rows
    constexpr int kWords = 2 * kVector / 4;  // of a lane's bytes
    int const lane = threadIdx.x % kWarpSize;
    float sums[kRows] = {};
#pragma unroll 1
    for (int first = begin + lane * (2 * kVector); begin < end; begin += kLeastDotColumns, first += kLeastDotColumns) {
        bool const inside = first < end;
        auto const load = [&](auto load_from, E4m3 const* from) {
            return inside ? load_from(from + first) : make_uint4(0, 0, 0, 0);
        };
        uint4 const x_bytes = load(load_written_vectors, x_row);
        uint32_t const x_words[kWords] = {x_bytes.x, x_bytes.y, x_bytes.z, x_bytes.w};
        __half2 x[2 * kWords];
        __half2 const scale = __half2half2(__ushort_as_half(0x1c00));  // 2^-8
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            uint2 const pairs = e4m3_to_fp16(x_words[i]);
            x[2 * i] = __hmul2(*reinterpret_cast<__half2 const*>(&pairs.x), scale);
            x[2 * i + 1] = __hmul2(*reinterpret_cast<__half2 const*>(&pairs.y), scale);
        }
#pragma unroll
        for (int done = 0; done < kRows; done += kAtOnce) {
            if (done >= count) {
                break;
            }
            uint4 vectors[kAtOnce];
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                uint32_t const n = __shfl_sync(0xffffffffu, row, min(done + r, count - 1));
                vectors[r] = load(load_vectors, matrix + static_cast<int64_t>(n) * row_length);
            }
#pragma unroll
            for (int r = 0; r < kAtOnce; ++r) {
                uint32_t const words[kWords] = {vectors[r].x, vectors[r].y, vectors[r].z, vectors[r].w};
                __half2 part;
#pragma unroll
                for (int i = 0; i < kWords; ++i) {
                    uint2 const pairs = e4m3_to_fp16(words[i]);
                    __half2 const low = *reinterpret_cast<__half2 const*>(&pairs.x);
                    __half2 const high = *reinterpret_cast<__half2 const*>(&pairs.y);
                    part = i == 0 ? __hmul2(x[0], low) : __hfma2(x[2 * i], low, part);
                    part = __hfma2(x[2 * i + 1], high, part);
                }
                float2 const both = __half22float2(part);
                sums[done + r] += both.x + both.y;
            }
        }
    }
    return reduce_rows(sums);
}

// Multiplies kTokens rows of x by rows of a matrix, those of a set counted from `first_row` on, kRows at once, and
// leaves each warp's part of the sums: parts(token) is [rows][kWarps]. By a CTA whose threads have a vector of each
// row: x_of(token) gives that of x, zeros behind the last one.
template <class Element, int kTokens, int kRows, int kWarps, class Stored, class XOf, class Parts>
__device__ __forceinline__ void dot_set(XOf x_of, Stored const* matrix, int row_length, int first_row, uint32_t set,
                                        Parts parts) {
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const k = static_cast<int>(threadIdx.x) * kVector;
    bool const exists = k < row_length;
    Stored const* const rows = matrix + static_cast<int64_t>(first_row) * row_length + k;
    while (set != 0) {
        Vector<Stored> weights[kRows];
        uint32_t rest = set;
#pragma unroll
        for (int r = 0; r < kRows; ++r, rest &= rest - 1) {
            weights[r] = load_vector_if(rows + static_cast<int64_t>(__ffs(rest) - 1) * row_length, exists && rest != 0);
        }
        float sums[kTokens][kRows] = {};
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            uint4 const values = x_of(t);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                accumulate<Element>(sums[t][r], values, weights[r]);
            }
        }
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    sums[t][r] += __shfl_xor_sync(0xffffffffu, sums[t][r], distance);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r, set &= set - 1) {
            if (set != 0 && lane == 0) {
#pragma unroll
                for (int t = 0; t < kTokens; ++t) {
                    parts(t)[(__ffs(set) - 1) * kWarps + warp] = sums[t][r];
                }
            }
        }
    }
}

}  // namespace twell

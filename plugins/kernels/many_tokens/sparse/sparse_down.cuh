// Down projection of the lists that sparse_up.cuh leaves, for every GPU from sm_80 on: y = sum of h[n] Wd[n, :] + bd.
//
// A warp computes rows of y in kWarpColumns columns, a vector a lane. The rows with the most neurons come first, and
// all warps of a CTA share out the neurons of such a row. Of the others a warp takes a heavy and a light one and waits
// for no other warp. The columns that a CTA has are a slab; all rows of one slab come before those of the next, so that
// the L2 cache holds the weights in use. The order of a sum follows from the number of neurons: results are bitwise
// repeatable.
#pragma once

#include "device/block.cuh"
#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/epilogue.cuh"
#include "device/gather_rows.cuh"
#include "device/vector.cuh"
#include "format/sparse_rows.cuh"

namespace twell::sparse_down {

constexpr int kMaxWarps = 4;              // of a CTA, side by side in one row
constexpr int kMinBlocks = 7;             // a multiprocessor: the step is bound by loads in flight
constexpr int kRowsAtOnce = 8;            // of Wd, whose loads are issued together
constexpr int kRowsAtEnd = 4;             // the same, for the last rows
constexpr uint32_t kNoRow = 0xffffffffu;  // in place of a number of non-zeros

template <class Stored>
struct ParamsOf : BlockTensorsOf<Stored> {
    Schedule schedule;
    SparseRows rows;
    int num_tiles;
    uint32_t tokens;
    uint32_t warps_per_row;
    uint32_t ctas_per_row;  // in which these are
    bool overlaps;          // where there are dense rows: the launch before, which begins after all others
};

// This lane's entry of kWarpSize of a list of `count`, or the last one.
__device__ __forceinline__ SparseEntry load_entry(SparseEntry const* list, int begin, int count) {
    int const lane = threadIdx.x % kWarpSize;
    return count > 0 ? list[min(begin + lane, count - 1)] : SparseEntry{};
}

// sums += h Wd[n, columns] for a list, whose first kWarpSize entries are in `entry`.
template <class Element, class Stored>
__device__ __forceinline__ void add_list(float (&sums)[kVector], ParamsOf<Stored> const& params,
                                         SparseEntry const* list, int count, SparseEntry entry, int column) {
    // Lanes past the last column read the last vector and store nothing.
    Stored const* const w_down = params.w_down + min(column, params.d_out - kVector);
    for (int begin = 0; begin < count; begin += kWarpSize) {
        if (begin != 0) {
            entry = load_entry(list, begin, count);
        }
        int const listed = min(count - begin, kWarpSize);
        int done = 0;
        if constexpr (ParamsOf<Stored>::kHasScales) {
            int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
            ScaledFactors const factors(lane < listed ? entry.h : 0.0f);
            for (; done + kRowsAtOnce <= listed; done += kRowsAtOnce) {
                gather_bytes_of_lanes<kRowsAtOnce>(sums, w_down, params.d_out, entry.neuron, factors, done,
                                                   kRowsAtOnce);
            }
            for (; done < listed; done += kRowsAtEnd) {
                gather_bytes_of_lanes<kRowsAtEnd>(sums, w_down, params.d_out, entry.neuron, factors, done,
                                                  min(listed - done, kRowsAtEnd));
            }
        } else {
            for (; done + kRowsAtOnce <= listed; done += kRowsAtOnce) {
                gather_of_lanes<Element, kRowsAtOnce>(sums, w_down, params.d_out, entry, done, kRowsAtOnce);
            }
            for (; done < listed; done += kRowsAtEnd) {
                gather_of_lanes<Element, kRowsAtEnd>(sums, w_down, params.d_out, entry, done,
                                                     min(listed - done, kRowsAtEnd));
            }
        }
    }
}

// Adds bias and residual, which has been loaded, and rounds y, once.
template <class Element, class Params>
__device__ __forceinline__ void store_y(Params const& params, int64_t row, int column, float (&sums)[kVector],
                                        uint4 residual) {
    if (column >= params.d_out) {
        return;
    }
    add_bias<Element>(sums, params, column);
    if (params.residual != nullptr) {
        float values[kVector];
        unpack<Element>(values, residual);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            sums[i] += values[i];
        }
    }
    store_vector<Element>(params.y + row * params.d_out + column, sums);
}

// The sum over the warps of a CTA, in their order, for the first warp.
__device__ __forceinline__ void reduce(float (&sums)[kVector]) {
    __shared__ float partial[kMaxWarps][kVector][kWarpSize];
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    __syncthreads();  // the sums of the row before have been read
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        partial[warp][i][lane] = sums[i];
    }
    __syncthreads();
    for (int w = 1; warp == 0 && w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            sums[i] += partial[w][i][lane];
        }
    }
}

template <class Params>
__device__ __forceinline__ SparseEntry const* list_of(Params const& params, RowWork work) {
    return work.count < static_cast<uint32_t>(params.schedule.listed_from)
               ? list_in_words(params.schedule, params.num_tiles, work.row)
               : params.rows.list(work.row);
}

template <class Element, class Stored>
__global__ void __launch_bounds__(kMaxWarps* kWarpSize, kMinBlocks) down_kernel(ParamsOf<Stored> const params) {
    uint32_t const lane = threadIdx.x % kWarpSize;
    // Told to be the same in all lanes: then it takes no vector register, and nothing is spilled.
    uint32_t const warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpSize, 0);
    uint32_t const warps = blockDim.x / kWarpSize;
    // The places of the order: dense rows, rows that are split, and the others, which come in pairs. There are fewer
    // than 2^32 of anything here, since y fits the device's memory.
    uint32_t const split_begin = __ldcg(&params.schedule.header->heavy_count);
    uint32_t const split_end = __ldcg(&params.schedule.header->split_end);
    uint32_t const num_split = (split_end - split_begin) * warps;
    uint32_t const items_per_slab = num_split + (params.tokens - split_end + 1) / 2;
    uint32_t const num_items = items_per_slab * params.ctas_per_row;
    if (ends_early(num_items == 0)) {
        return;
    }
    if (!params.overlaps || split_begin == 0) {
        wait_for_previous_launch();
    }
    allow_dependent_launch();
    for (uint32_t i = blockIdx.x; i < num_items; i += gridDim.x) {
        uint32_t const slab = i / items_per_slab;
        uint32_t const in_slab = i - slab * items_per_slab;
        bool const split = in_slab < num_split;
        uint32_t const place = split ? in_slab / warps : in_slab - num_split;
        uint32_t const slice = slab * warps + (split ? in_slab % warps : warp);
        int const column = static_cast<int>(slice * kWarpColumns + lane * kVector);
        if (slice >= params.warps_per_row) {
            continue;
        }
        RowWork work = params.schedule.row_order[split ? split_begin + place : split_end + place];
        uint32_t const other = params.tokens - 1 - place;
        bool const alone = split || other == split_end + place;
        RowWork const next = alone ? RowWork{0, kNoRow} : params.schedule.row_order[other];
        uint32_t const begin = split ? work.count * warp / warps : 0;
        uint32_t const end = split ? work.count * (warp + 1) / warps : work.count;
        SparseEntry const* list = list_of(params, work) + begin;
        int count = static_cast<int>(end - begin);
        SparseEntry entry = load_entry(list, 0, count);
        SparseEntry const next_entry = load_entry(list_of(params, next), 0, static_cast<int>(next.count));
#pragma unroll 1
        for (int k = 0; k < 2; ++k) {
            if (work.count != kNoRow) {
                bool const stores = !split || warp == 0;
                // It comes while rows of Wd do.
                bool const adds = params.residual != nullptr && stores && column < params.d_out;
                uint4 const residual = load_written_vector_if(
                    params.residual + static_cast<int64_t>(work.row) * params.d_out + column, adds);
                float sums[kVector] = {};
                add_list<Element>(sums, params, list, count, entry, column);
                if (split) {
                    reduce(sums);
                }
                if (stores) {
                    store_y<Element>(params, work.row, column, sums, residual);
                }
            }
            // The first entries of the second row came meanwhile.
            work = next;
            list = list_of(params, work);
            count = static_cast<int>(next.count);
            entry = next_entry;
        }
    }
    // A launch that waits for the end of this one takes it for the end of those before.
    if (blockIdx.x == 0) {
        wait_for_previous_launch();
    }
}

}  // namespace twell::sparse_down

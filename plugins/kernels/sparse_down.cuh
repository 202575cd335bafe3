// Down projection of the lists that sparse_up.cuh leaves, for every GPU from sm_80 on: y = sum of h[n] Wd[n, :] + bd.
//
// A warp computes rows of y in kWarpColumns columns, a vector a lane. The rows with the most neurons come first, and
// all warps of a CTA share out the neurons of such a row. Of the others a warp takes a heavy and a light one and waits
// for no other warp. The columns that a CTA has are a slab; all rows of one slab come before those of the next, so that
// the L2 cache holds the weights in use. The order of a sum follows from the number of neurons: results are bitwise
// repeatable.
#ifndef TWELL_KERNELS_SPARSE_DOWN_CUH_
#define TWELL_KERNELS_SPARSE_DOWN_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "sparse_rows.h"
#include "vector.cuh"

namespace twell::sparse_down {

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSlabColumns = 128;
constexpr int kSlabLanes = kSlabColumns / kVector;
constexpr int kRowsPerLoad = kWarpSize / kSlabLanes;
constexpr int kSub = 2;
constexpr int kPiece = 2 * kRowsPerLoad;  // entries of a piece: two a lane
constexpr int kBatch = kPiece * kSub;

struct Params {
    uint16_t const* w_down;  // [d_ff, d_out]
    uint16_t const* b_down;  // [d_out] or null
    uint16_t* y;             // [tokens, d_out]
    Schedule schedule;
    SparseRows rows;
    int d_out;
    uint32_t tokens;
    uint32_t num_slabs;
    uint32_t slabs_at_once;
};

__device__ __forceinline__ uint4 load_vector_if(char const* pointer, bool wanted) {
    uint4 vector;
    asm volatile(
        "{.reg .pred p; setp.ne.s32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0;"
        "@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
        : "=&r"(vector.x), "=&r"(vector.y), "=&r"(vector.z), "=&r"(vector.w)
        : "l"(pointer), "r"(static_cast<int>(wanted)));
    return vector;
}

template <class Element>
__device__ __forceinline__ void add(float (&sums)[kVector], float h, uint4 vector) {
    float values[kVector];
    unpack<Element>(values, vector);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        sums[i] = fmaf(h, values[i], sums[i]);
    }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) down_kernel(Params const params) {
    __shared__ uint32_t next;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const heavy = __ldcg(&params.schedule.header->heavy_count);
    if (ends_early(heavy == params.tokens)) {
        return;
    }
    uint32_t const num_rows = params.tokens - heavy;
    wait_for_previous_launch();
    allow_dependent_launch();
    uint32_t const parts = gridDim.x / params.slabs_at_once;
    uint32_t const part = blockIdx.x / params.slabs_at_once;
    for (uint32_t slab = blockIdx.x % params.slabs_at_once; slab < params.num_slabs; slab += params.slabs_at_once) {
        __syncthreads();
        if (threadIdx.x == 0) {
            next = 0;
        }
        __syncthreads();
        if (part >= parts) {
            continue;
        }
        uint32_t const row_bytes = params.d_out * 2;
        int const column = slab * kSlabColumns + lane % kSlabLanes * kVector;
        char const* w = reinterpret_cast<char const*>(params.w_down + min(column, params.d_out - kVector));
        asm volatile("" : "+l"(w));
        auto const take = [&]() {
            uint32_t i = 0;
            if (lane == 0) {
                i = atomicAdd(&next, 1u);
            }
            i = __shfl_sync(0xffffffffu, i, 0) * parts + part;
            uint2 work = make_uint2(0xffffffffu, 0);
            if (i < num_rows) {
                work = __ldcg(reinterpret_cast<uint2 const*>(params.schedule.row_order + heavy + i));
            }
            return work;
        };
        auto const count_of = [](uint2 work) { return work.y == kNotListed ? 0 : static_cast<int>(work.y); };
        auto const list_of = [&](uint2 work) {
            return reinterpret_cast<char const*>(params.rows.list(work.x)) + lane / kSlabLanes * 16;
        };
        uint4 entries[kSub];
        auto const load_entries = [&](char const* list, int count) {
#pragma unroll
            for (int t = 0; t < kSub; ++t) {
                if (kPiece * t < count) {
                    entries[t] = __ldcg(reinterpret_cast<uint4 const*>(list + kPiece * t * 8));
                }
            }
        };
        uint2 work = take();
        uint2 work1 = take();
        char const* list = list_of(work);
        load_entries(list, count_of(work));
        while (work.x != 0xffffffffu) {
            uint2 const work2 = take();
            float sums[kVector] = {};
            int left = count_of(work);
            for (; left > kBatch; left -= kBatch) {
                uint4 vectors[kSub][2];
                float h[kSub][2];
#pragma unroll
                for (int t = 0; t < kSub; ++t) {
                    vectors[t][0] = load_vector(reinterpret_cast<uint16_t const*>(w + static_cast<uint64_t>(entries[t].x) * row_bytes));
                    vectors[t][1] = load_vector(reinterpret_cast<uint16_t const*>(w + static_cast<uint64_t>(entries[t].z) * row_bytes));
                    h[t][0] = __uint_as_float(entries[t].y);
                    h[t][1] = __uint_as_float(entries[t].w);
                }
                list += kBatch * 8;
                load_entries(list, left - kBatch);
#pragma unroll
                for (int t = 0; t < kSub; ++t) {
                    add<Element>(sums, h[t][0], vectors[t][0]);
                    add<Element>(sums, h[t][1], vectors[t][1]);
                }
            }
            {
                uint4 vectors[kSub][2];
                float h[kSub][2];
                int const own = left - lane / kSlabLanes * 2;
#pragma unroll
                for (int t = 0; t < kSub; ++t) {
                    if (kPiece * t < left) {
                        vectors[t][0] = load_vector_if(w + static_cast<uint64_t>(entries[t].x) * row_bytes, kPiece * t < own);
                        vectors[t][1] = load_vector_if(w + static_cast<uint64_t>(entries[t].z) * row_bytes, kPiece * t + 1 < own);
                        h[t][0] = kPiece * t < own ? __uint_as_float(entries[t].y) : 0.0f;
                        h[t][1] = kPiece * t + 1 < own ? __uint_as_float(entries[t].w) : 0.0f;
                    }
                }
                list = list_of(work1);
                load_entries(list, count_of(work1));
#pragma unroll
                for (int t = 0; t < kSub; ++t) {
                    if (kPiece * t < left) {
                        add<Element>(sums, h[t][0], vectors[t][0]);
                        add<Element>(sums, h[t][1], vectors[t][1]);
                    }
                }
            }
            bool const upper = lane >= kSlabLanes;
            float owned[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                owned[i] = (upper ? sums[i + 4] : sums[i]) + __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[i + 4], kSlabLanes);
            }
            if (work.y != kNotListed && column < params.d_out) {
                int const at = column + (upper ? 4 : 0);
                if (params.b_down != nullptr) {
                    uint2 const words = *reinterpret_cast<uint2 const*>(params.b_down + at);
                    float2 const low = Element::to_float2(words.x);
                    float2 const high = Element::to_float2(words.y);
                    owned[0] += low.x;
                    owned[1] += low.y;
                    owned[2] += high.x;
                    owned[3] += high.y;
                }
                *reinterpret_cast<uint2*>(params.y + static_cast<int64_t>(work.x) * params.d_out + at) =
                    make_uint2(Element::from_float2(owned[0], owned[1]), Element::from_float2(owned[2], owned[3]));
            }
            work = work1;
            work1 = work2;
        }
    }
}

}  // namespace twell::sparse_down

#endif  // TWELL_KERNELS_SPARSE_DOWN_CUH_

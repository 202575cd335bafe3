// Device code of the dense path that does not depend on how products are computed.
//
// Between its up and down projections there is h [dense rows, num_tiles * TWELL_TILE], in the element type. The device
// alone knows which rows are dense: grids are fixed, and CTAs that find nothing to do leave.
//   all rows   h takes the place of g in the spilled matrix, x is read where it is
//   a part     gather.cuh has copied x of the dense rows to where they are neighbours, and so is h
#pragma once

#include "device/element.cuh"
#include "format/schedule.cuh"

namespace twell::dense {

enum class Projection { kUp, kDown };

// The rows, on the device. NOTE: the kernels before have let this one start when the schedule was there, so the count
// may be read before wait_for_previous_launch(). The copy in L1 may be older.
struct View {
    int count;  // of dense rows
    bool all;

    __device__ __forceinline__ View(Schedule const& schedule, int64_t tokens, bool all_rows)
        : count(static_cast<int>(all_rows ? tokens : __ldcg(&schedule.header->heavy_count))), all(count == tokens) {}

    __device__ __forceinline__ int row_of(Schedule const& schedule, int position) const {
        return all ? position : static_cast<int>(schedule.row_order[position].row);
    }
};

// h of two neurons; where g is 0, so is h, whatever u is.
template <class Element>
__device__ __forceinline__ uint32_t multiply_pair(uint32_t g_pair, uint32_t u_pair, bool relu_on_up) {
    float2 const g = Element::to_float2(g_pair);
    float2 u = Element::to_float2(u_pair);
    if (relu_on_up) {
        u.x = u.x <= 0.0f ? 0.0f : u.x;  // NaN is kept
        u.y = u.y <= 0.0f ? 0.0f : u.y;
    }
    return Element::from_float2(g.x == 0.0f ? 0.0f : g.x * u.x, g.y == 0.0f ? 0.0f : g.y * u.y);
}

// The same for eight.
template <class Element>
__device__ __forceinline__ uint4 multiply_chunk(uint4 g, uint4 u, bool relu_on_up) {
    return make_uint4(multiply_pair<Element>(g.x, u.x, relu_on_up), multiply_pair<Element>(g.y, u.y, relu_on_up),
                      multiply_pair<Element>(g.z, u.z, relu_on_up), multiply_pair<Element>(g.w, u.w, relu_on_up));
}

}  // namespace twell::dense

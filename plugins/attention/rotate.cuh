// Rotary positions: the halves of a head's row are rotated into each other.
#pragma once

#include "device/element.cuh"

namespace twell {

// Eight neighbours of a row times their cosines, plus their partners in the other half times their sines; in the first
// half the partners are negated. In fp32, rounded once.
template <class Element>
__device__ __forceinline__ uint4 rotate(uint4 row, uint4 partners, uint4 cosines, uint4 sines, bool is_first_half) {
    auto const pair = [=](uint32_t x, uint32_t y, uint32_t cosine, uint32_t sine) {
        float2 const own = Element::to_float2(x);
        float2 const other = Element::to_float2(y ^ (is_first_half ? kSigns : 0));
        float2 const cos = Element::to_float2(cosine);
        float2 const sin = Element::to_float2(sine);
        return Element::from_float2(own.x * cos.x + other.x * sin.x, own.y * cos.y + other.y * sin.y);
    };
    return make_uint4(pair(row.x, partners.x, cosines.x, sines.x), pair(row.y, partners.y, cosines.y, sines.y),
                      pair(row.z, partners.z, cosines.z, sines.z), pair(row.w, partners.w, cosines.w, sines.w));
}

}  // namespace twell

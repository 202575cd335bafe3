// Scales of blocks where a sum is brought from the scale of one block to that of the next.
#pragma once

namespace twell {

// Not 0, by which nothing can be divided. Of a block whose scale is 0, and which therefore is 0, so little is left that
// it does not count.
__device__ __forceinline__ float nonzero_scale(float scale) {
    constexpr float kTiny = 1e-20f;
    return scale == 0.0f ? kTiny : scale;
}

}  // namespace twell

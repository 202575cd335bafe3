// Shared by the kernels of a linear layer: where results go.
#pragma once

#include <stdint.h>

#include "device/norm.cuh"
#include "twell/twell.h"

namespace twell::linear {

using namespace norm;

// The outputs, one beside the other: output i has the columns from begins[i] on, of those of the weight's rows. An
// output that is not there begins behind all columns.
struct Outputs {
    uint16_t* y[TWELL_MAX_SPLITS];  // [tokens, widths[i]]
    int begins[TWELL_MAX_SPLITS];
    int widths[TWELL_MAX_SPLITS];

    // Of a token and one of all columns.
    __device__ __forceinline__ uint16_t* place(int64_t token, int column) const {
        uint16_t* pointer = y[0];
        int begin = 0;
        int width = widths[0];
#pragma unroll
        for (int i = 1; i < TWELL_MAX_SPLITS; ++i) {
            if (column >= begins[i]) {
                pointer = y[i], begin = begins[i], width = widths[i];
            }
        }
        return pointer + token * width + (column - begin);
    }
};

}  // namespace twell::linear

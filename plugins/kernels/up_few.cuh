// Up projection of a packed matrix, for more tokens than gate_up_few.cuh takes and too few to fill the device with one
// CTA a token: h[t, n] of the active neurons, and their masks, for down_few.cuh.
//
// One CTA takes a few tiles of one token, so that a token with many active neurons is spread over many CTAs.
#ifndef TWELL_KERNELS_UP_FEW_CUH_
#define TWELL_KERNELS_UP_FEW_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "gate_up_few.cuh"
#include "twell/twell.h"

namespace twell::up_few {

using gate_up_few::dot_products;
using gate_up_few::kBytesDot;
using gate_up_few::kMaskBits;
using gate_up_few::prefetch_row;
using gate_up_few::shared_address;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTilesPerCta = 2;
constexpr int kNeurons = kTilesPerCta * TWELL_TILE;
constexpr int kWords = kNeurons / kMaskBits;
constexpr int kDotSlots = 1;  // shared memory for more CTAs is worth more

constexpr int kSharedBytes = kWarps * kDotSlots * kBytesDot;

struct Params {
    uint16_t const* x;       // [tokens, d_model]
    uint16_t const* w_gate;  // [d_ff, d_model], for tiles that overflowed
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* w_up;    // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;    // [d_ff] or null
    uint16_t const* w_down;  // [d_ff, d_out]; only brought closer
    uint32_t const* packed;  // [tokens, num_tiles * words_per_tile]
    uint32_t* masks;         // [tokens, num_mask_words]
    float* h;                // [tokens, d_ff], written where a neuron is active
    int d_model;
    int d_ff;
    int d_out;
    int num_tiles;
    int words_per_tile;
    int num_mask_words;
    bool relu_on_up;  // dReLU
    Activation act;
};

struct Shared {
    uint16_t neuron[kNeurons];  // the active ones, in any order, as offsets to the CTA's first
    uint16_t g[kNeurons];       // and their gate values
    uint32_t mask[kWords];
    int count;
};

template <class Element>
__global__ void __launch_bounds__(kThreads) up_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Shared shared;
    wait_for_previous_launch();
    allow_dependent_launch();

    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int64_t const token = blockIdx.y;
    int const tile_begin = blockIdx.x * kTilesPerCta;
    int const neuron_begin = tile_begin * TWELL_TILE;
    uint16_t const* const x = params.x + token * params.d_model;
    uint32_t const queue = shared_address(dynamic) + warp * (kDotSlots * kBytesDot);
    if (thread < kWords) {
        shared.mask[thread] = 0;
    }
    if (thread == 0) {
        shared.count = 0;
    }
    __syncthreads();

    auto const add = [&](int position, int m, uint16_t bits) {
        shared.neuron[position] = static_cast<uint16_t>(m);
        shared.g[position] = bits;
        atomicOr(&shared.mask[m / kMaskBits], 1u << (m % kMaskBits));
    };
    int counts[kTilesPerCta];
#pragma unroll
    for (int t = 0; t < kTilesPerCta; ++t) {
        int const tile_idx = min(tile_begin + t, params.num_tiles - 1);
        counts[t] = static_cast<int>(params.packed[(token * params.num_tiles + tile_idx) * params.words_per_tile]);
    }
#pragma unroll
    for (int t = 0; t < kTilesPerCta; ++t) {
        int const tile_idx = tile_begin + t;
        if (tile_idx >= params.num_tiles) {
            break;
        }
        uint32_t const* const words = params.packed + (token * params.num_tiles + tile_idx) * params.words_per_tile;
        int const count = counts[t];
        if (count < params.words_per_tile) {
            if (warp == t) {
                int begin = 0;
                if (lane == 0) {
                    begin = atomicAdd(&shared.count, count);
                }
                begin = __shfl_sync(0xffffffffu, begin, 0);
                for (int i = lane; i < count; i += kWarpSize) {
                    uint32_t const word = words[1 + i];
                    add(begin + i, static_cast<int>(word & 0xffffu) - neuron_begin, static_cast<uint16_t>(word >> 16));
                }
            }
        } else {
            // The tile overflowed: g is computed again.
            int const first = tile_idx * TWELL_TILE;
            int const num_columns = min(params.d_ff - first, TWELL_TILE);
            dot_products<Element, kDotSlots>(
                (num_columns - warp + kWarps - 1) / kWarps, params.d_model, queue, [&](int) { return x; },
                [&](int i) { return params.w_gate + static_cast<int64_t>(first + warp + i * kWarps) * params.d_model; },
                [&](int i, float sum) {
                    int const n = first + warp + i * kWarps;
                    float const z = params.b_gate == nullptr ? sum : sum + Element::to_float(params.b_gate[n]);
                    uint16_t const bits = activate<Element>(z, params.act);
                    if (is_nonzero(bits)) {
                        add(atomicAdd(&shared.count, 1), n - neuron_begin, bits);
                    }
                });
        }
    }
    __syncthreads();

    int const word = neuron_begin / kMaskBits + thread;
    if (thread < kWords && word < params.num_mask_words) {
        params.masks[token * params.num_mask_words + word] = shared.mask[thread];
    }
    // Neurons are listed in whatever order they were found; each has its own place in h.
    int const count = (shared.count - warp + kWarps - 1) / kWarps;  // this warp's
    auto const neuron_of = [&](int i) { return static_cast<int64_t>(neuron_begin) + shared.neuron[warp + i * kWarps]; };
    auto const finish = [&](int i, float sum) {
        int64_t const n = neuron_of(i);
        float u = params.b_up == nullptr ? sum : sum + Element::to_float(params.b_up[n]);
        u = params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
        params.h[token * params.d_ff + n] = Element::to_float(shared.g[warp + i * kWarps]) * u;
    };
    for (int i = 0; i < count; ++i) {
        prefetch_row(params.w_down + neuron_of(i) * params.d_out, params.d_out);
        if (params.w_up == nullptr && lane == 0) {
            finish(i, 1.0f);
        }
    }
    if (params.w_up != nullptr) {
        dot_products<Element, kDotSlots>(
            count, params.d_model, queue, [&](int) { return x; },
            [&](int i) { return params.w_up + neuron_of(i) * params.d_model; }, finish);
    }
}

}  // namespace twell::up_few

#endif  // TWELL_KERNELS_UP_FEW_CUH_

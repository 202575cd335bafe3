// Up projection of what is active, for every GPU from sm_80 on: h[n] = g[n] (x . Wu[n] + bu[n]), into a list per row.
//
// One CTA takes a unit: up to kUnitNonzeros neighbouring entries of one row. Its warps share them out and do not wait
// for each other; a warp keeps its part of x in registers for all its neurons. Each sum has one owner and one order, so
// results are bitwise repeatable and do not depend on what else is in a call.
#ifndef TWELL_KERNELS_SPARSE_UP_CUH_
#define TWELL_KERNELS_SPARSE_UP_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "problem.cuh"
#include "schedule.h"
#include "vector.cuh"

namespace twell::sparse_up {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMinBlocks = 6;  // a multiprocessor: the step is bound by loads in flight
constexpr int kAtOnce = 2;     // neurons, whose loads are issued together
// A warp's share of a unit.
constexpr int kNeurons = static_cast<int>(kUnitNonzeros) / kWarps;

struct Params {
    uint16_t const* x;     // [tokens, d_model]
    uint16_t const* w_up;  // [d_ff, d_model], null in a plain block: then h = g
    uint16_t const* b_up;  // [d_ff] or null
    Schedule schedule;
    int d_model;
    int num_tiles;
    bool relu_on_up;  // dReLU
};

inline Params params_for(twell_problem const& problem, twell_tensors const& tensors, Schedule const& schedule) {
    return {static_cast<uint16_t const*>(tensors.x),    static_cast<uint16_t const*>(tensors.w_up),
            static_cast<uint16_t const*>(tensors.b_up), schedule,
            problem.d_model,                            num_tiles(problem),
            problem.activation == TWELL_DRELU};
}

// sums[i] += x . Wu[neuron of lane i], over kSteps pieces of one vector a lane, from `column` on; kAtOnce neurons'
// loads are issued together. Past `count` the last neuron is repeated, and the sums are not used.
template <class Element, int kAtOnce, int kSteps>
__device__ __forceinline__ void add_products(float (&sums)[kNeurons], Params const& params, uint16_t const* x_row,
                                             int column, uint32_t neuron, int count) {
    uint4 x_vectors[kSteps];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        x_vectors[s] = load_vector(x_row + column + s * kWarpColumns);
    }
#pragma unroll
    for (int begin = 0; begin < kNeurons; begin += kAtOnce) {
        if (begin >= count) {
            break;
        }
        uint4 w_vectors[kAtOnce][kSteps];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            uint32_t const n = __shfl_sync(0xffffffffu, neuron, min(begin + r, count - 1));
            uint16_t const* const w_row = params.w_up + static_cast<int64_t>(n) * params.d_model + column;
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

// The sum over the warp of sums[i], given to the lanes from i * (kWarpSize / kNeurons) on: half of the sums leave a
// lane in each step.
__device__ __forceinline__ float reduce(float (&sums)[kNeurons]) {
    int const lane = threadIdx.x % kWarpSize;
    int distance = kWarpSize / 2;
#pragma unroll
    for (int half = kNeurons / 2; half > 0; half /= 2, distance /= 2) {
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

// By one warp: x . Wu[n] for the neurons of the first `count` lanes, given as `reduce` says. Loads of kAtOnce neurons are
// issued together.
template <class Element, int kAtOnce>
__device__ __forceinline__ float project(Params const& params, int64_t row, uint32_t neuron, int count) {
    int const lane = threadIdx.x % kWarpSize;
    uint16_t const* const x_row = params.x + row * params.d_model;
    float sums[kNeurons] = {};
    constexpr int kSteps = 2;
    int column = lane * kVector;
    int begin = 0;
    for (; begin + kSteps * kWarpColumns <= params.d_model; begin += kSteps * kWarpColumns) {
        add_products<Element, kAtOnce, kSteps>(sums, params, x_row, begin + column, neuron, count);
    }
#pragma unroll 1
    for (; begin + kWarpColumns <= params.d_model; begin += kWarpColumns) {
        add_products<Element, kNeurons, 1>(sums, params, x_row, begin + column, neuron, count);
    }
    if (begin < params.d_model) {
        // The last piece is not a whole one. A lane that has no vector of it takes another's and forgets the products.
        float kept[kNeurons];
        bool const inside = begin + column < params.d_model;
#pragma unroll
        for (int i = 0; i < kNeurons; ++i) {
            kept[i] = sums[i];
        }
        add_products<Element, kNeurons, 1>(sums, params, x_row, inside ? begin + column : begin, neuron, count);
#pragma unroll
        for (int i = 0; i < kNeurons; ++i) {
            sums[i] = inside ? sums[i] : kept[i];
        }
    }
    return reduce(sums);
}

// One of kWarps shares of a unit: pairs of neurons are shared out, for the loads of two are issued together.
struct Share {
    int64_t row;
    uint32_t position;
    uint32_t listed;
    int begin;
    int count;

    __device__ __forceinline__ Share(Unit unit, int share)
        : row(unit.row), position(unit.position), listed(unit.listed) {
        int const in_unit = unit.range == kNoRange ? 0 : unit.count();
        int const pairs = (in_unit + 1) / 2;
        int const first = 2 * (pairs * share / kWarps);
        begin = unit.begin() + first;
        count = min(2 * (pairs * (share + 1) / kWarps), in_unit) - first;
    }

    __device__ __forceinline__ SparseList list(Params const& params) const {
        return params.schedule.list(position, listed, max_listed(params.num_tiles));
    }

    // The packed word of this lane's entry.
    __device__ __forceinline__ uint32_t load_word(Params const& params) const {
        int const lane = threadIdx.x % kWarpSize;
        return lane < count ? list(params)[begin + lane].word : 0;
    }
};

// By one warp: h of a share whose words its lanes have. An entry becomes h and what word_of gives for its word.
template <class Element, int kAtOnce, class WordOf>
__device__ __forceinline__ void compute(Params const& params, Share const& share, uint32_t word, WordOf word_of) {
    if (share.count <= 0) {
        return;
    }
    int const lane = threadIdx.x % kWarpSize;
    SparseList const list = share.list(params);
    if (params.w_up == nullptr) {
        if (lane < share.count) {
            list[share.begin + lane] = {word_of(word), Element::to_float(static_cast<uint16_t>(word >> 16))};
        }
        return;
    }
    float u = project<Element, kAtOnce>(params, share.row, word & 0xffffu, share.count);
    int const owned = lane / (kWarpSize / kNeurons);
    uint32_t const owned_word = __shfl_sync(0xffffffffu, word, owned);
    float const owned_g = Element::to_float(static_cast<uint16_t>(owned_word >> 16));
    if (lane % (kWarpSize / kNeurons) == 0 && owned < share.count) {
        u += params.b_up == nullptr ? 0.0f : Element::to_float(params.b_up[owned_word & 0xffffu]);
        // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here. NaN is kept.
        list[share.begin + owned] = {word_of(owned_word), owned_g * (params.relu_on_up && u <= 0.0f ? 0.0f : u)};
    }
}

template <class Element>
__global__ void __launch_bounds__(kThreads, kMinBlocks) up_kernel(Params const params) {
    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, as the next kernels begin with the schedule
    uint32_t const num_units = params.schedule.header->unit_count;
    for (uint32_t i = blockIdx.x; i < num_units; i += gridDim.x) {
        Share const share(params.schedule.units[i], threadIdx.x / kWarpSize);
        compute<Element, kAtOnce>(params, share, share.load_word(params), [](uint32_t word) { return word; });
    }
}

}  // namespace twell::sparse_up

#endif  // TWELL_KERNELS_SPARSE_UP_CUH_

// Which neurons are hot, by a sample of the rows that count_kernel takes, and what the product needs of them: in
// order_kernel.
#pragma once

#include "device/vector.cuh"
#include "many_tokens/chunks/hot.h"

namespace twell::hot {

// A neuron that is active in fewer rows of the sample is not hot.
constexpr uint32_t kFewestRows = 8;
// The product is worth its time if the sample's rows have kWorthPairs pairs with hot neurons on average, and these are
// a kWorthPart-th of all pairs: by chance some neurons are in the sample more often than others. Measured on an H200,
// see benchmarks/LOG.md.
constexpr uint32_t kWorthPairs = 5;
constexpr uint32_t kWorthPart = 4;

constexpr int kBins = 256;

template <int kMostWords>
struct Shared {
    uint32_t bins[kBins];  // neurons by their active rows of the sample, from kFewestRows on; 0 at first
    uint32_t pairs;        // of the sample; 0 at first
    uint32_t threshold;    // the fewest active rows of the sample of a hot neuron
    uint32_t of_warps[kWarpSize];
    HotWord words[kMostWords];
    uint32_t neurons[kMostHot];
    uint32_t count;
};

__device__ __forceinline__ bool is_sampled(HotNeurons const& hot, int64_t row) {
    return hot.sampled != nullptr && static_cast<uint32_t>(row) % static_cast<uint32_t>(hot.sample_step) == 0;
}

// Counts the neurons of a tile's entries.
__device__ __forceinline__ void sample(HotNeurons const& hot, uint32_t const* entries, uint32_t count) {
#pragma unroll 4
    for (uint32_t i = 0; i < count; ++i) {
        atomicAdd(hot.sampled + (entries[i] & 0xffffu), 1u);
    }
}

// The same, by one warp, of a tile that has been spilled.
__device__ __forceinline__ void sample_spilled(HotNeurons const& hot, uint16_t const* spilled, int first_neuron) {
    int const lane = threadIdx.x % kWarpSize;
    uint4 const vector = reinterpret_cast<uint4 const*>(spilled)[lane];
    uint32_t const pairs[kVector / 2] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (is_nonzero(static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16))) {
            atomicAdd(hot.sampled + first_neuron + lane * kVector + i, 1u);
        }
    }
}

// By one warp: from how many rows of the sample on a neuron is hot, or more than there are if none is.
__device__ __forceinline__ uint32_t choose_threshold(uint32_t const* bins, uint32_t pairs, uint32_t num_rows) {
    constexpr int kPerLane = kBins / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t neurons = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        neurons += bins[lane * kPerLane + i];
    }
    uint32_t const up_to = sum_up_to(neurons);
    uint32_t above = __shfl_sync(0xffffffffu, up_to, kWarpSize - 1) - up_to;
    uint32_t least = kBins;
#pragma unroll
    for (int i = kPerLane - 1; i >= 0; --i) {
        uint32_t const bin = lane * kPerLane + i;
        above += bins[bin];
        least = above <= kMostHot && bin >= kFewestRows ? bin : least;
    }
    least = __reduce_min_sync(0xffffffffu, least);
    uint32_t hot_pairs = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        uint32_t const bin = lane * kPerLane + i;
        hot_pairs += bin >= least ? bin * bins[bin] : 0;
    }
    hot_pairs = __reduce_add_sync(0xffffffffu, hot_pairs);
    bool const is_worth = hot_pairs >= kWorthPairs * num_rows && hot_pairs * kWorthPart >= pairs;
    return is_worth ? least : UINT32_MAX;
}

// By a CTA: which neurons are hot. NOTE: other warps could do this while some decide which rows are dense, but with a
// separate barrier for them compute-sanitizer's racecheck does not see the next ones.
template <int kWarps, int kMostWords>
__device__ __forceinline__ void choose(Shared<kMostWords>& shared, HotNeurons const& hot, int d_ff) {
    static_assert(kMostWords <= kWarps * kWarpSize && kWarps <= kWarpSize, "a thread has a word, a lane a warp's sum");
    constexpr int kWordsOfWarp = (kMostWords + kWarps - 1) / kWarps;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    // Lane i has the i-th neuron of every kWarps-th word.
    uint32_t rows[kWordsOfWarp];
#pragma unroll
    for (int i = 0; i < kWordsOfWarp; ++i) {
        int const neuron = (warp + i * kWarps) * kWarpSize + lane;
        rows[i] = neuron < d_ff ? __ldcg(hot.sampled + neuron) : 0;
    }
    uint32_t pairs = 0;
#pragma unroll
    for (int i = 0; i < kWordsOfWarp; ++i) {
        pairs += rows[i];
        if (rows[i] >= kFewestRows) {
            atomicAdd(&shared.bins[min(rows[i], static_cast<uint32_t>(kBins) - 1)], 1u);
        }
    }
    pairs = __reduce_add_sync(0xffffffffu, pairs);
    if (lane == 0) {
        atomicAdd(&shared.pairs, pairs);
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t const threshold = choose_threshold(shared.bins, shared.pairs, hot.num_sampled);
        if (lane == 0) {
            shared.threshold = threshold;
        }
    }
    __syncthreads();
    uint32_t const threshold = shared.threshold;
#pragma unroll
    for (int i = 0; i < kWordsOfWarp; ++i) {
        int const w = warp + i * kWarps;
        uint32_t const bits = __ballot_sync(0xffffffffu, rows[i] >= threshold);
        if (lane == 0 && w < hot.num_words) {
            shared.words[w].bits = bits;
        }
    }
    __syncthreads();
    int const w = threadIdx.x;
    uint32_t const bits = w < hot.num_words ? shared.words[w].bits : 0;
    uint32_t const end = sum_up_to(__popc(bits));
    if (lane == kWarpSize - 1) {
        shared.of_warps[warp] = end;
    }
    __syncthreads();
    uint32_t const before_warp = __reduce_add_sync(0xffffffffu, lane < warp ? shared.of_warps[lane] : 0);
    uint32_t before = before_warp + end - __popc(bits);
    if (w < hot.num_words) {
        shared.words[w].before = before;
    }
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
        uint32_t const neuron = w * kWarpSize + __ffs(rest) - 1;
        shared.neurons[before] = neuron;
        if (blockIdx.x == 0) {
            hot.neurons[before] = neuron;
        }
        ++before;
    }
    if (warp == kWarps - 1 && lane == kWarpSize - 1) {
        shared.count = before;
        if (blockIdx.x == 0) {
            *hot.count = before;
        }
    }
}

// By some of the CTA's threads, this one being number `thread`: rows of Wu of hot neurons; one CTA copies each.
template <int kThreads, int kMostWords>
__device__ __forceinline__ void copy_weights(Shared<kMostWords> const& shared, HotNeurons const& hot,
                                             uint16_t const* w_up, int d_model, int thread) {
    for (uint32_t i = blockIdx.x; i < shared.count; i += gridDim.x) {
        uint16_t const* const source = w_up + static_cast<int64_t>(shared.neurons[i]) * d_model;
        uint16_t* const destination = hot.w_up + static_cast<int64_t>(i) * d_model;
        for (int column = thread * kVector; column < d_model; column += kThreads * kVector) {
            *reinterpret_cast<uint4*>(destination + column) = load_vector(source + column);
        }
    }
}

}  // namespace twell::hot

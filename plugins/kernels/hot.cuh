// Which neurons are hot: in count_kernel, by a sample of the rows. What the product needs of them: in order_kernel.
#ifndef TWELL_KERNELS_HOT_CUH_
#define TWELL_KERNELS_HOT_CUH_

#include "hot.h"
#include "pack.cuh"
#include "vector.cuh"

namespace twell::hot {

// A warp looks at so many rows of the sample, whose loads it issues together.
constexpr int kRowsOfWarp = 6;
// Of them, tiles that have no more non-zeros, so that few sectors of memory are read.
constexpr uint32_t kMostOfTile = 7;
// A neuron that is active in fewer rows of the sample is not hot.
constexpr uint32_t kFewestRows = 4;
// The product is worth its time if the sample's rows have so many pairs with hot neurons on average, and these are such
// a part of all pairs: by chance some neurons are in the sample more often than others. Measured on an H200, see
// benchmarks/README.md.
constexpr uint32_t kWorthPairs = 5;
constexpr uint32_t kWorthPart = 4;

constexpr int kBins = 256;
constexpr int kCountersPerWord = 4;

template <int kMostWords>
struct Shared {
    uint32_t counters[kMostWords * kWarpSize / kCountersPerWord];  // a byte for each neuron
    uint32_t bins[kBins];  // neurons that are active in so many rows of the sample, from kFewestRows on
    uint32_t bits[kMostWords];
    uint32_t of_warps[kWarpSize];
    uint32_t pairs;
    uint32_t threshold;
};

// By one warp: from how many rows of the sample on a neuron is hot, or kBins if none is.
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
    return is_worth ? least : kBins;
}

// By a CTA of kThreads: which neurons are hot. It takes a sample of the rows of the packed matrix; the more rows there
// are, the farther they lie apart. If `none` is true, no neuron is hot.
template <int kThreads, int kMostWords>
__device__ __forceinline__ void choose(HotNeurons const& hot, uint32_t const* packed, int64_t tokens, int num_tiles,
                                       int words_per_tile, bool none) {
    constexpr int kWarps = kThreads / kWarpSize;
    constexpr int kSampledRows = kWarps * kRowsOfWarp;
    static_assert(kSampledRows < kBins, "a counter is a byte");
    static_assert(kMostWords <= kThreads && kWarps == kWarpSize, "a thread has a word, a lane a warp's sum");
    __shared__ Shared<kMostWords> shared;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    for (int i = threadIdx.x; i < hot.num_words * kWarpSize / kCountersPerWord; i += kThreads) {
        shared.counters[i] = 0;
    }
    if (threadIdx.x < kBins) {
        shared.bins[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        shared.pairs = 0;
    }
    __syncthreads();

    uint32_t pairs = 0;
    for (int tile_begin = 0; !none && tile_begin < num_tiles; tile_begin += kWarpSize) {
        int const t = min(tile_begin + lane, num_tiles - 1);
        auto const tile_of = [&](int r) {
            int64_t const row = (warp * kRowsOfWarp + r) * tokens / kSampledRows;
            return reinterpret_cast<uint4 const*>(packed + (row * num_tiles + t) * words_per_tile);
        };
        uint4 heads[kRowsOfWarp];
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
            heads[r] = tile_of(r)[0];
        }
#pragma unroll
        for (int r = 0; r < kRowsOfWarp; ++r) {
            bool const is_counted = tile_begin + lane < num_tiles && heads[r].x <= kMostOfTile;
            uint32_t const count = is_counted ? heads[r].x : 0;
            uint4 const more = count > kMostUnspilled ? tile_of(r)[1] : uint4{};
            uint32_t const entries[kMostOfTile] = {heads[r].y, heads[r].z, heads[r].w, more.x, more.y, more.z, more.w};
#pragma unroll
            for (uint32_t i = 0; i < kMostOfTile; ++i) {
                if (i < count) {
                    uint32_t const neuron = entries[i] & 0xffffu;
                    atomicAdd(&shared.counters[neuron / kCountersPerWord], 1u << neuron % kCountersPerWord * 8);
                }
            }
            pairs += count;
        }
    }
    pairs = __reduce_add_sync(0xffffffffu, pairs);
    if (lane == 0) {
        atomicAdd(&shared.pairs, pairs);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < hot.num_words * kWarpSize / kCountersPerWord; i += kThreads) {
        uint32_t const counters = shared.counters[i];
#pragma unroll
        for (int c = 0; c < kCountersPerWord; ++c) {
            uint32_t const rows = counters >> c * 8 & 0xffu;
            if (rows >= kFewestRows) {
                atomicAdd(&shared.bins[rows], 1u);
            }
        }
    }
    __syncthreads();
    if (warp == 0) {
        uint32_t const threshold = choose_threshold(shared.bins, shared.pairs, kSampledRows);
        if (lane == 0) {
            shared.threshold = threshold;
        }
    }
    __syncthreads();
    for (int w = warp; w < hot.num_words; w += kWarps) {
        uint32_t const rows = reinterpret_cast<unsigned char const*>(shared.counters)[w * kWarpSize + lane];
        uint32_t const bits = __ballot_sync(0xffffffffu, rows >= shared.threshold);
        if (lane == 0) {
            shared.bits[w] = bits;
        }
    }
    __syncthreads();
    int const w = threadIdx.x;
    uint32_t const bits = w < hot.num_words ? shared.bits[w] : 0;
    uint32_t const end = sum_up_to(__popc(bits));
    if (lane == kWarpSize - 1) {
        shared.of_warps[warp] = end;
    }
    __syncthreads();
    uint32_t const before_warp = __reduce_add_sync(0xffffffffu, lane < warp ? shared.of_warps[lane] : 0);
    uint32_t before = before_warp + end - __popc(bits);
    if (w < hot.num_words) {
        hot.words[w] = {bits, before};
    }
    for (uint32_t rest = bits; rest != 0; rest &= rest - 1) {
        hot.neurons[before++] = w * kWarpSize + __ffs(rest) - 1;
    }
    if (threadIdx.x == kThreads - 1) {
        *hot.count = before;
    }
}

// By some of the CTA's threads, told by `thread`: rows of Wu of hot neurons, each of which one CTA copies.
template <int kThreads>
__device__ __forceinline__ void copy_weights(HotNeurons const& hot, uint16_t const* w_up, int d_model, int thread) {
    uint32_t const count = __ldcg(hot.count);
    for (uint32_t i = blockIdx.x; i < count; i += gridDim.x) {
        uint16_t const* const source = w_up + static_cast<int64_t>(__ldcg(hot.neurons + i)) * d_model;
        uint16_t* const destination = hot.w_up + static_cast<int64_t>(i) * d_model;
        for (int column = thread * kVector; column < d_model; column += kThreads * kVector) {
            *reinterpret_cast<uint4*>(destination + column) = load_vector(source + column);
        }
    }
}

}  // namespace twell::hot

#endif  // TWELL_KERNELS_HOT_CUH_

// Down projection of a token by a mask of active neurons, for every GPU from sm_80 on: y[t] = sum over the active
// neurons n of h[t, n] Wd[n] + bd.
//
// One CTA computes a few columns of one token. Its threads share out the neurons as well as the columns, so that a
// token with many active neurons is spread over columns x slots and all its loads are in flight at once. With one token
// that is few CTAs: then several share out the neurons, if many are active, and the last one adds up.
#pragma once

#include <type_traits>

#include "device/block.cuh"
#include "device/element.cuh"
#include "device/epilogue.cuh"
#include "device/gather_rows.cuh"
#include "device/vector.cuh"
#include "format/active.cuh"

namespace twell::masked_down {

// A row of h in FP8, as hidden_sm90.cuh leaves it.
struct HiddenBytesRow {
    uint8_t const* values;
    float const* scales;  // of 128 neurons each
    int64_t scale_stride;

    // From a multiple of 128 on.
    __device__ __forceinline__ HiddenBytesRow operator+(int64_t neuron) const {
        return {values + neuron, scales + neuron / 128 * scale_stride, scale_stride};
    }
    __device__ __forceinline__ float operator[](uint32_t neuron) const {
        uint32_t const within = neuron % 16;
        uint32_t const bits = values[neuron - within + within % 8 * 2 + within / 8];
        return Fp16::to_float2(e4m3_to_fp16_pair(bits)).x * scales[neuron / 128 * scale_stride];
    }
};

template <class Stored>
struct ParamsOf : BlockTensorsOf<Stored> {
    // Valid where a neuron is active: in fp32, rounded to the element type, or in FP8.
    float const* h;             // [tokens, d_ff]
    uint16_t const* h_rounded;  // [tokens, num_mask_words * kMaskBits]
    HiddenBytesRow h_bytes;     // the first of [tokens, num_mask_words * kMaskBits]; scales of tokens are neighbours
    uint32_t const* masks;      // [tokens, num_mask_words]
    int num_mask_words;
    // Where CTAs may share out a token's neurons:
    float* sums;    // [tokens * slabs, num_shares, Config::kColumns]
    int* counters;  // [tokens * slabs]: 0
    int num_slabs;  // of columns
    int num_shares;
};
using Params = ParamsOf<uint16_t>;

// kLanes threads side by side cover 8 kLanes columns; kThreads / kLanes slots share out the neurons, or those of one of
// up to kMostShares CTAs.
template <int kColumnLanes, int kNumThreads, int kMaxShares = 1>
struct Config {
    static constexpr int kLanes = kColumnLanes;
    static constexpr int kThreads = kNumThreads;
    static constexpr int kMostShares = kMaxShares;
    static constexpr int kColumns = kLanes * kVector;
    static constexpr int kSlots = kThreads / kLanes;
    static constexpr int kWarps = kThreads / kWarpSize;
    // Partial sums of a column that reach shared memory: within a warp they are added by shuffles.
    static constexpr int kPartials = kLanes < kWarpSize ? kWarps : kSlots;
    static_assert(kThreads >= kColumns / 2, "see the epilogue");
    // Up to this number of active neurons of the first pass one CTA takes all, and the others leave.
    static constexpr int kMostAlone = 8 * kSlots;
    static_assert(kMostShares == 1 || kColumns / 2 == kWarpSize, "a warp stores y");
};

// Mask words in one pass; the neurons' indices within it are 16 bits wide.
constexpr int kPassWords = 256;
constexpr int kPassNeurons = kPassWords * kMaskBits;

// Of CTAs that share out neurons, see compute(); with 4 those for compute capability 8.0 spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kSharedRowsAtOnce = 4;
#else
constexpr int kSharedRowsAtOnce = 3;
#endif

template <class Cfg>
struct Shared {
    uint16_t list[kPassNeurons];  // active neurons of this pass, ascending
    float partial[Cfg::kPartials][Cfg::kColumns];
};

// A thread's mask word of the pass that begins with a word. Here and below `thread` is its number among those that
// share out a pass.
template <class Stored>
__device__ __forceinline__ uint32_t load_mask(ParamsOf<Stored> const& params, int64_t token, int word_begin,
                                              int thread) {
    int const word = word_begin + thread;
    return thread < kPassWords && word < params.num_mask_words ? params.masks[token * params.num_mask_words + word] : 0;
}

// Active neurons of each warp's words of a pass.
struct alignas(16) WordTotals {
    int warps[kPassWords / kWarpSize];
};

// Counts the active neurons of a pass, from all threads' mask words: returns those of a warp's words up to the
// thread's, and leaves the warp's in `totals`, for all threads after a __syncthreads().
__device__ __forceinline__ int scan_words(WordTotals& totals, uint32_t mask, int thread) {
    int end = 0;
    if (thread < kPassWords) {
        if (__any_sync(0xffffffffu, mask != 0)) {
            end = static_cast<int>(sum_up_to(__popc(mask)));
        }
        if (thread % kWarpSize == kWarpSize - 1) {
            totals.warps[thread / kWarpSize] = end;
        }
    }
    return end;
}

// Those of the first `end` warps; all of them.
__device__ __forceinline__ int count_before(WordTotals const& totals, int end) {
    constexpr int kFours = kPassWords / kWarpSize / 4;
    int count = 0;
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
        int4 const four = reinterpret_cast<int4 const*>(totals.warps)[i];
        count += (4 * i < end ? four.x : 0) + (4 * i + 1 < end ? four.y : 0) + (4 * i + 2 < end ? four.z : 0) +
                 (4 * i + 3 < end ? four.w : 0);
    }
    return count;
}
__device__ __forceinline__ int count_active(WordTotals const& totals) {
    return count_before(totals, kPassWords / kWarpSize);
}

// Then the neurons go into a list, as numbers within this pass, or from the pass on that began `word_begin` words
// before.
__device__ __forceinline__ void list_active(uint16_t* list, WordTotals const& totals, uint32_t mask, int end,
                                            int thread, int word_begin = 0) {
    if (mask == 0) {
        return;
    }
    for (int slot = count_before(totals, thread / kWarpSize) + end - __popc(mask); mask != 0; ++slot) {
        list[slot] = static_cast<uint16_t>((word_begin + thread) * kMaskBits + __ffs(mask) - 1);
        mask &= mask - 1;
    }
}

// A token's.
template <class H, class Stored>
__device__ __forceinline__ auto h_of(ParamsOf<Stored> const& params, int64_t token) {
    if constexpr (std::is_same_v<H, E4m3>) {
        HiddenBytesRow const& first = params.h_bytes;
        return HiddenBytesRow{first.values + token * params.num_mask_words * kMaskBits, first.scales + token,
                              first.scale_stride};
    } else if constexpr (sizeof(H) == sizeof(float)) {
        return params.h + token * params.d_ff;
    } else {
        return params.h_rounded + token * params.num_mask_words * kMaskBits;
    }
}

// Adds up the slots of each warp, and leaves the sums of the warp's columns, from `column` on a lane's, in `partial`.
template <class Cfg>
__device__ __forceinline__ void store_partial(float (&accumulators)[kVector], float* partial, int column) {
#pragma unroll
    for (int distance = Cfg::kLanes; distance < kWarpSize; distance *= 2) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
            accumulators[k] += __shfl_xor_sync(0xffffffffu, accumulators[k], distance);
        }
    }
    if (Cfg::kLanes >= kWarpSize || threadIdx.x % kWarpSize < Cfg::kLanes) {
        float4* const destination = reinterpret_cast<float4*>(partial + column);
        destination[0] = make_float4(accumulators[0], accumulators[1], accumulators[2], accumulators[3]);
        destination[1] = make_float4(accumulators[4], accumulators[5], accumulators[6], accumulators[7]);
    }
}

// Bias and residual, then the only rounding of y, of two columns. Says whether a value is not finite.
template <class Element, class Stored>
__device__ __forceinline__ bool store_sums(ParamsOf<Stored> const& params, int64_t token, int column, float2 sum) {
    float sums[2] = {sum.x, sum.y};
    add_bias_and_residual<Element>(sums, params, token, column);
    uint32_t const values = Element::from_float2(sums[0], sums[1]);
    *reinterpret_cast<uint32_t*>(params.y + token * params.d_out + column) = values;
    return Element::is_not_finite2(values) != 0;
}

// By one warp: adds up the shares' sums of two columns a lane, in their order, if this CTA is the last one to come.
// Else gives false.
template <class Cfg, class Stored>
__device__ __forceinline__ bool add_shares(float2& sum, ParamsOf<Stored> const& params, int64_t slab, int share) {
    float2* const sums = reinterpret_cast<float2*>(params.sums) + slab * (params.num_shares * kWarpSize) + threadIdx.x;
    sums[share * kWarpSize] = sum;
    __threadfence();
    __syncwarp();
    int before = 0;
    if (threadIdx.x == 0) {
        before = atomicAdd(params.counters + slab, 1);
    }
    if (__shfl_sync(0xffffffffu, before, 0) != params.num_shares - 1) {
        return false;
    }
    __threadfence();
    sum = make_float2(0.0f, 0.0f);
    float2 parts[Cfg::kMostShares];
#pragma unroll
    for (int s = 0; s < Cfg::kMostShares; ++s) {
        parts[s] = s < params.num_shares ? __ldcg(sums + s * kWarpSize) : make_float2(0.0f, 0.0f);
    }
#pragma unroll
    for (int s = 0; s < Cfg::kMostShares; ++s) {
        sum.x += parts[s].x;
        sum.y += parts[s].y;
    }
    return true;
}

// One slab of columns of one token, by one CTA or, if kIsShared, by params.num_shares. `mask`: load_mask of the first
// pass; `end`: its scan_words(), after a __syncthreads(). Says whether this thread has stored a value that is not
// finite.
template <class Element, class Cfg, bool kIsShared = false, class H = float, class Stored>
__device__ __forceinline__ bool compute(ParamsOf<Stored> const& params, Shared<Cfg>& shared, WordTotals& totals,
                                        int slab, int64_t token, uint32_t mask, int end, int share = 0) {
    static_assert(Cfg::kThreads >= kPassWords, "one thread a word");
    int const thread = threadIdx.x;
    int const column_begin = slab * Cfg::kColumns;
    int const slot = thread / Cfg::kLanes;
    // Columns past the end repeat the last ones and are not stored.
    int const column = min(column_begin + thread % Cfg::kLanes * kVector, params.d_out - kVector);

    float accumulators[kVector] = {};
    for (int word_begin = 0; word_begin < params.num_mask_words; word_begin += kPassWords) {
        list_active(shared.list, totals, mask, end, thread);
        int count = count_active(totals);
        __syncthreads();
        mask = load_mask(params, token, word_begin + kPassWords, thread);
        int64_t const neuron_begin = static_cast<int64_t>(word_begin) * kMaskBits;
        auto const h = h_of<H>(params, token) + neuron_begin;
        Stored const* const w_down = params.w_down + neuron_begin * params.d_out + column;
        int position = slot;
        if constexpr (kIsShared) {
            position += count * share / params.num_shares;
            count = count * (share + 1) / params.num_shares;
        }
        constexpr int kRowsAtOnce = kIsShared ? kSharedRowsAtOnce : 6;  // as many as there are registers for
        auto const gather = [&](auto factors) {
            gather_listed<Element, kRowsAtOnce>(accumulators, shared.list, position, Cfg::kSlots, count, factors,
                                                w_down, params.d_out);
        };
        if constexpr (sizeof(Stored) == 1) {
            static_assert(kPassNeurons % TWELL_SCALE_BLOCK_SIZE == 0, "a pass begins with a block");
            float const* const scales = block_scales_of(params.down_scale, params.down_blocks, neuron_begin);
            if (scales != nullptr) {
                gather(BlockScaled<decltype(h_of<H>(params, token))>{h, scales + column / TWELL_SCALE_BLOCK_SIZE,
                                                                     params.down_blocks});
            } else {
                gather(h);
            }
        } else {
            gather(h);
        }
        if (word_begin + kPassWords < params.num_mask_words) {
            end = scan_words(totals, mask, thread);
            __syncthreads();  // the next pass also overwrites the list
        }
    }

    // The slots' sums, in a fixed order.
    store_partial<Cfg>(accumulators, shared.partial[Cfg::kLanes < kWarpSize ? thread / kWarpSize : slot],
                       thread % Cfg::kLanes * kVector);
    __syncthreads();

    // A thread stores two columns.
    int const pair = thread * 2;
    bool const stores = column_begin + pair < params.d_out;
    if (pair >= Cfg::kColumns || (!kIsShared && !stores)) {
        return false;
    }
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int p = 0; p < Cfg::kPartials; ++p) {
        float2 const part = *reinterpret_cast<float2 const*>(&shared.partial[p][pair]);
        sum.x += part.x;
        sum.y += part.y;
    }
    if constexpr (kIsShared) {
        if (!add_shares<Cfg>(sum, params, token * params.num_slabs + slab, share) || !stores) {
            return false;
        }
    }
    return store_sums<Element>(params, token, column_begin + pair, sum);
}

}  // namespace twell::masked_down

// Down projection for few tokens on Hopper (sm_90a): the sparse one of down_few.cuh, and a dense one in the same
// launch.
//
// The sparse one reads a row of Wd for each pair of a token and an active neuron; where there are many, reading Wd once
// takes less. The grid's last CTAs are the dense ones. All know from what the gate left which of the two kinds
// has to work, and the others return.
//
// A dense CTA multiplies a share of the neurons for 64 columns and a block of tokens by wgmma, transposed (columns x
// tokens), and stores its sums. The last one of the columns and tokens adds them up, in a fixed order.
#ifndef TWELL_KERNELS_DOWN_SM90_CUH_
#define TWELL_KERNELS_DOWN_SM90_CUH_

#include <cuda.h>

#include "dependent_launch.cuh"
#include "down_few.cuh"
#include "element.cuh"
#include "matmul_sm90.cuh"
#include "twell/twell.h"

namespace twell::down_sm90 {

using matmul_sm90::BLOCK_K;
using matmul_sm90::kBytesRow;
using matmul_sm90::kWarpgroupWarps;
using matmul_sm90::WGMMA_K;
using matmul_sm90::WGMMA_M;

constexpr int kColumns = WGMMA_M;  // of a dense CTA
constexpr int kTokens = 64;
constexpr int kLoader = kWarpgroupWarps;  // this warp loads; the first warpgroup multiplies
constexpr int kOctets = kTokens / 8;
constexpr int kAccumulators = WGMMA_M * kTokens / matmul_sm90::kWarpgroupSize;
constexpr int kUnits = kOctets * kWarpgroupWarps;
constexpr int kSums = kColumns * kTokens;
// Shares of the neurons.
constexpr int kMaxShares = 8;

constexpr int kStages = 3;
constexpr int kBytesA = BLOCK_K * kBytesRow;
constexpr int kBytesStage = kBytesA + kTokens * kBytesRow;
constexpr int kSharedBytes = kStages * kBytesStage + 1024;  // and to the next multiple of the swizzle pattern

struct Params {
    down_few::Params sparse;
    CUtensorMap w_down;       // [d_ff, d_out], boxes of [BLOCK_K, kColumns]
    CUtensorMap h;            // h_rounded, boxes of [kTokens, BLOCK_K]
    uint8_t const* is_dense;  // [num_gate_ctas]
    float* sums;              // [blocks of tokens, blocks of columns, shares, kSums]
    int* counters;            // [blocks of tokens, blocks of columns], all 0
    int tokens;
    int num_gate_ctas;
    int dense_limit;  // so many dense ones of them make the whole call dense
    int num_shares;
    int num_column_blocks;
    int num_dense_ctas;
    int num_sparse_ctas;
    int num_slabs;  // of the sparse ones
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// One value of y without its bias, over the active neurons only.
template <class Element>
__device__ __noinline__ float sum_active(down_few::Params const& params, int token, int column) {
    float const* const h = params.h + static_cast<int64_t>(token) * params.d_ff;
    float sum = 0.0f;
    for (int w = 0; w < params.num_mask_words; ++w) {
        uint32_t mask = params.masks[static_cast<int64_t>(token) * params.num_mask_words + w];
        for (; mask != 0; mask &= mask - 1) {
            int64_t const n = w * down_few::kMaskBits + __ffs(mask) - 1;
            sum = fmaf(h[n], Element::to_float(params.w_down[n * params.d_out + column]), sum);
        }
    }
    return sum;
}

template <class Element>
__device__ __forceinline__ void multiply_dense(Params const& params, int cta, uint32_t base) {
    __shared__ uint64_t barriers[2 * kStages];
    __shared__ bool is_last;
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const share = cta % params.num_shares;
    int const block = cta / params.num_shares;
    int const column_begin = block % params.num_column_blocks * kColumns;
    int const token_begin = block / params.num_column_blocks * kTokens;
    int const all_slices = (params.sparse.num_mask_words * down_few::kMaskBits + BLOCK_K - 1) / BLOCK_K;
    int const slice_begin = all_slices * share / params.num_shares;
    int const num_slices = all_slices * (share + 1) / params.num_shares - slice_begin;
    auto const full = [&](int stage) { return matmul_sm90::shared_address(&barriers[stage]); };
    auto const empty = [&](int stage) { return matmul_sm90::shared_address(&barriers[kStages + stage]); };
    auto const stage_a = [&](int stage) { return base + stage * kBytesStage; };
    if (thread == 0) {
        for (int stage = 0; stage < kStages; ++stage) {
            matmul_sm90::init_barrier(full(stage), 1);
            matmul_sm90::init_barrier(empty(stage), kWarpgroupWarps);
        }
        matmul_sm90::publish_barriers();
    }
    __syncthreads();

    float* const sums = params.sums + static_cast<int64_t>(block) * params.num_shares * kSums;
    matmul_sm90::Ring<kStages> ring;
    if (warp == kLoader && lane == 0) {
        // NOTE: h_rounded was written by ordinary stores of the kernel before.
        asm volatile("fence.proxy.async;" ::: "memory");
        for (int slice = slice_begin; slice < slice_begin + num_slices; ++slice) {
            matmul_sm90::wait_barrier(empty(ring.stage), ring.parity ^ 1);
            matmul_sm90::arrive_and_expect(full(ring.stage), kBytesStage);
            matmul_sm90::load_box(stage_a(ring.stage), params.w_down, full(ring.stage), column_begin, slice * BLOCK_K);
            matmul_sm90::load_box(stage_a(ring.stage) + kBytesA, params.h, full(ring.stage), slice * BLOCK_K,
                                  token_begin);
            ring.advance();
        }
    } else if (warp < kWarpgroupWarps) {
        float accumulators[kAccumulators];
        int stage_before = 0;
        for (int slice = 0; slice < num_slices; ++slice) {
            matmul_sm90::wait_barrier(full(ring.stage), ring.parity);
            uint64_t const a = matmul_sm90::describe(stage_a(ring.stage));
            uint64_t const b = matmul_sm90::describe(stage_a(ring.stage) + kBytesA);
            matmul_sm90::begin_wgmma();
#pragma unroll
            for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
                Wgmma<Element, kTokens>::template run<true>(accumulators, a + k * (WGMMA_K * kBytesRow >> 4),
                                                            b + k * (WGMMA_K * 2 >> 4), (slice | k) != 0);
            }
            matmul_sm90::commit_wgmma();
            matmul_sm90::wait_wgmma<1>();
            if (slice != 0 && lane == 0) {
                matmul_sm90::arrive(empty(stage_before));
            }
            stage_before = ring.stage;
            ring.advance();
        }
        matmul_sm90::wait_wgmma<0>();
        // The compiler does not know that the accumulators were not valid until here.
#pragma unroll
        for (int k = 0; k < kAccumulators; ++k) {
            asm volatile("" : "+f"(accumulators[k])::"memory");
        }
        float4* const mine = reinterpret_cast<float4*>(sums + share * kSums);
#pragma unroll
        for (int octet = 0; octet < kOctets; ++octet) {
            float4 const values = num_slices == 0
                                      ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)  // fewer slices than shares
                                      : make_float4(accumulators[octet * 4], accumulators[octet * 4 + 1],
                                                    accumulators[octet * 4 + 2], accumulators[octet * 4 + 3]);
            __stcg(&mine[(octet * kWarpgroupWarps + warp) * kWarpSize + lane], values);
        }
        __threadfence();
    }
    __syncthreads();
    if (thread == 0) {
        is_last = atomicAdd(&params.counters[block], 1) == params.num_shares - 1;
        __threadfence();
    }
    __syncthreads();
    if (!is_last) {
        return;
    }
    // As the fragments are: column lane / 4 and lane / 4 + 8 of a warp's 16, tokens lane % 4 * 2 and the next.
#pragma unroll 1
    for (int unit = warp; unit < kUnits; unit += static_cast<int>(blockDim.x) / kWarpSize) {
        float4 parts[kMaxShares];
#pragma unroll
        for (int s = 0; s < kMaxShares; ++s) {
            parts[s] = __ldcg(reinterpret_cast<float4 const*>(sums + min(s, params.num_shares - 1) * kSums) +
                              unit * kWarpSize + lane);
        }
        float total[4] = {};
#pragma unroll
        for (int s = 0; s < kMaxShares; ++s) {
            if (s < params.num_shares) {
                total[0] += parts[s].x;
                total[1] += parts[s].y;
                total[2] += parts[s].z;
                total[3] += parts[s].w;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            int const column = column_begin + unit % kWarpgroupWarps * 16 + lane / 4 + k / 2 * 8;
            int const token = token_begin + unit / kWarpgroupWarps * 8 + lane % 4 * 2 + k % 2;
            if (column < params.sparse.d_out && token < params.tokens) {
                // NOTE: 0 times infinity is NaN, and h can be too large for the element type. Then the product says
                // nothing.
                float sum = isfinite(total[k]) ? total[k] : sum_active<Element>(params.sparse, token, column);
                if (params.sparse.b_down != nullptr) {
                    sum += Element::to_float(params.sparse.b_down[column]);
                }
                params.sparse.y[static_cast<int64_t>(token) * params.sparse.d_out + column] = Element::from_float(sum);
            }
        }
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1024 / Cfg::kThreads)
    down_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) unsigned char dynamic[];
    static_assert(sizeof(down_few::Shared<Cfg>) <= kStages * kBytesStage, "");
    allow_dependent_launch();
    wait_for_previous_launch();
    // What a sparse CTA needs first is fetched together with what decides.
    bool const is_sparse_cta = static_cast<int>(blockIdx.x) < params.num_sparse_ctas;
    int64_t const token = blockIdx.x / params.num_slabs;
    uint32_t const mask = is_sparse_cta ? down_few::load_mask(params.sparse, token, 0) : 0;
    int found = 0;
    for (int i = threadIdx.x; i < params.num_gate_ctas; i += Cfg::kThreads) {
        found |= params.is_dense[i];
    }
    if (__syncthreads_count(found) < params.dense_limit) {
        if (is_sparse_cta) {
            down_few::compute<Element, Cfg>(params.sparse, *reinterpret_cast<down_few::Shared<Cfg>*>(dynamic),
                                            static_cast<int>(blockIdx.x) % params.num_slabs, token, mask);
        }
    } else if (!is_sparse_cta) {
        multiply_dense<Element>(params, static_cast<int>(blockIdx.x) - params.num_sparse_ctas,
                                (matmul_sm90::shared_address(dynamic) + 1023u) & ~1023u);
    }
#endif
}

}  // namespace twell::down_sm90

#endif  // TWELL_KERNELS_DOWN_SM90_CUH_

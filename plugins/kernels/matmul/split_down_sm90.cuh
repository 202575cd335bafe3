// The down projection of all rows with FP8 weights on Hopper (sm_90a), where there are too few tiles for all
// multiprocessors: the CTAs of a cluster share the sums of a tile, [128 columns, a block of tokens]. Each multiplies
// some of the slices and leaves its sums in its shared memory; then each adds up those of some tokens, in the order of
// the CTAs, so that results are repeatable. See matmul_sm90.cuh for the products.
#pragma once

#include "matmul/dense_sm90.cuh"

namespace twell::split_down_sm90 {

using namespace dense_sm90;

constexpr int kMostCtas = 8;  // of a cluster

// kBlock: tokens in a block.
template <int kBlock>
struct SplitConfig : Config<kBlock, false, 1, Layout::kSharesSums, true> {
    using Base = Config<kBlock, false, 1, Layout::kSharesSums, true>;
    // Sums of a token in shared memory, in the place of the stages. Four tokens of a warp's lanes fall into different
    // banks.
    static constexpr int kSumStride = BLOCK_M + 4;
    static_assert(kBlock * kSumStride * 4 <= Base::kOffsetResult, "room for the sums");
    static_assert(kBlock % kMostCtas == 0, "as many tokens for each CTA");
};

// A vector in shared memory of one of the cluster's CTAs.
__device__ __forceinline__ float4 load_of_cta(uint32_t address, uint32_t cta) {
    float4 value;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
        "}\n"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(address), "r"(cta)
        : "memory");
    return value;
}

// Leaves a consumer warp's sums, 16 columns of all tokens.
template <class Cfg>
__device__ __forceinline__ void store_sums(uint32_t base, float const (&sums)[Cfg::kAccumulators], int consumer_warp) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const column = base + (consumer_warp * kWarpNeurons + lane / 4 * 2) * 4;
#pragma unroll
    for (int i = 0; i < Cfg::kAccumulators; i += 4) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            int const token = i * 2 + lane % 4 * 2 + t;
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(column + token * Cfg::kSumStride * 4),
                         "f"(sums[i + t]), "f"(sums[i + t + 2])
                         : "memory");
        }
    }
}

// Adds up the CTAs' sums of kVector columns of a token, with bias and residual.
template <class Element, class Cfg>
__device__ __forceinline__ uint4 add_sums(ParamsOf<E4m3> const& params, uint32_t base, int token, int chunk,
                                          int64_t row, int column) {
    float values[kVector] = {};
    uint32_t const address = base + (token * Cfg::kSumStride + chunk * kVector) * 4;
#pragma unroll
    for (int cta = 0; cta < kMostCtas; ++cta) {
        if (cta < params.num_parts) {
            float4 const low = load_of_cta(address, cta);
            float4 const high = load_of_cta(address + 16, cta);
            float const of_cta[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                values[k] += of_cta[k];
            }
        }
    }
    float biases[kVector];
    float residual[kVector];
    unpack<Element>(biases, load_vector_if(params.bias + column, params.bias != nullptr));
    uint16_t const* const before = params.block.residual;
    unpack<Element>(residual, load_written_vector_if(before + row * params.num_neurons + column, before != nullptr));
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
        float const scale = params.block.by_output ? params.block.down_scale[column + k] : 1.0f;
        values[k] = fmaf(values[k], scale, biases[k]) + residual[k];
    }
    return pack<Element>(values);
}

// num_parts: CTAs of a cluster.
template <class Element, class Cfg>
__global__ void __launch_bounds__(kThreads, 1) split_down_kernel(__grid_constant__ ParamsOf<E4m3> const params) {
    constexpr int kConsumersBarrier = 1;  // named
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};
    // Where the next launch may skip neurons instead: whether it does; the answer is in the place of a barrier.
    uint32_t const decided = shared.more_barrier(0);
    uint64_t* const decision = reinterpret_cast<uint64_t*>(shared_bytes + Cfg::kOffsetMoreBarriers) + 1;
    auto const skips = [&] {
        if (!params.may_skip) {
            return false;
        }
        wait_barrier(decided, 0);
        return *decision != 0;
    };

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const rank = static_cast<int>(cluster_rank());
    if (threadIdx.x == 0) {
        shared.init_stages();
        init_barrier(decided, 1);
        publish_barriers();
        prefetch_map(params.weights);
        prefetch_map(params.tokens[0]);
        prefetch_map(params.h_scales);
    }
    __syncthreads();
    if (!params.next_overlaps) {
        allow_dependent_launch();
    }
    if (warp != 0) {  // the loader waits later
        wait_for_previous_launch();
        if (params.next_overlaps) {
            allow_dependent_launch();
        }
    }
    View const view(params.schedule, params.num_rows, true);
    int const num_blocks = (view.count + Cfg::kTileTokens - 1) / Cfg::kTileTokens;
    Tile const tile(num_blocks, params.num_tiles, static_cast<int>(blockIdx.x) / params.num_parts);
    Slices const slices = {params.num_slices * rank / params.num_parts,
                           params.num_slices * (rank + 1) / params.num_parts};

    if (warp >= kWarpgroupWarps) {
        // Consumers
        take_registers<kRegistersBytesDown>();
        int const consumer_warp = warp - kWarpgroupWarps;
        bool const multiplies = !skips();
        if (multiplies) {
            Ring<Cfg::kNumStages> ring;
            float sums[Cfg::kAccumulators];
            int const blocks = params.block.down_blocks;
            float const* const scales = blocks == 0 ? nullptr
                                                    : params.block.down_scale + int64_t{slices.begin} * blocks +
                                                          tile.neuron_of<Cfg>(0) / BLOCK_M;
            multiply_scaled<Cfg>(sums, shared, ring, consumer_warp, slices.count(), scales, blocks);
            sync_some_threads<kConsumersBarrier, kConsumers * kWarpgroupSize>();  // the stages have been read
            store_sums<Cfg>(shared.base, sums, consumer_warp);
            sync_cluster();
            int const share = Cfg::kTokens / params.num_parts;
            Tokens const own = Tokens::of<Cfg>(tile, 0, view.count);
            int const first_column = tile.neuron_of<Cfg>(0);
            // A warp has two tokens at a time.
            for (int i = consumer_warp * 2; i < share; i += kConsumerWarps * 2) {
                int const token = rank * share + i + lane / kChunksPerToken;
                int const column = first_column + lane % kChunksPerToken * kVector;
                int64_t const row = own.begin + token;
                bool const exists = own.has(token) && column < params.num_neurons;
                bool failed = false;
                if (exists) {
                    uint4 const y =
                        add_sums<Element, Cfg>(params, shared.base, token, lane % kChunksPerToken, row, column);
                    *reinterpret_cast<uint4*>(params.block.y + row * params.num_neurons + column) = y;
                    failed = !is_finite<Element>(y);
                }
                for (uint32_t rest = __ballot_sync(0xffffffffu, failed); rest != 0; rest &= rest - 1) {
                    int const of_lane = __ffs(rest) - 1;
                    __syncwarp();  // after the store of these values
                    sum_at_again<Element>(params, view, own.begin + rank * share + i + of_lane / kChunksPerToken,
                                          first_column + of_lane % kChunksPerToken * kVector);
                }
            }
            meet_cluster();  // the others may still read this one's sums
        }
        return;
    }
    give_registers<kRegistersBytesLoader>();
    if (warp == 0 && lane == 0) {
        Loader<Cfg, true> loader = {shared,     &params.weights,    params.tokens[0], rank,
                                    view.count, params.num_neurons, &params.h_scales};
        loader.load_first(tile, slices, wait_for_previous_launch, [&] { return !skips(); });
    } else if (warp == 1 && params.may_skip) {
        bool const taken = is_sparse_enough(params.skipping);
        if (lane == 0) {
            *decision = taken ? 1 : 0;
            arrive(decided);
        }
    }
    __syncwarp();
    if (!skips()) {
        meet_cluster();
        meet_cluster();
    }
}

}  // namespace twell::split_down_sm90

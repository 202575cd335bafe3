// u of hot neurons for Hopper (sm_90a): see matmul_sm90.cuh for the product, here of all rows and kMostHot neurons.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/tma.cuh"
#include "device/warps.cuh"
#include "format/schedule.cuh"
#include "many_tokens/chunks/hot.h"
#include "matmul/matmul_sm90.cuh"

namespace twell::hot_sm90 {

using namespace matmul_sm90;

static_assert(kMostHot == BLOCK_M, "a CTA has all neurons");

struct Params {
    CUtensorMap x;     // [tokens, d_model], boxes of [kRowsLoaded, BLOCK_K]
    CUtensorMap w_up;  // [kMostHot, d_model], boxes of [kWeightRowsLoaded, BLOCK_K]; only the first ones are hot
    float* u;          // [tokens, kMostHot]
    uint32_t const* count;
    ScheduleHeader const* header;
    int64_t tokens;
    int num_slices;
    int num_blocks;  // of tokens
};

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    hot_kernel(__grid_constant__ Params const params) {
    allow_dependent_launch();
    // NOTE: all of this is done before the wait. The kernel before lets this one start when order_kernel has ended, and
    // neither reads nor writes data of hot neurons.
    if (__ldcg(&params.header->heavy_count) == static_cast<uint32_t>(params.tokens) || __ldcg(params.count) == 0) {
        if (blockIdx.x == 0) {
            wait_for_previous_launch();
        }
        return;
    }
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const rank = static_cast<int>(cluster_rank());

    if (threadIdx.x == 0) {
        shared.init_stages();
        publish_barriers();
        prefetch_map(params.x);
        prefetch_map(params.w_up);
    }
    sync_cluster();

    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;
    constexpr int kTiles = 1;  // of neurons

    if (warp >= kWarpgroupWarps) {
        // Consumers
        take_registers<kRegistersConsumer>();
        int const consumer_warp = warp - kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        for (int i = tiles_begin; i < params.num_blocks; i += tiles_step) {
            Tokens const tokens =
                Tokens::of<Cfg>(Tile(params.num_blocks, kTiles, i), rank, static_cast<int>(params.tokens));
            float accumulators[1][Cfg::kAccumulators];
            multiply<Element, Cfg, false>(accumulators, shared, ring, consumer_warp / kWarpgroupWarps,
                                          params.num_slices);
            float* const u =
                params.u + static_cast<int64_t>(tokens.begin) * kMostHot + consumer_warp * kWarpNeurons + lane / 4;
#pragma unroll
            for (int a = 0; a < Cfg::kAccumulators; ++a) {
                int const token = a / 4 * 8 + lane % 4 * 2 + a % 2;
                if (tokens.has(token)) {
                    __stcg(u + token * kMostHot + a / 2 % 2 * 8, accumulators[0][a]);
                }
            }
        }
    } else {
        give_registers<kRegistersFirst>();
        if (warp == 0 && lane == 0) {
            // Loader. TMA reads rows of Wu that order_kernel has written by ordinary stores.
            fence_for_tma();
            Loader<Cfg, false> loader = {shared,  &params.w_up, params.x, rank, static_cast<int>(params.tokens),
                                         kMostHot};
            for (int i = tiles_begin; i < params.num_blocks; i += tiles_step) {
                loader.load(Tile(params.num_blocks, kTiles, i), {0, params.num_slices});
            }
            loader.wait_for_consumers();
        }
    }
    // The next launch must not take the end of this one for the end of those before.
    wait_for_previous_launch();
}

}  // namespace twell::hot_sm90

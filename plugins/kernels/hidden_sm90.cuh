// The hidden activations of a dense block on Hopper (sm_90a): h = act(x Wg^T + bg) * (x Wu^T + bu) for all rows, in one
// kernel. See matmul_sm90.cuh for the product; here a consumer multiplies the same tokens by 64 neurons of both
// matrices, so that it has both factors of h in its registers.
#ifndef TWELL_KERNELS_HIDDEN_SM90_CUH_
#define TWELL_KERNELS_HIDDEN_SM90_CUH_

#include "dependent_launch.cuh"
#include "matmul_sm90.cuh"

namespace twell::hidden_sm90 {

using namespace matmul_sm90;

// Registers a thread: two products of up to 176 tokens take 176 of a consumer's.
constexpr int kRegistersLoader = 40;
constexpr int kRegistersMultiplier = 232;
static_assert(registers_suffice(kRegistersLoader, kRegistersMultiplier), "setmaxnreg.inc would wait for ever");

struct Params {
    CUtensorMap x;           // [tokens, d_model], boxes of [kRowsLoaded, BLOCK_K]
    CUtensorMap weights[2];  // w_gate and, in a gated block, w_up: [d_ff, d_model], boxes of
                             // [kWeightRowsLoaded, BLOCK_K]
    uint16_t* h;             // [tokens, d_ff], rows `stride` apart
    int64_t stride;
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* b_up;    // [d_ff] or null
    uint32_t* part_states;   // [num_part_states], which become 0: see parts_sm90.cuh
    int num_part_states;
    int64_t tokens;
    int d_ff;
    int num_slices;
    int num_tiles;
    int num_blocks;  // of tokens
    // Bits of pairs of elements: g is 0 where z <= cut, else z times z or 1; u is 0 where u <= up_cut, a NaN if never.
    uint32_t cut;
    uint32_t up_cut;
    bool square;
    void const* w_down;  // the next kernel's; its first bytes are brought to L2
    uint32_t prefetched_bytes;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// h of two tokens. Where g is 0, so is h, whatever u is; NaN is kept.
template <class Element, bool kGated>
__device__ __forceinline__ uint32_t activate_and_multiply(Params const& params, uint32_t z, uint32_t u) {
    uint32_t const g = Element::multiply2(z, params.square ? z : Element::kOnes);
    uint32_t const active = Element::not_at_most2(z, params.cut) & Element::is_not_zero2(g);
    if constexpr (!kGated) {
        return g & active;
    }
    return Element::multiply2(g, u & Element::not_at_most2(u, params.up_cut)) & active;
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    hidden_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr bool kGated = Cfg::kProducts == 2;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    Shared<Cfg> const shared = {shared_address(shared_bytes)};

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const rank = static_cast<int>(cluster_rank());

    if (threadIdx.x == 0) {
        shared.init_stages();
        publish_barriers();
        prefetch_map(params.x);
        prefetch_map(params.weights[0]);
        prefetch_map(params.weights[Cfg::kProducts - 1]);
    }
    sync_cluster();
    wait_for_previous_launch();
    allow_dependent_launch();

    int const tiles_end = params.num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;

    if (warp >= kWarpgroupWarps) {
        // Consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersMultiplier));
        int const consumer_warp = warp - kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
            Tile const tile(params.num_blocks, params.num_tiles, i);
            int const first_neuron = tile.neuron_of<Cfg>(rank) + consumer_warp * kWarpNeurons;
            Tokens const tokens = Tokens::of<Cfg>(tile, rank, static_cast<int>(params.tokens));
            int64_t const first_token = tokens.begin;
            int const neuron = first_neuron + lane / 4;
            float2 const gate_biases = load_biases<Element>(params.b_gate, neuron, params.d_ff);
            float2 const up_biases = load_biases<Element>(kGated ? params.b_up : nullptr, neuron, params.d_ff);
            float accumulators[Cfg::kProducts][Cfg::kAccumulators];
            multiply<Element, Cfg, false>(accumulators, shared, ring, consumer_warp / kWarpgroupWarps,
                                          params.num_slices);

            // Epilogue
            pass_result<Cfg>(
                shared.result() + consumer_warp * Cfg::kBytesWarp,
                [&](int i) {
                    uint32_t const z = round_pair<Element>(accumulators[0], gate_biases, i);
                    uint32_t const u = round_pair<Element>(accumulators[Cfg::kProducts - 1], up_biases, i);
                    return activate_and_multiply<Element, kGated>(params, z, u);
                },
                [&](int token, int chunk, uint4 values) {
                    int const column = first_neuron + chunk * kVector;
                    if (tokens.has(token) && column < params.d_ff) {
                        *reinterpret_cast<uint4*>(params.h + (first_token + token) * params.stride + column) = values;
                    }
                });
        }
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersLoader));
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                Loader<Cfg, false> loader = {
                    shared, params.weights, params.x, rank, static_cast<int>(params.tokens), params.d_ff};
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    loader.load(Tile(params.num_blocks, params.num_tiles, i), {0, params.num_slices});
                }
                uint32_t const share = (params.prefetched_bytes / gridDim.x + 15) / 16 * 16;
                uint32_t const begin = blockIdx.x * share;
                if (begin < params.prefetched_bytes) {
                    prefetch_bytes(static_cast<unsigned char const*>(params.w_down) + begin,
                                   min(share, params.prefetched_bytes - begin));
                }
            }
        } else {
            int const threads = kHelpers * kWarpSize;
            int const first = static_cast<int>(blockIdx.x) * threads + static_cast<int>(threadIdx.x) - kWarpSize;
            for (int i = first; i < params.num_part_states; i += static_cast<int>(gridDim.x) * threads) {
                params.part_states[i] = 0;
            }
        }
    }
    // The other CTA may still signal this one's barriers.
    __syncwarp();
    sync_cluster();
#endif
}

}  // namespace twell::hidden_sm90

#endif  // TWELL_KERNELS_HIDDEN_SM90_CUH_

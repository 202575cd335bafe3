// Gate projection with packing for Hopper (sm_90a): TMA, mbarriers, wgmma.
//
// The product is computed transposed, neurons x tokens, because the tensor cores' second extent is free: any multiple
// of 8 up to 256. So a launch can cut the tokens into blocks that fill its last round of tiles. A pair of CTAs, a
// cluster, computes [one TwELL tile of 2 x 128 neurons, one block of tokens] at a time; both need the same tokens, so
// each loads half of them for both. Within a CTA the warps have three roles, which overlap:
//   loader     brings w_gate and x into the stages, across the boundaries of tiles;
//   consumers  two warpgroups of 64 neurons each: multiply, add the bias, round, leave z in shared memory;
//   packers    three warps: activate, count and pack z of both CTAs while the consumers are at the next tile.
// Each (row, tile) is packed by one warp, so entries come out in column order without atomics.
#ifndef TWELL_KERNELS_GATE_SM90_CUH_
#define TWELL_KERNELS_GATE_SM90_CUH_

#include <cuda.h>

#include "element.cuh"
#include "pack.cuh"
#include "twell/twell.h"
#include "wgmma.cuh"

namespace twell::gate_sm90 {

constexpr int kClusterSize = 2;
constexpr int BLOCK_M = TWELL_TILE / kClusterSize;  // neurons of a CTA
constexpr int BLOCK_K = 64;
constexpr int WGMMA_M = 64;
constexpr int WGMMA_K = 16;
constexpr int kRowsPerSwizzle = 8;

constexpr int kWarpgroupSize = 128;
constexpr int kWarpgroupWarps = kWarpgroupSize / kWarpSize;
constexpr int kConsumers = BLOCK_M / WGMMA_M;  // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
constexpr int kThreads = (1 + kConsumers) * kWarpgroupSize;
constexpr int kPackers = kWarpgroupWarps - 1;  // warps
constexpr int kRowsAtOnce = 4;                 // that a warp packs

// Registers a thread. The kernel starts with as many as __launch_bounds__ gives each; then the first warpgroup gives
// some of its own to the consumers, whose accumulators alone take up to 128.
constexpr int kRegistersFirst = 88;
constexpr int kRegistersConsumer = 208;
static_assert((kRegistersFirst + kConsumers * kRegistersConsumer) * kWarpgroupSize <=
                  65536 / kThreads / 8 * 8 * kThreads,
              "setmaxnreg.inc would wait for ever");

// Token blocks that are visited with all tiles before the next ones: about 8 x 256 rows of x and as many neurons'
// weights are then at work at a time, the least traffic from memory to L2.
constexpr int kGroupBlocks = 8;

constexpr int kMaxSharedBytes = 227 * 1024;

// Tokens in a block; a multiple of 8, at most 256.
template <int kTokens>
struct Config {
    static constexpr int BLOCK_N = kTokens;
    static constexpr int kAccumulators = WGMMA_M * BLOCK_N / kWarpgroupSize;
    // Each CTA loads that many of a block's tokens, whole swizzle patterns. The halves may overlap by one.
    static constexpr int kRowsLoaded =
        (BLOCK_N / kClusterSize + kRowsPerSwizzle - 1) / kRowsPerSwizzle * kRowsPerSwizzle;
    static_assert(BLOCK_N % 8 == 0 && BLOCK_N >= 16 && BLOCK_N <= 256, "what wgmma can do");

    // Shared memory: stages of A (w_gate) [BLOCK_M, BLOCK_K] and B (x) [BLOCK_N, BLOCK_K], swizzled by TMA; the rounded
    // z [BLOCK_N, BLOCK_M]; barriers.
    static constexpr int kBytesA = BLOCK_M * BLOCK_K * 2;
    static constexpr int kBytesB = BLOCK_N * BLOCK_K * 2;
    static constexpr int kBytesStage = kBytesA + kBytesB;
    static constexpr int kBytesLoaded = kBytesA + kClusterSize * kRowsLoaded * BLOCK_K * 2;
    static constexpr int kBytesZ = BLOCK_N * BLOCK_M * 2;
    static constexpr int kMostStages = (kMaxSharedBytes - 256 - kBytesZ) / kBytesStage;
    static constexpr int kNumStages = kMostStages < 6 ? kMostStages : 6;
    static constexpr int kOffsetZ = kNumStages * kBytesStage;
    static constexpr int kOffsetBarriers = kOffsetZ + kBytesZ;
    static constexpr int kSharedBytes = kOffsetBarriers + (2 * kNumStages + 3) * 8;
    static_assert(kNumStages >= 3 && kSharedBytes <= kMaxSharedBytes, "what a block of sm_90 can have");
    static_assert(kBytesStage % 1024 == 0, "swizzle patterns of 128 bytes start at multiples of 1024");
};

// By this much d_model must be divisible: the loop has no tail.
constexpr int kDivisorOfK = BLOCK_K;

struct Params {
    CUtensorMap x;           // [tokens, d_model], boxes of [kRowsLoaded, BLOCK_K]
    CUtensorMap w_gate;      // [d_ff, d_model], boxes of [BLOCK_M, BLOCK_K]
    uint16_t const* b_gate;  // [d_ff] or null
    uint32_t* packed;        // [tokens, num_tiles * words_per_tile]
    int64_t tokens;
    int d_model;
    int d_ff;
    int num_tiles;
    int num_blocks;  // of tokens
    int words_per_tile;
    Activation act;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// mbarriers

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Waits for the end of the phase with this parity. A fresh barrier counts as having ended a phase of parity 1.
__device__ __forceinline__ void wait_barrier(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of this name in a CTA of the cluster. NOTE: orders nothing for the other CTA's ordinary reads.
__device__ __forceinline__ void arrive_at_cta(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

// The same, and what this thread has seen or done before is visible to who waits there with wait_for_cluster().
__device__ __forceinline__ void release_to_cta(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}\n" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

__device__ __forceinline__ void wait_for_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release;\n"
        "barrier.cluster.wait.acquire;\n" ::
            : "memory");
}

// TMA. Rows outside the matrix become zeros and count as bytes that came.

__device__ __forceinline__ void prefetch_map(CUtensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t destination, CUtensorMap const& map, uint32_t barrier, int column,
                                         int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            destination),
        "l"(&map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// The same into all CTAs of the cluster: at the same place, signalled at the same barrier of each.
__device__ __forceinline__ void load_box_for_all(uint32_t destination, CUtensorMap const& map, uint32_t barrier,
                                                 int column, int row) {
    uint16_t const ctas = (1 << kClusterSize) - 1;
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(destination),
        "l"(&map), "r"(barrier), "h"(ctas), "r"(column), "r"(row)
        : "memory");
}

// wgmma

// Describes rows of BLOCK_K elements in a stage, from `address` on.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | uint64_t{1} << 16 |
           uint64_t{kRowsPerSwizzle * BLOCK_K * 2 >> 4} << 32 | uint64_t{1} << 62;
}

__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_wgmma() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// z [BLOCK_N, BLOCK_M]. A token's row is 256 bytes; the XOR makes 8 tokens' chunks of the same neurons fall into
// different banks.
__device__ __forceinline__ uint32_t chunk_offset(int token, int chunk) {
    return static_cast<uint32_t>(token * (BLOCK_M * 2) + ((chunk ^ (token & 7)) << 4));
}

// Four 8 x 8 matrices, transposed: lanes 8 i to 8 i + 7 give the addresses of matrix i's columns.
__device__ __forceinline__ void store_transposed_x4(uint32_t address, uint32_t const (&fragment)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
                 : "memory");
}

__device__ __forceinline__ void store_transposed_x2(uint32_t address, uint32_t fragment0, uint32_t fragment1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(fragment0),
                 "r"(fragment1)
                 : "memory");
}

// The same shared address in another CTA of the cluster.
__device__ __forceinline__ uint32_t address_in_cta(uint32_t address, uint32_t cta) {
    uint32_t remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
    return remote;
}

__device__ __forceinline__ uint4 load_chunk_of_cluster(uint32_t address) {
    uint4 chunk;
    asm volatile("ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(address)
                 : "memory");
    return chunk;
}

// Goes round the stages; `parity` is that of the phase in which the present round fills them.
template <int kNumStages>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance() {
        if (++stage == kNumStages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Which tokens and neurons are the i-th to be computed.
struct Tile {
    int block_idx;
    int tile_idx;

    __device__ __forceinline__ Tile(Params const& params, int i) {
        int const per_group = kGroupBlocks * params.num_tiles;
        int const within = i % per_group;
        int const first_block = i / per_group * kGroupBlocks;
        int const blocks = min(params.num_blocks - first_block, kGroupBlocks);
        tile_idx = within / blocks;
        block_idx = first_block + within % blocks;
    }
};

// The biases of a thread's two neurons; 0 past the last one.
template <class Element>
__device__ __forceinline__ float2 load_biases(Params const& params, int neuron) {
    float2 biases = make_float2(0.0f, 0.0f);
    if (params.b_gate != nullptr) {
        biases.x = neuron < params.d_ff ? Element::to_float(params.b_gate[neuron]) : 0.0f;
        biases.y = neuron + 8 < params.d_ff ? Element::to_float(params.b_gate[neuron + 8]) : 0.0f;
    }
    return biases;
}

// Rounds a consumer's accumulators into z. A warp has 16 neurons: two chunks of each token's row.
template <class Element, int N>
__device__ __forceinline__ void store_z(uint32_t z, float const (&accumulators)[N / 2], float2 biases,
                                        int first_chunk) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const address = z + chunk_offset(lane / 16 * 8 + lane % 8, first_chunk + lane / 8 % 2);
    auto const round = [&](int i, float bias) {
        return Element::from_float2(accumulators[i] + bias, accumulators[i + 1] + bias);
    };
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
        uint32_t const fragment[4] = {round(j * 4, biases.x), round(j * 4 + 2, biases.y), round(j * 4 + 4, biases.x),
                                      round(j * 4 + 6, biases.y)};
        store_transposed_x4(address + j * 8 * (BLOCK_M * 2), fragment);
    }
    if (N / 8 % 2 != 0) {
        constexpr int j = N / 8 - 1;
        // Lanes from 16 on give no address.
        store_transposed_x2(address + j * 8 * (BLOCK_M * 2), round(j * 4, biases.x), round(j * 4 + 2, biases.y));
    }
}

// Activates what a lane has of a row. NOTE: a NaN or infinity in x makes even zero-filled weights give NaN, so columns
// outside are masked by index.
template <class Element>
__device__ __forceinline__ Octet activate_octet(uint4 chunk, int num_columns, Activation act) {
    int const columns_left = num_columns - static_cast<int>(threadIdx.x % kWarpSize) * kVector;
    Octet octet = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < kVector / 2; ++i) {
        uint32_t const mask = 2 * i + 1 < columns_left ? 0xffffffffu : 2 * i < columns_left ? 0xffffu : 0u;
        octet.pairs[i] = activate_pair<Element>(octet.pairs[i], act) & mask;
    }
    return octet;
}

// Packs, with one warp, every kStep-th row of a block from `first` on. Half of the lanes read z of either CTA.
template <class Element, int N, int kStep>
__device__ __forceinline__ void pack_block(Params const& params, Tile const& tile, uint32_t z, int first) {
    int const lane = threadIdx.x % kWarpSize;
    int const column_begin = tile.tile_idx * TWELL_TILE;
    int const num_columns = min(params.d_ff - column_begin, TWELL_TILE);
    int const words_per_row = params.num_tiles * params.words_per_tile;
    int64_t const token_begin = static_cast<int64_t>(tile.block_idx) * N;
    int const num_rows = static_cast<int>(min(params.tokens - token_begin, static_cast<int64_t>(N)));
    uint32_t* const block_words = params.packed + token_begin * words_per_row + tile.tile_idx * params.words_per_tile;
    uint32_t const source = address_in_cta(z, lane / (kWarpSize / kClusterSize));
#pragma unroll 1
    for (int begin = first; begin < num_rows; begin += kStep * kRowsAtOnce) {
        Octet octets[kRowsAtOnce];
        uint32_t* words[kRowsAtOnce];
        uint4 chunks[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            int const row = begin + r * kStep;
            chunks[r] =
                load_chunk_of_cluster(source + chunk_offset(min(row, N - 1), lane % (kWarpSize / kClusterSize)));
            words[r] = row < num_rows ? block_words + row * words_per_row : nullptr;
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            octets[r] = activate_octet<Element>(chunks[r], num_columns, params.act);
        }
        pack_rows(octets, words, column_begin, params.words_per_tile - 1);
    }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element, class Cfg>
__global__ void __cluster_dims__(kClusterSize) __launch_bounds__(kThreads, 1)
    gate_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    constexpr int BLOCK_N = Cfg::BLOCK_N;
    extern __shared__ __align__(1024) unsigned char shared[];
    uint32_t const shared_base = shared_address(shared);
    auto const stage_a = [=](int stage) { return shared_base + stage * Cfg::kBytesStage; };
    auto const stage_b = [=](int stage) { return shared_base + stage * Cfg::kBytesStage + Cfg::kBytesA; };
    uint32_t const z = shared_base + Cfg::kOffsetZ;
    // A stage is full when all its bytes are there, and empty when the consumers of both CTAs are done with it, since
    // either CTA writes into both. z is stored when this CTA's consumers have left it, full when both CTAs' is stored,
    // and empty when the packers of both CTAs have read it.
    auto const barrier = [=](int i) { return shared_base + Cfg::kOffsetBarriers + i * 8; };
    auto const stage_full = [=](int stage) { return barrier(stage); };
    auto const stage_empty = [=](int stage) { return barrier(Cfg::kNumStages + stage); };
    uint32_t const z_stored = barrier(2 * Cfg::kNumStages);
    uint32_t const z_full = barrier(2 * Cfg::kNumStages + 1);
    uint32_t const z_empty = barrier(2 * Cfg::kNumStages + 2);

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    uint32_t const rank = cluster_rank();

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            init_barrier(stage_full(stage), 1);
            init_barrier(stage_empty(stage), kClusterSize * kConsumerWarps);
        }
        init_barrier(z_stored, kConsumers * kWarpgroupSize);
        init_barrier(z_full, kClusterSize);
        init_barrier(z_empty, kClusterSize * kPackers);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        prefetch_map(params.x);
        prefetch_map(params.w_gate);
    }
    sync_cluster();

    int const num_slices = params.d_model / BLOCK_K;
    int const tiles_end = params.num_blocks * params.num_tiles;
    int const tiles_begin = static_cast<int>(blockIdx.x) / kClusterSize;
    int const tiles_step = static_cast<int>(gridDim.x) / kClusterSize;

    if (warp >= kWarpgroupWarps) {
        // Consumers
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegistersConsumer));
        int const consumer_warp = warp - kWarpgroupWarps;
        int const consumer = consumer_warp / kWarpgroupWarps;
        Ring<Cfg::kNumStages> ring;
        uint32_t z_parity = 0;
        int i = tiles_begin;
        while (true) {
            Tile const tile(params, i);
            float2 const biases = load_biases<Element>(
                params, tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M + consumer_warp * 16 + lane / 4);
            float accumulators[Cfg::kAccumulators];
            int stage_before = 0;
            for (int slice = 0; slice < num_slices; ++slice) {
                wait_barrier(stage_full(ring.stage), ring.parity);
                uint64_t const a = describe(stage_a(ring.stage) + consumer * (WGMMA_M * BLOCK_K * 2));
                uint64_t const b = describe(stage_b(ring.stage));
                begin_wgmma();
#pragma unroll
                for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
                    Wgmma<Element, BLOCK_N>::run(accumulators, a + k * (WGMMA_K * 2 >> 4), b + k * (WGMMA_K * 2 >> 4),
                                                 (slice | k) != 0);
                }
                commit_wgmma();
                // One slice stays in flight while the stage of the one before is handed back.
                wait_wgmma<1>();
                if (slice != 0 && lane < kClusterSize) {
                    arrive_at_cta(stage_empty(stage_before), lane);
                }
                stage_before = ring.stage;
                ring.advance();
            }
            wait_wgmma<0>();
            // The compiler does not know that the accumulators were not valid until here.
#pragma unroll
            for (int k = 0; k < Cfg::kAccumulators; ++k) {
                asm volatile("" : "+f"(accumulators[k])::"memory");
            }
            if (lane < kClusterSize) {
                arrive_at_cta(stage_empty(stage_before), lane);
            }

            // Epilogue, first part
            wait_barrier(z_empty, z_parity ^ 1);
            store_z<Element, BLOCK_N>(z, accumulators, biases, consumer_warp * 2);
            if (i + tiles_step >= tiles_end) {
                break;
            }
            arrive(z_stored);
            i += tiles_step;
            z_parity ^= 1;
        }
        // There is nothing more to multiply, so the consumers pack the last tile.
        sync_cluster();
        pack_block<Element, BLOCK_N, kClusterSize * kConsumerWarps>(
            params, Tile(params, i), z, static_cast<int>(rank) * kConsumerWarps + consumer_warp);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegistersFirst));
        if (warp == 0) {
            // Loader
            if (lane == 0) {
                int const half = rank == 0 ? 0 : BLOCK_N - Cfg::kRowsLoaded;
                Ring<Cfg::kNumStages> ring;
                for (int i = tiles_begin; i < tiles_end; i += tiles_step) {
                    Tile const tile(params, i);
                    int const row_w = tile.tile_idx * TWELL_TILE + static_cast<int>(rank) * BLOCK_M;
                    int const row_x = tile.block_idx * BLOCK_N + half;
                    for (int slice = 0; slice < num_slices; ++slice) {
                        wait_barrier(stage_empty(ring.stage), ring.parity ^ 1);
                        uint32_t const full = stage_full(ring.stage);
                        arrive_and_expect(full, Cfg::kBytesLoaded);
                        load_box(stage_a(ring.stage), params.w_gate, full, slice * BLOCK_K, row_w);
                        load_box_for_all(stage_b(ring.stage) + half * (BLOCK_K * 2), params.x, full, slice * BLOCK_K,
                                         row_x);
                        ring.advance();
                    }
                }
            }
            __syncwarp();
        } else {
            // Packers: epilogue, second part, of all tiles but the last
            uint32_t z_parity = 0;
            for (int i = tiles_begin; i + tiles_step < tiles_end; i += tiles_step, z_parity ^= 1) {
                if (warp == 1) {
                    wait_barrier(z_stored, z_parity);
                    if (lane < kClusterSize) {
                        release_to_cta(z_full, lane);
                    }
                    __syncwarp();
                }
                wait_for_cluster(z_full, z_parity);
                pack_block<Element, BLOCK_N, kClusterSize * kPackers>(params, Tile(params, i), z,
                                                                      static_cast<int>(rank) * kPackers + warp - 1);
                __syncwarp();
                if (lane < kClusterSize) {
                    arrive_at_cta(z_empty, lane);
                }
            }
        }
        sync_cluster();
    }
    // The other CTA may still read this one's z and signal its barriers.
    __syncwarp();
    sync_cluster();
#endif
}

}  // namespace twell::gate_sm90

#endif  // TWELL_KERNELS_GATE_SM90_CUH_

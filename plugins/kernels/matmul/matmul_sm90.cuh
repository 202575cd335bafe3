// Matrix products on Hopper (sm_90a): TMA, mbarriers, wgmma. Shared by the gate and the dense path.
//
// The products are computed transposed, neurons x tokens, because the tensor cores' second extent is free: any multiple
// of 8 up to 256. So a launch can cut the tokens into blocks that fill its last round of tiles. A pair of CTAs, a
// cluster, computes [one tile of 2 x 128 neurons, one block of tokens] at a time; both need the same tokens, so each
// loads half of them for both. Or the tile is [128 neurons, two blocks of tokens], and weights are what they share. Or
// the product is not transposed: the tile is [block of neurons, 2 x 128 tokens], where the neurons can be cut freely.
// ("Neurons" are the columns of the result, also where these are d_out.) The kernels have
//   a loader       which brings slices of the weights and the tokens into the stages, across the boundaries of tiles;
//   two consumers  warpgroups, of 64 neurons (if tall, tokens) each, which multiply and leave the rounded result in
//                  shared memory;
//   helpers        three warps, which carry that result on while the consumers are at the next tile.
// A kernel may multiply the same tokens by several weight matrices at once.
#pragma once

#include <cuda.h>

#include "device/cluster.cuh"
#include "device/element.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "matmul/tiling_sm90.h"
#include "twell/twell.h"

namespace twell::matmul_sm90 {

constexpr int kRowsPerSwizzle = 8;
constexpr int kWarpNeurons = 16;  // of a consumer warp, or tokens
constexpr int kBytesWarpRow = kWarpNeurons * 2;
static_assert(BLOCK_K == kRowElements && WGMMA_M == kRowElements, "a row lies along K or along M");

constexpr int kWarpgroupSize = 128;
constexpr int kWarpgroupWarps = kWarpgroupSize / kWarpSize;
constexpr int kConsumers = BLOCK_M / WGMMA_M;  // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroupWarps;
constexpr int kThreads = (1 + kConsumers) * kWarpgroupSize;
constexpr int kHelpers = kWarpgroupWarps - 1;  // warps

// Registers a thread. The kernels start with as many as __launch_bounds__ gives each; then the first warpgroup gives
// some to the consumers, whose accumulators alone take up to 128.
constexpr int kRegistersFirst = 88;
constexpr int kRegistersConsumer = 208;
constexpr bool registers_suffice(int first, int consumer) {
    return (first + kConsumers * consumer) * kWarpgroupSize <= 65536 / kThreads / 8 * 8 * kThreads;
}
static_assert(registers_suffice(kRegistersFirst, kRegistersConsumer), "setmaxnreg.inc would wait for ever");

// Token blocks that are visited with all tiles before the next ones: about 8 x 256 rows of x and as many neurons'
// weights are then at work at a time, the least traffic from memory to L2.
constexpr int kGroupBlocks = 8;

constexpr int kMaxSharedBytes = 227 * 1024;

// kBlock: tokens in a block, if tall neurons; a multiple of 8, at most 256. kResultInShared: there is room for the
// whole result, which helpers carry on; else each consumer warp has a little and carries it on itself. kMatrices:
// weight matrices that are multiplied at once. kScaledTokens: with a slice of the tokens comes a scale for each of
// them, see multiply_scaled().
template <int kBlock, bool kResultInShared = true, int kMatrices = 1, Layout kTileLayout = Layout::kSharesTokens,
          bool kScaledTokens = false>
struct Config {
    static constexpr bool kHasTokenScales = kScaledTokens;
    static constexpr int BLOCK_N = kBlock;
    static constexpr int kProducts = kMatrices;
    static constexpr Layout kLayout = kTileLayout;
    static constexpr int kAccumulators = WGMMA_M * BLOCK_N / kWarpgroupSize;  // of one product
    static constexpr bool kSharesTokens = kTileLayout == Layout::kSharesTokens;
    static constexpr bool kSharesWeights = kTileLayout == Layout::kSharesWeights;
    static constexpr bool kIsTall = kTileLayout == Layout::kTall;
    static constexpr int kTileNeurons = kIsTall ? BLOCK_N : kSharesTokens ? kClusterSize * BLOCK_M : BLOCK_M;
    static constexpr int kTokens = kIsTall ? BLOCK_M : BLOCK_N;  // of a CTA
    static constexpr int kTileTokens = kSharesTokens ? kTokens : kClusterSize * kTokens;
    // Each CTA loads that many tokens: its own, or half of a shared block, whole swizzle patterns. The halves may
    // overlap by one.
    static constexpr int kRowsLoaded =
        kSharesTokens ? (BLOCK_N / kClusterSize + kRowsPerSwizzle - 1) / kRowsPerSwizzle * kRowsPerSwizzle : kTokens;
    // And of each matrix that many weights: half of a shared block; if tall, one of two matrices.
    static constexpr int kWeightRowsLoaded = kIsTall ? BLOCK_N : kSharesWeights ? BLOCK_M / kClusterSize : BLOCK_M;
    static_assert(BLOCK_M == kBytesRow,
                  "of a transposed matrix of bytes a CTA has as many neurons as a slice has rows");
    static_assert(BLOCK_N % 8 == 0 && BLOCK_N >= 16 && BLOCK_N <= 256, "what wgmma can do");
    static_assert(!kIsTall || kProducts == kClusterSize, "each CTA loads a matrix");

    // Shared memory: stages of A (weights), 128 neurons of each matrix, and B (tokens) [BLOCK_N, BLOCK_K], or if tall
    // of A (tokens) and B (weights), [BLOCK_N, BLOCK_K] of each matrix, swizzled by TMA; the rounded result, [BLOCK_N,
    // 64 neurons] of each consumer or twice [16 tokens, 16 neurons] of each warp; barriers.
    static constexpr int kBytesMatrix = (kIsTall ? BLOCK_N : BLOCK_M) * BLOCK_K * 2;
    static constexpr int kBytesTokens = kTokens * BLOCK_K * 2;
    static constexpr int kBytesA = kIsTall ? kBytesTokens : kProducts * kBytesMatrix;
    static constexpr int kBytesB = kIsTall ? kProducts * kBytesMatrix : kBytesTokens;
    static constexpr int kBytesScales = kHasTokenScales ? 1024 : 0;
    static constexpr int kBytesStage = kBytesA + kBytesB + kBytesScales;
    static constexpr int kBytesLoaded =  // into a stage
        kProducts * kBytesMatrix + (kSharesTokens ? kClusterSize : 1) * kRowsLoaded * BLOCK_K * 2 +
        (kHasTokenScales ? kTokens * 4 : 0);
    static constexpr int kBytesResultPart = BLOCK_N * kBytesRow;
    static constexpr int kBytesWarp = 2 * 2 * kRowsPerSwizzle * kBytesWarpRow;
    static constexpr int kBytesResult = kResultInShared ? kConsumers * kBytesResultPart : kConsumerWarps * kBytesWarp;
    static constexpr int kMoreBarriers = 4;  // for what a kernel does with the result
    static constexpr int kMostStages = (kMaxSharedBytes - 128 - kBytesResult) / kBytesStage;
    static constexpr int kNumStages = kMostStages < 8 ? kMostStages : 8;
    static constexpr int kOffsetResult = kNumStages * kBytesStage;
    static constexpr int kOffsetBarriers = kOffsetResult + kBytesResult;
    static constexpr int kOffsetMoreBarriers = kOffsetBarriers + 2 * kNumStages * 8;
    static constexpr int kSharedBytes = kOffsetMoreBarriers + kMoreBarriers * 8;
    static_assert(kNumStages >= 3 && kSharedBytes <= kMaxSharedBytes, "what a block of sm_90 can have");
    static_assert(kBytesStage % 1024 == 0 && kBytesResultPart % 1024 == 0,
                  "swizzle patterns of 128 bytes start at multiples of 1024");
};

// Of the products' common extent, in steps of BLOCK_K.
struct Slices {
    int begin;
    int end;

    __device__ __forceinline__ int count() const { return end - begin; }
};

// Which tokens and neurons are the i-th to be computed.
struct Tile {
    int block_idx;
    int tile_idx;

    __device__ __forceinline__ Tile(int num_blocks, int num_tiles, int i) {
        int const per_group = kGroupBlocks * num_tiles;
        int const within = i % per_group;
        int const first_block = i / per_group * kGroupBlocks;
        int const blocks = min(num_blocks - first_block, kGroupBlocks);
        tile_idx = within / blocks;
        block_idx = first_block + within % blocks;
    }

    // The first of a CTA's part.
    template <class Cfg>
    __device__ __forceinline__ int neuron_of(int rank) const {
        return tile_idx * Cfg::kTileNeurons + (Cfg::kSharesTokens ? rank * BLOCK_M : 0);
    }

    template <class Cfg>
    __device__ __forceinline__ int token_of(int rank) const {
        return block_idx * Cfg::kTileTokens + (Cfg::kSharesTokens ? 0 : rank * Cfg::kTokens);
    }
};

// The tokens that a CTA multiplies: a block from `begin` on. The first `skipped` are another CTA's, and from `end` on
// there are none. For TMA takes longer to fill up for tokens that are not there than to read some again.
struct Tokens {
    int begin;
    int skipped;
    int end;  // counted from `begin`

    // Its own ones begin with `own`, a multiple of `multiple`, as `begin` is.
    __device__ __forceinline__ Tokens(int own, int block, int num_tokens, int multiple = 1)
        : begin(max(min(own, (num_tokens - block + multiple - 1) / multiple * multiple), 0)),
          skipped(own - begin),
          end(min(num_tokens - begin, block)) {}

    // Those of a CTA's part of a tile.
    template <class Cfg>
    __device__ __forceinline__ static Tokens of(Tile const& tile, int rank, int num_tokens) {
        // TMA takes scales from multiples of 16 bytes on.
        return Tokens(tile.token_of<Cfg>(rank), Cfg::kTokens, num_tokens, Cfg::kHasTokenScales ? 4 : 1);
    }

    // Whether the i-th token is its own.
    __device__ __forceinline__ bool has(int i) const { return i >= skipped && i < end; }
};

// Describes rows of 64 elements in a stage, from `address` on; groups of 8 rows follow each other. For a K-major matrix
// the rows' elements lie along K, for an M-major one along M; then the rows do along K.
__device__ __forceinline__ uint64_t describe(uint32_t address) {
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | uint64_t{1} << 16 |
           uint64_t{kRowsPerSwizzle * kBytesRow >> 4} << 32 | uint64_t{1} << 62;
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

// Where everything lies in shared memory, which starts at `base`. A stage is full when all its bytes are there, and
// empty when the consumers of both CTAs are done with it, since either CTA writes into both.
template <class Cfg>
struct Shared {
    uint32_t base;

    __device__ __forceinline__ uint32_t stage_a(int stage) const { return base + stage * Cfg::kBytesStage; }
    __device__ __forceinline__ uint32_t stage_b(int stage) const { return stage_a(stage) + Cfg::kBytesA; }
    __device__ __forceinline__ uint32_t stage_weights(int stage) const {
        return Cfg::kIsTall ? stage_b(stage) : stage_a(stage);
    }
    __device__ __forceinline__ uint32_t stage_tokens(int stage) const {
        return Cfg::kIsTall ? stage_a(stage) : stage_b(stage);
    }
    __device__ __forceinline__ uint32_t stage_scales(int stage) const { return stage_b(stage) + Cfg::kBytesB; }
    __device__ __forceinline__ uint32_t result() const { return base + Cfg::kOffsetResult; }
    __device__ __forceinline__ uint32_t stage_full(int stage) const { return barrier(stage); }
    __device__ __forceinline__ uint32_t stage_empty(int stage) const { return barrier(Cfg::kNumStages + stage); }
    // One of those that a kernel may use as it likes.
    __device__ __forceinline__ uint32_t more_barrier(int i) const { return barrier(2 * Cfg::kNumStages + i); }

    // By one thread, before sync_cluster().
    __device__ __forceinline__ void init_stages() const {
        for (int stage = 0; stage < Cfg::kNumStages; ++stage) {
            init_barrier(stage_full(stage), 1);
            init_barrier(stage_empty(stage), kClusterSize * kConsumerWarps);
        }
    }

  private:
    __device__ __forceinline__ uint32_t barrier(int i) const { return base + Cfg::kOffsetBarriers + i * 8; }
};

// Loads the slices of tiles, by one thread of each CTA. The weights are one or several [neurons, K] in boxes of
// [kWeightRowsLoaded, BLOCK_K], or, if transposed, [K, neurons] in boxes of [BLOCK_K, WGMMA_M]; the tokens are
// [tokens, K] in boxes of [kRowsLoaded, BLOCK_K]. Of bytes two count as one column; transposed ones, whose tokens have
// scales [slices, tokens] in boxes of [1, kTokens], come in boxes of [kWeightRowsLoaded, 2 * WGMMA_M bytes].
template <class Cfg, bool kTransposedA>
struct Loader {
    Shared<Cfg> const& shared;
    CUtensorMap const* weights;  // [kProducts]
    CUtensorMap const& tokens;
    int rank;
    int num_tokens;
    int num_neurons;
    CUtensorMap const* token_scales = nullptr;
    Ring<Cfg::kNumStages> ring = {};

    __device__ __forceinline__ void load(Tile const& tile, Slices slices) {
#pragma unroll 1
        for (int slice = slices.begin; slice < slices.end; ++slice) {
            load_slice(tile, slice);
        }
    }

    // The first slices of the first tile, as many as fit in the stages, if its tokens must not be read before wait():
    // the weights come earlier. The rest of `slices` is left, unless not goes_on().
    template <class Wait, class GoesOn>
    __device__ __forceinline__ bool load_first(Tile const& tile, Slices& slices, Wait wait, GoesOn goes_on) {
        int const ahead = min(slices.count(), Cfg::kNumStages);
#pragma unroll 1
        for (int stage = 0; stage < ahead; ++stage) {
            load_weights(tile, slices.begin + stage, stage);
        }
        wait();
#pragma unroll 1
        for (int stage = 0; stage < ahead; ++stage, ring.advance()) {
            load_tokens(tile, slices.begin + stage, stage);
        }
        if (!goes_on()) {
#pragma unroll 1
            for (int stage = 0; stage < ahead; ++stage) {
                wait_barrier(shared.stage_full(stage), 0);
            }
            return false;
        }
        slices.begin += ahead;
        return true;
    }

    // When both CTAs' consumers are done with all that was loaded, no thread signals this one's barriers any more, so
    // that it may end.
    __device__ __forceinline__ void wait_for_consumers() {
#pragma unroll 1
        for (int i = 0; i < Cfg::kNumStages; ++i) {
            wait_barrier(shared.stage_empty(ring.stage), ring.parity ^ 1);
            ring.advance();
        }
    }

  private:
    __device__ __forceinline__ void load_slice(Tile const& tile, int slice) {
        wait_barrier(shared.stage_empty(ring.stage), ring.parity ^ 1);
        load_weights(tile, slice, ring.stage);
        load_tokens(tile, slice, ring.stage);
        ring.advance();
    }

    // A box that lies outside as a whole may hold any neurons, and TMA takes longer to fill up than to read.
    __device__ __forceinline__ int box_at(int neuron) const { return neuron < num_neurons ? neuron : 0; }

    // Also announces the tokens.
    __device__ __forceinline__ void load_weights(Tile const& tile, int slice, int stage) const {
        int const neuron = tile.neuron_of<Cfg>(rank);
        uint32_t const full = shared.stage_full(stage);
        arrive_and_expect(full, Cfg::kBytesLoaded);
#pragma unroll
        for (int product = 0; product < Cfg::kProducts; ++product) {
            uint32_t const destination = shared.stage_weights(stage) + product * Cfg::kBytesMatrix;
            if constexpr (Cfg::kIsTall) {
                // Either CTA brings one.
                if (product == rank) {
                    load_box_for_all(destination, weights[product], full, slice * BLOCK_K, neuron);
                }
            } else if constexpr (kTransposedA && Cfg::kHasTokenScales) {
                int const column = box_at(neuron) / 2;
                int const row = slice * BLOCK_M;
                if constexpr (Cfg::kSharesWeights) {
                    constexpr int kRows = Cfg::kWeightRowsLoaded;
                    load_box_for_all(destination + rank * (kRows * kBytesRow), weights[product], full, column,
                                     row + rank * kRows);
                } else {
                    load_box(destination, weights[product], full, column, row);
                }
            } else if constexpr (Cfg::kSharesWeights) {
                // Either CTA brings a half, which is a consumer's.
                int const first = box_at(neuron + rank * WGMMA_M);
                load_box_for_all(destination + rank * (Cfg::kBytesMatrix / kClusterSize), weights[product], full,
                                 kTransposedA ? first : slice * BLOCK_K, kTransposedA ? slice * BLOCK_K : first);
            } else if constexpr (kTransposedA) {
                for (int consumer = 0; consumer < kConsumers; ++consumer) {
                    load_box(destination + consumer * (BLOCK_K * kBytesRow), weights[product], full,
                             box_at(neuron + consumer * WGMMA_M), slice * BLOCK_K);
                }
            } else {
                load_box(destination, weights[product], full, slice * BLOCK_K, box_at(neuron));
            }
        }
    }

    __device__ __forceinline__ void load_tokens(Tile const& tile, int slice, int stage) const {
        uint32_t const full = shared.stage_full(stage);
        int const token = Tokens::of<Cfg>(tile, rank, num_tokens).begin;
        if constexpr (!Cfg::kSharesTokens) {
            load_box(shared.stage_tokens(stage), tokens, full, slice * BLOCK_K, token);
        } else {
            int const half = rank == 0 ? 0 : Cfg::BLOCK_N - Cfg::kRowsLoaded;
            load_box_for_all(shared.stage_tokens(stage) + half * kBytesRow, tokens, full, slice * BLOCK_K,
                             token + half);
        }
        if constexpr (Cfg::kHasTokenScales) {
            load_box(shared.stage_scales(stage), *token_scales, full, token, slice);
        }
    }
};

// The compiler does not know that accumulators must not change behind begin_wgmma(), nor that they are not valid before
// wait_wgmma().
template <int kProducts, int kAccumulators>
__device__ __forceinline__ void keep_in_place(float (&accumulators)[kProducts][kAccumulators]) {
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
        for (int k = 0; k < kAccumulators; ++k) {
            asm volatile("" : "+f"(accumulators[product][k])::"memory");
        }
    }
}

struct DoNothing {
    __device__ __forceinline__ void operator()(int) const {}
};

// accumulators[p] = the sum over slices of a product's operands, of kColumns columns, by one warpgroup. full(stage):
// the barrier that says that a stage is there; a(stage), b(stage): where the first product's operands lie, the next
// one's kProductA and kProductB bytes on; release(slice, stage): a slice's stage has been read; before(slice): what to
// do before it is multiplied. Without slices the accumulators stay as they are.
template <class Element, int kColumns, bool kTransposedA, int kProductA = 0, int kProductB = 0, int kProducts,
          int kAccumulators, int kNumStages, class Full, class A, class B, class Release, class Before = DoNothing>
__device__ __forceinline__ void multiply_slices(float (&accumulators)[kProducts][kAccumulators], Ring<kNumStages>& ring,
                                                int num_slices, Full full, A a_of, B b_of, Release release,
                                                Before before = {}) {
    // An M-major A has 16 whole rows for each step along K, else a step moves along the rows.
    constexpr int kStepA = kTransposedA ? WGMMA_K * kBytesRow : WGMMA_K * 2;
    int stage_before = 0;
    for (int slice = 0; slice < num_slices; ++slice) {
        wait_barrier(full(ring.stage), ring.parity);
        before(slice);
        uint64_t const a = describe(a_of(ring.stage));
        uint64_t const b = describe(b_of(ring.stage));
        begin_wgmma();
#pragma unroll
        for (int k = 0; k < BLOCK_K / WGMMA_K; ++k) {
#pragma unroll
            for (int product = 0; product < kProducts; ++product) {
                Wgmma<Element, kColumns>::template run<kTransposedA>(
                    accumulators[product], a + (product * kProductA + k * kStepA >> 4),
                    b + (product * kProductB + k * (WGMMA_K * 2) >> 4), (slice | k) != 0);
            }
        }
        commit_wgmma();
        // One slice stays in flight while the stage of the one before is handed back.
        wait_wgmma<1>();
        if (slice != 0) {
            release(slice - 1, stage_before);
        }
        stage_before = ring.stage;
        ring.advance();
    }
    wait_wgmma<0>();
    keep_in_place(accumulators);
    release(num_slices - 1, stage_before);
}

// Tells the CTAs of the cluster that a stage is empty, by a warp: both load into it.
__device__ __forceinline__ void release_stage(uint32_t empty) {
    uint32_t const lane = threadIdx.x % kWarpSize;
    if (lane < kClusterSize) {
        arrive_at_cta(empty, lane);
    }
}

// accumulators = the product of the slices that the loader loads, by one consumer.
template <class Element, class Cfg, bool kTransposedA, class Before = DoNothing>
__device__ __forceinline__ void multiply(float (&accumulators)[Cfg::kProducts][Cfg::kAccumulators],
                                         Shared<Cfg> const& shared, Ring<Cfg::kNumStages>& ring, int consumer,
                                         int num_slices, Before before = {}) {
    constexpr int kProductA = Cfg::kIsTall ? 0 : Cfg::kBytesMatrix;
    constexpr int kProductB = Cfg::kIsTall ? Cfg::kBytesMatrix : 0;
    multiply_slices<Element, Cfg::BLOCK_N, kTransposedA, kProductA, kProductB>(
        accumulators, ring, num_slices, [&](int stage) { return shared.stage_full(stage); },
        [&](int stage) { return shared.stage_a(stage) + consumer * (WGMMA_M * BLOCK_K * 2); },
        [&](int stage) { return shared.stage_b(stage); },
        [&](int, int stage) { release_stage(shared.stage_empty(stage)); }, before);
}

// The same for bytes. If `has_scales`, of their blocks, scale_of(product, slice) is that of a slice of a product's
// weights. NOTE: there are no registers for products beside the sums, so sums are brought to the scale of a slice
// before it is added.
template <class Cfg, class ScaleOf>
__device__ __forceinline__ void multiply_bytes(float (&accumulators)[Cfg::kProducts][Cfg::kAccumulators],
                                               Shared<Cfg> const& shared, Ring<Cfg::kNumStages>& ring, int consumer,
                                               int num_slices, bool has_scales, ScaleOf scale_of) {
    static_assert(!Cfg::kIsTall && BLOCK_K * 2 == TWELL_SCALE_BLOCK_SIZE && BLOCK_M == TWELL_SCALE_BLOCK_SIZE,
                  "a CTA's part of a slice of bytes is a block");
    auto const multiply_by = [&](auto factor_of) {
#pragma unroll
        for (int product = 0; product < Cfg::kProducts; ++product) {
            float const factor = factor_of(product);
#pragma unroll
            for (int i = 0; i < Cfg::kAccumulators; ++i) {
                accumulators[product][i] *= factor;
            }
        }
    };
    multiply<E4m3, Cfg, false>(accumulators, shared, ring, consumer, num_slices, [&](int slice) {
        if (has_scales && slice != 0) {
            wait_wgmma<0>();
            keep_in_place(accumulators);
            multiply_by([&](int product) { return scale_of(product, slice - 1) / scale_of(product, slice); });
            keep_in_place(accumulators);
        }
    });
    if (has_scales) {
        multiply_by([&](int product) { return scale_of(product, num_slices - 1); });
    }
}

// Computes the sums of the bytes that the loader loads, by one consumer warp: of transposed weights, and of tokens
// whose values have a scale for each slice. Of weights of which blocks have scales, `block_scales` is that of the first
// slice, and others follow in steps of `scale_step`; null: they have none. The tensor cores take bytes along K alone,
// so weights go through registers: of two neighbouring neurons a thread has the bytes of one, then of the other, as
// rows lane / 4 and that plus 8 of the sums. Along K they lie in the order 0, 8, 1, 9, ... 7, 15, and so must those of
// the tokens.
//
// Of large blocks a slice is multiplied in pieces of tokens: there are registers for the products of two, and those of
// one are added while the next one's are computed.
template <class Cfg>
__device__ __forceinline__ void multiply_scaled(float (&sums)[Cfg::kAccumulators], Shared<Cfg> const& shared,
                                                Ring<Cfg::kNumStages>& ring, int consumer_warp, int num_slices,
                                                float const* block_scales, int scale_step) {
    constexpr int kSteps = BLOCK_K / WGMMA_K;
    constexpr int kPieces = Cfg::BLOCK_N > 176 ? 4 : 1;
    constexpr int kPiece = Cfg::BLOCK_N / kPieces;
    constexpr int kPieceSums = Cfg::kAccumulators / kPieces;
    static_assert(kPieces * kPiece == Cfg::BLOCK_N && kPiece % kRowsPerSwizzle == 0,
                  "pieces of whole swizzle patterns");
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const first = lane * kBytesRow + ((consumer_warp ^ (lane % kRowsPerSwizzle)) << 4);
    uint32_t a[kSteps][4];
    float products[kPieces == 1 ? 1 : 2][kPieceSums];
#pragma unroll
    for (int i = 0; i < Cfg::kAccumulators; ++i) {
        sums[i] = 0.0f;
    }
    auto const load = [&] {
        wait_barrier(shared.stage_full(ring.stage), ring.parity);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t rows[4];  // pairs of bytes, of two rows each: 0 to 7, then 8 to 15, and so on
            load_matrix_x4<true>(rows, shared.stage_a(ring.stage) + first + k * (kWarpSize * kBytesRow));
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                a[k][2 * half] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x6240);
                a[k][2 * half + 1] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x7351);
            }
        }
    };
    auto const start = [&](int piece) {
        uint64_t const b = describe(shared.stage_b(ring.stage) + piece * kPiece * kBytesRow);
        begin_wgmma();
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            Wgmma<E4m3, kPiece>::run(products[piece % 2], a[k], b + (k * (WGMMA_K * 2) >> 4), k != 0);
        }
        commit_wgmma();
    };
    auto const add = [&](int piece, uint32_t scales, auto scale_of) {
#pragma unroll
        for (int i = 0; i < kPieceSums; i += 4) {
            uint2 const pair = load_half_chunk(scales + piece * kPiece * 4 + i * 8);
            float const scale[2] = {scale_of(__uint_as_float(pair.x)), scale_of(__uint_as_float(pair.y))};
            float* const to = sums + piece * kPieceSums + i;
            float const* const of = products[piece % 2] + i;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                to[k] = fmaf(of[k], scale[k % 2], to[k]);
            }
        }
    };
    for (int slice = 0; slice < num_slices; ++slice, ring.advance()) {
        load();
        start(0);
        uint32_t scales = shared.stage_scales(ring.stage) + lane % 4 * 8;
        if (kPieces != 1) {
            asm volatile("" : "+r"(scales));  // NOTE: else the compiler keeps many sums of parts of it
        }
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            bool const is_last = piece + 1 == kPieces;
            if (!is_last) {
                start(piece + 1);
                wait_wgmma<1>();
            } else {
                wait_wgmma<0>();
            }
            // The compiler does not know that the products were not valid until here, nor that the registers of the
            // weights were read.
#pragma unroll
            for (int i = 0; i < kPieceSums; ++i) {
                asm volatile("" : "+f"(products[piece % 2][i])::"memory");
            }
#pragma unroll
            for (int k = 0; k < kSteps && is_last; ++k) {
                asm volatile("" ::"r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]), "r"(a[k][3]) : "memory");
            }
            if (block_scales == nullptr) {
                add(piece, scales, [](float scale) { return scale; });
            } else {
                float const of_block = block_scales[int64_t{slice} * scale_step];
                add(piece, scales, [&](float scale) { return scale * of_block; });
            }
        }
        __syncwarp();
        release_stage(shared.stage_empty(ring.stage));
    }
}

// The result. The XOR makes 8 tokens' chunks of the same neurons fall into different banks; TMA's swizzle is the same.
template <class Cfg>
__device__ __forceinline__ uint32_t chunk_offset(int token, int chunk) {
    constexpr int kChunks = kRowElements / kVector;
    return static_cast<uint32_t>(chunk / kChunks * Cfg::kBytesResultPart + token * kBytesRow +
                                 (((chunk % kChunks) ^ (token & 7)) << 4));
}
constexpr int kChunksPerToken = BLOCK_M / kVector;

// The biases of a consumer thread's two neurons, `neuron` and the eighth after it; 0 past the last one.
template <class Element>
__device__ __forceinline__ float2 load_biases(uint16_t const* bias, int neuron, int num_neurons) {
    float2 biases = make_float2(0.0f, 0.0f);
    if (bias != nullptr) {
        biases.x = neuron < num_neurons ? Element::to_float(bias[neuron]) : 0.0f;
        biases.y = neuron + 8 < num_neurons ? Element::to_float(bias[neuron + 8]) : 0.0f;
    }
    return biases;
}

// Rounds a consumer's accumulators, with the biases of the thread's two neurons: two tokens of one neuron, the i-th
// accumulator's and the next one's.
template <class Element, int kAccumulators>
__device__ __forceinline__ uint32_t round_pair(float const (&accumulators)[kAccumulators], float2 biases, int i) {
    float const bias = i % 4 == 0 ? biases.x : biases.y;
    return Element::from_float2(accumulators[i] + bias, accumulators[i + 1] + bias);
}

// The same where a pair are neighbouring neurons of one token, `neuron` and the next one.
template <class Element, int kAccumulators>
__device__ __forceinline__ uint32_t round_neurons(float const (&accumulators)[kAccumulators], uint16_t const* bias,
                                                  int neuron, int num_neurons, int i) {
    float2 biases = make_float2(0.0f, 0.0f);
    if (bias != nullptr) {
        biases.x = neuron < num_neurons ? Element::to_float(bias[neuron]) : 0.0f;
        biases.y = neuron + 1 < num_neurons ? Element::to_float(bias[neuron + 1]) : 0.0f;
    }
    return Element::from_float2(accumulators[i] + biases.x, accumulators[i + 1] + biases.y);
}

// Leaves what round(i) makes of a consumer's i-th and next accumulators, for every even i, in the result. A warp has 16
// neurons: two chunks of each token's row.
template <class Cfg, class Round>
__device__ __forceinline__ void store_result(uint32_t result, int first_chunk, Round round) {
    constexpr int N = Cfg::BLOCK_N;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const address = result + chunk_offset<Cfg>(lane / 16 * 8 + lane % 8, first_chunk + lane / 8 % 2);
#pragma unroll
    for (int j = 0; j + 1 < N / 8; j += 2) {
        uint32_t const fragment[4] = {round(j * 4), round(j * 4 + 2), round(j * 4 + 4), round(j * 4 + 6)};
        store_transposed_x4(address + j * 8 * kBytesRow, fragment);
    }
    if constexpr (N / 8 % 2 != 0) {
        constexpr int j = N / 8 - 1;
        // Lanes from 16 on give no address.
        store_transposed_x2(address + j * 8 * kBytesRow, round(j * 4), round(j * 4 + 2));
    }
}

// Where a token's chunk lies among the 16 tokens that a warp passes on at a time, 512 bytes. The XOR makes 8 tokens'
// chunks fall into different banks.
__device__ __forceinline__ uint32_t passed_offset(int token, int chunk) {
    return static_cast<uint32_t>(token * kBytesWarpRow + ((chunk ^ (token >> 2 & 1)) << 4));
}

// The same, but passes the result on at once, by way of 2 x 512 bytes of the warp: calls store(token, chunk, values)
// with eight neurons of a token, chunk 0 or 1 of the warp's 16; if tall, with any chunk of one of the warp's 16 tokens.
template <class Cfg, class Round, class Store>
__device__ __forceinline__ void pass_result(uint32_t warp_bytes, Round round, Store store) {
    constexpr int N = Cfg::BLOCK_N;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const source = warp_bytes + passed_offset(lane / 2, lane % 2);
    uint32_t const destination = warp_bytes + (Cfg::kIsTall ? passed_offset(lane / 8 % 2 * 8 + lane % 8, lane / 16)
                                                            : passed_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        bool const is_whole = j + 1 < N / 8;  // else lanes from 16 on give no address
        uint32_t const buffer = destination + j / 2 % 2 * (Cfg::kBytesWarp / 2);
        if (is_whole) {
            uint32_t const fragment[4] = {round(j * 4), round(j * 4 + 2), round(j * 4 + 4), round(j * 4 + 6)};
            if (Cfg::kIsTall) {
                store_x4(buffer, fragment);
            } else {
                store_transposed_x4(buffer, fragment);
            }
        } else if (Cfg::kIsTall) {
            store_x2(buffer, round(j * 4), round(j * 4 + 2));
        } else {
            store_transposed_x2(buffer, round(j * 4), round(j * 4 + 2));
        }
        __syncwarp();
        if (is_whole || (Cfg::kIsTall ? lane % 2 == 0 : lane < 16)) {
            uint4 const values = load_chunk(source + j / 2 % 2 * (Cfg::kBytesWarp / 2));
            if (Cfg::kIsTall) {
                store(lane / 2, j + lane % 2, values);
            } else {
                store(j * 8 + lane / 2, lane % 2, values);
            }
        }
    }
}

// pass_result for sums of multiply_scaled: round(low, high) makes a pair of neighbouring columns of two accumulators of
// a token.
template <class Cfg, class Round, class Store>
__device__ __forceinline__ void pass_pairs(uint32_t warp_bytes, Round round, Store store) {
    constexpr int N = Cfg::BLOCK_N;
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const source = warp_bytes + passed_offset(lane / 2, lane % 2);
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        uint32_t const buffer = j / 2 % 2 * (Cfg::kBytesWarp / 2);
        bool const is_whole = j + 1 < N / 8;
#pragma unroll
        for (int of_pair = 0; of_pair < 4; ++of_pair) {
            int const i = j * 4 + of_pair / 2 * 4 + of_pair % 2;
            if (i < Cfg::kAccumulators) {
                int const token = of_pair / 2 * 8 + lane % 4 * 2 + of_pair % 2;
                store_shared_word(warp_bytes + buffer + passed_offset(token, lane / 16) + lane / 4 % 4 * 4,
                                  round(i, i + 2));
            }
        }
        __syncwarp();
        if (is_whole || lane < 16) {
            store(j * 8 + lane / 2, lane % 2, load_chunk(source + buffer));
        }
    }
    __syncwarp();  // the memory may be written again
}

// The way back, if not tall: adds rows to a consumer's accumulators, by way of the same memory. load(token, chunk)
// gives eight neurons of a token, chunk 0 or 1 of the warp's 16.
template <class Element, class Cfg, class Load>
__device__ __forceinline__ void add_rows(float (&accumulators)[Cfg::kAccumulators], uint32_t warp_bytes, Load load) {
    static_assert(!Cfg::kIsTall, "a warp has 16 neurons");
    constexpr int kTurnTokens = kWarpSize / 2;
    constexpr int kTurns = (Cfg::BLOCK_N + kTurnTokens - 1) / kTurnTokens;
    constexpr int kAtOnce = 8;  // loads under way
    int const lane = threadIdx.x % kWarpSize;
    uint32_t const destination = warp_bytes + passed_offset(lane / 2, lane % 2);
    uint32_t const source = warp_bytes + passed_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int begin = 0; begin < kTurns; begin += kAtOnce) {
        uint4 chunks[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            if (begin + r < kTurns) {
                chunks[r] = load((begin + r) * kTurnTokens + lane / 2, lane % 2);
            }
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            int const turn = begin + r;
            if (turn >= kTurns) {
                break;
            }
            uint32_t const buffer = turn % 2 * (Cfg::kBytesWarp / 2);
            store_chunk(destination + buffer, chunks[r]);
            __syncwarp();
            uint32_t fragment[4];
            load_matrix_x4<true>(fragment, source + buffer);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int const i = turn * 8 + k * 2;
                if (i < Cfg::kAccumulators) {
                    float2 const pair = Element::to_float2(fragment[k]);
                    accumulators[i] += pair.x;
                    accumulators[i + 1] += pair.y;
                }
            }
        }
    }
    __syncwarp();  // the memory may be written again
}

}  // namespace twell::matmul_sm90

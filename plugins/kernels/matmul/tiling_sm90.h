// How a product of matmul_sm90.cuh is cut into tiles, and what that costs: the choice of a configuration, without
// device code.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>

#include "device/cluster.cuh"
#include "host/launch.h"
#include "host/problem.h"
#include "twell/twell.h"

namespace twell::matmul_sm90 {

constexpr int BLOCK_M = TWELL_TILE / kClusterSize;  // neurons of a CTA, if tall tokens
constexpr int BLOCK_K = 64;
constexpr int WGMMA_M = 64;
constexpr int WGMMA_K = 16;
constexpr int kRowElements = 64;  // in a row of shared memory, as long as the swizzle pattern
constexpr int kBytesRow = kRowElements * 2;

// How a cluster's two CTAs divide a tile, and what they share.
enum class Layout {
    kSharesTokens,   // [2 x 128 neurons, a block of tokens]
    kSharesWeights,  // [128 neurons, 2 blocks of tokens]
    kTall,           // [a block of neurons, 2 x 128 tokens], sharing weights: the product is not transposed
};

// Parts of a sum, each a cluster's, at most; there are 1, 2 or 4. See parts_sm90.cuh.
constexpr int kMostParts = 4;

// Tokens a block may have. Large blocks read the weights less often; the right one fills the last round.
template <int... kTokens>
struct Choices {};

// The tilings of a product that there are kernels for: where the CTAs of a cluster share tokens, where weights, and of
// tall tiles, whose choices are neurons. Sharing weights pays where they are the larger operand.
template <class TokensSharedChoices, class WeightsSharedChoices, class TallChoices = Choices<>>
struct Tilings {};

// The products that a launch computes.
struct Product {
    int64_t tokens;
    int num_neurons;
    int num_slices;
    int num_matrices;        // at once
    int64_t most_part_sums;  // that the parts of sums may leave in memory: several clusters may share a sum
    int cluster_cycles;      // what each cluster at work costs: where there is none, the next kernel may begin
};

// A product that is cut into blocks of tokens, if tall of neurons.
struct Tiling {
    int block = 0;
    Layout layout = Layout::kSharesTokens;
    int num_parts = 1;  // of each sum, each a cluster's
    int64_t num_blocks = 0;
    int num_tiles = 0;  // of neurons
    int tile_tokens = 0;
    int tile_neurons = 0;
    int64_t round_cycles = 0;
    int cluster_cycles = 0;

    // Clusters work in rounds, one tile each. A slice takes as long as the tensor cores need for it, or as what a CTA
    // asks for needs to come, and up to 6 % longer if both take about the same time. A round takes so much longer, for
    // a tile's start and end and for parts of sums. Measured on an H200, see benchmarks/LOG.md.
    static constexpr int kBytesPerCycle = 48;
    static constexpr int kCyclesOfOverhead = 4000;
    static constexpr int kCyclesOfTwoParts = 3000;
    static constexpr int kCyclesOfFourParts = 6500;
    // Of two parts: for each token beyond kTokensOfLargeParts in a block that CTAs share.
    static constexpr int kCyclesOfLargeParts = 90;
    static constexpr int kTokensOfLargeParts = 100;
    // For a round of tall tiles of more than kNeuronsOfLargeTall neurons.
    static constexpr int kCyclesOfLargeTall = 4000;
    static constexpr int kNeuronsOfLargeTall = 128;
    // In larger blocks four parts cost more than they save, presumably as all multiprocessors then wait for memory.
    static constexpr int kMostTokensOfFourParts = 80;

    Tiling() = default;

    Tiling(Product const& product, int block_size, Layout tile_layout, int parts)
        : block(block_size), layout(tile_layout), num_parts(parts), cluster_cycles(product.cluster_cycles) {
        bool const is_tall = layout == Layout::kTall;
        bool const shares_tokens = layout == Layout::kSharesTokens;
        int const tokens = is_tall ? BLOCK_M : block;  // of a CTA
        int const weights = product.num_matrices * (is_tall ? block : BLOCK_M);
        tile_tokens = shares_tokens ? tokens : kClusterSize * tokens;
        tile_neurons = is_tall ? block : shares_tokens ? kClusterSize * BLOCK_M : BLOCK_M;
        num_blocks = ceil_div(product.tokens, tile_tokens);
        num_tiles = static_cast<int>(ceil_div(product.num_neurons, tile_neurons));
        int const rows = shares_tokens ? weights + tokens / kClusterSize : weights / kClusterSize + tokens;
        int const tensor_cycles = weights * tokens / WGMMA_M * BLOCK_K / WGMMA_K / 2;
        int const load_cycles = rows * kBytesRow / kBytesPerCycle;
        int const longer = std::max(tensor_cycles, load_cycles);
        int const slice_cycles = longer + std::max(40 * std::min(tensor_cycles, load_cycles) - 34 * longer, 0) / 100;
        int const beyond = shares_tokens ? std::max(tokens - kTokensOfLargeParts, 0) : 0;
        int const parts_cycles = parts == 4   ? kCyclesOfFourParts
                                 : parts == 2 ? kCyclesOfTwoParts + beyond * kCyclesOfLargeParts
                                              : 0;
        int const tall_cycles = is_tall && block > kNeuronsOfLargeTall ? kCyclesOfLargeTall : 0;
        round_cycles =
            ceil_div(product.num_slices, parts) * slice_cycles + kCyclesOfOverhead + parts_cycles + tall_cycles;
    }

    // Pieces of work, one to a cluster at a time.
    int64_t num_pieces() const { return num_blocks * num_tiles * num_parts; }
    int64_t num_sums() const { return num_blocks * num_tiles * tile_tokens * tile_neurons; }
    int64_t cycles(int clusters) const {
        return ceil_div(num_pieces(), clusters) * round_cycles +
               std::min<int64_t>(num_pieces(), clusters) * cluster_cycles;
    }
};

// Clusters that the device holds, one CTA a multiprocessor.
inline int num_clusters(Device const& device) { return device.num_multiprocessors / kClusterSize; }

// The tiling that takes the least time.
template <int... kShared, int... kOwn, int... kTall>
Tiling choose(Product const& product, int clusters, Tilings<Choices<kShared...>, Choices<kOwn...>, Choices<kTall...>>) {
    constexpr bool kOwnOnly = sizeof...(kShared) == 0;
    Tiling best(product, kOwnOnly ? std::max({0, kOwn...}) : std::max({0, kShared...}),
                kOwnOnly ? Layout::kSharesWeights : Layout::kSharesTokens, 1);
    auto const consider = [&](int block, Layout layout) {
        if (layout == Layout::kTall && product.tokens < BLOCK_M) {
            return;  // rows would be loaded that are not there
        }
        bool const may_have_four = layout == Layout::kSharesWeights && block <= Tiling::kMostTokensOfFourParts;
        for (int parts = may_have_four ? kMostParts : kMostParts / 2; parts >= 1; parts /= 2) {
            Tiling const tiling(product, block, layout, parts);
            bool const fits = parts <= product.num_slices && (parts - 1) * tiling.num_sums() <= product.most_part_sums;
            if (fits && tiling.cycles(clusters) <= best.cycles(clusters)) {
                best = tiling;
            }
        }
    };
    (consider(kTall, Layout::kTall), ...);
    (consider(kOwn, Layout::kSharesWeights), ...);
    (consider(kShared, Layout::kSharesTokens), ...);
    return best;
}

// CTAs of a launch.
inline dim3 grid_of(Tiling const& tiling, int clusters) {
    return dim3(static_cast<unsigned>(std::min<int64_t>(clusters, tiling.num_pieces()) * kClusterSize));
}

}  // namespace twell::matmul_sm90

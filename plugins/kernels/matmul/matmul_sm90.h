// Host side of matmul_sm90.cuh: tensor maps and the choice of a configuration.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "host/launch.h"
#include "host/problem.h"
#include "matmul/matmul_sm90.cuh"
#include "matmul/parts_sm90.cuh"

namespace twell::matmul_sm90 {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: this library does not link against the driver.
inline EncodeTiled find_encode_tiled() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    cudaError_t const error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
#else
    cudaError_t const error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(function)
                                                                         : nullptr;
}

// Describes a matrix [rows, columns] of 16-bit elements, whose rows begin `stride` elements apart and which TMA moves
// in boxes of [box_rows, kRowElements].
inline cudaError_t encode(Device const& device, CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns,
                          int64_t stride, int box_rows, int32_t dtype) {
    if (device.trace != nullptr) {
        return cudaSuccess;  // there is no matrix
    }
    static EncodeTiled const encode_tiled = find_encode_tiled();
    if (encode_tiled == nullptr) {
        return cudaErrorSymbolNotFound;
    }
    cuuint64_t const extents[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    cuuint64_t const strides[1] = {static_cast<cuuint64_t>(stride) * 2};
    cuuint32_t const box[2] = {kRowElements, static_cast<cuuint32_t>(box_rows)};
    cuuint32_t const steps[2] = {1, 1};
    static_assert(kBytesRow == 128, "a box's row is as long as the swizzle pattern");
    CUresult const result =
        encode_tiled(&map, dtype == TWELL_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2,
                     const_cast<void*>(matrix), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                     CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

inline cudaError_t encode(Device const& device, CUtensorMap& map, void const* matrix, int64_t rows, int64_t columns,
                          int box_rows, int32_t dtype) {
    return encode(device, map, matrix, rows, columns, columns, box_rows, dtype);
}

// Tokens a block may have. Large blocks read the weights less often; the right one fills the last round.
template <int... kTokens>
struct Choices {};

// The tilings of a product that there are kernels for: where the CTAs of a cluster share tokens, where weights, and of
// tall tiles, whose choices are neurons. Sharing weights pays where they are the larger operand.
template <class TokensSharedChoices, class WeightsSharedChoices, class TallChoices = Choices<>>
struct Tilings {};

// What a launch has to compute.
struct Product {
    int64_t tokens;
    int num_neurons;
    int num_slices;
    int num_matrices;        // at once
    int64_t most_part_sums;  // that the parts of sums may leave in memory: several clusters may share a sum
    int cluster_cycles;      // what each cluster at work costs: where there is none, the next kernel may begin
};

// A product, cut into blocks of so many tokens, if tall neurons.
struct Tiling {
    int block;
    Layout layout;
    int num_parts;  // of each sum, each a cluster's
    int64_t num_blocks;
    int num_tiles;  // of neurons
    int tile_tokens;
    int tile_neurons;
    int64_t round_cycles;
    int cluster_cycles;

    // Clusters work in rounds, one tile each. A slice takes as long as the tensor cores need for it, or as what a CTA
    // asks for needs to come, and up to 6 % longer if both take about the same time. A round takes so much longer, for
    // a tile's start and end and for parts of sums. Measured on an H200, see benchmarks/LOG.md.
    static constexpr int kBytesPerCycle = 48;
    static constexpr int kCyclesOfOverhead = 4000;
    static constexpr int kCyclesOfTwoParts = 3000;
    static constexpr int kCyclesOfFourParts = 6500;
    // For each token beyond so many in a block that CTAs share: two parts.
    static constexpr int kCyclesOfLargeParts = 90;
    static constexpr int kTokensOfLargeParts = 100;
    // For a round of tall tiles of more neurons than that.
    static constexpr int kCyclesOfLargeTall = 4000;
    static constexpr int kNeuronsOfLargeTall = 128;
    // In larger blocks four parts cost more than they save, presumably as all multiprocessors then wait for memory.
    static constexpr int kMostTokensOfFourParts = 80;

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

// What the host has to know of a kernel that is there in several configurations.
template <class Params>
struct Kernel {
    void (*function)(Params) = nullptr;
    int rows_loaded = 0;  // see Config
    int weight_rows_loaded = 0;
    int shared_bytes = 0;

    template <class Cfg>
    static Kernel of(void (*function)(Params)) {
        return {function, Cfg::kRowsLoaded, Cfg::kWeightRowsLoaded, Cfg::kSharedBytes};
    }
};

// Calls use(block, layout) for each of the tilings, as types std::integral_constant.
template <class Use, int... kShared, int... kOwn, int... kTall>
void for_each(Tilings<Choices<kShared...>, Choices<kOwn...>, Choices<kTall...>>, Use use) {
    (use(std::integral_constant<int, kShared>(), std::integral_constant<Layout, Layout::kSharesTokens>()), ...);
    (use(std::integral_constant<int, kOwn>(), std::integral_constant<Layout, Layout::kSharesWeights>()), ...);
    (use(std::integral_constant<int, kTall>(), std::integral_constant<Layout, Layout::kTall>()), ...);
}

// The tiling's kernel: what give(block, layout) gives for its block and layout.
template <class Params, class Give, class Tilings>
Kernel<Params> find_kernel(Tiling const& tiling, Tilings tilings, Give give) {
    Kernel<Params> result;
    for_each(tilings, [&](auto block, auto layout) {
        if (tiling.block == block && tiling.layout == layout) {
            result = give(block, layout);
        }
    });
    return result;
}

// A kernel's row: what the CTAs of a cluster share, and the extent that its tilings choose.
inline Label label_of(char const* name, int block, Layout layout) {
    return {name,
            {{layout == Layout::kSharesTokens    ? "shared_tokens"
              : layout == Layout::kSharesWeights ? "own_tokens"
                                                 : "neurons",
              block}}};
}

template <class Tilings>
void list(Text& text, char const* name, Tilings tilings) {
    for_each(tilings, [&](auto block, auto layout) { add_line(text, label_of(name, block, layout)); });
}

}  // namespace twell::matmul_sm90

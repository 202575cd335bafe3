// Matrix products for every GPU from sm_80 on: cp.async, ldmatrix, mma.sync. Shared by the gate and the dense path.
//
// A CTA computes [BLOCK_M tokens, one tile of BLOCK_N neurons] in slices of BLOCK_K and leaves the rounded result in
// shared memory, from where warps carry it on by rows. ("Neurons" are the columns of the result, also where these are
// d_out.)
#pragma once

#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell::matmul_generic {

constexpr int BLOCK_N = TWELL_TILE;
constexpr int BLOCK_K = 32;
constexpr int kBytesChunk = kVector * 2;

// Shape of one CTA: kWarpsM x kWarpsN warps share BLOCK_M x BLOCK_N; kNumStages slices are in flight.
template <int kBlockM, int kWarpsAlongM, int kWarpsAlongN, int kStages>
struct Config {
    static constexpr int BLOCK_M = kBlockM;
    static constexpr int kWarpsM = kWarpsAlongM;
    static constexpr int kWarpsN = kWarpsAlongN;
    static constexpr int kNumStages = kStages;

    static constexpr int kWarps = kWarpsM * kWarpsN;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int WARP_M = BLOCK_M / kWarpsM;
    static constexpr int WARP_N = BLOCK_N / kWarpsN;
    static constexpr int kTilesM = WARP_M / MMA_M;
    static constexpr int kTilesN = WARP_N / MMA_N;
    static_assert(WARP_M % MMA_M == 0, "a warp owns whole 16-row tensor-core tiles");
    static_assert(WARP_N % (2 * MMA_N) == 0, "one ldmatrix.x4 fetches weights for 16 columns");

    // Shared memory: stages of tokens [BLOCK_M, BLOCK_K] and weights [BLOCK_N, BLOCK_K] or [BLOCK_K, BLOCK_N];
    // afterwards the result.
    static constexpr int kBytesTokens = BLOCK_M * BLOCK_K * 2;
    static constexpr int kBytesWeights = BLOCK_N * BLOCK_K * 2;
    static constexpr int kBytesStage = kBytesTokens + kBytesWeights;
    // 16 bytes of padding move each row by four banks, so the accumulators' 8 rows x 4 words hit 32 banks.
    static constexpr int kResultStride = BLOCK_N + kVector;
    static constexpr int kBytesResult = BLOCK_M * kResultStride * 2;
    static constexpr int kSharedBytes =
        kBytesStage * kNumStages > kBytesResult ? kBytesStage* kNumStages : kBytesResult;
    static_assert(kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a block 99 KiB");
    // Rows of the result that a warp carries on at once.
    static constexpr int kRowsAtOnce = BLOCK_M / kWarps < 4 ? BLOCK_M / kWarps : 4;
    static_assert(BLOCK_M % (kWarps * kRowsAtOnce) == 0, "rows read are rows of the result");
};

// A row-major matrix from some element on; beyond its rows and columns come zeros. data and stride are multiples of
// kVector elements.
struct Operand {
    uint16_t const* data;
    int64_t stride;  // elements between rows
    int rows;
    int columns;  // a multiple of kVector
};

// How weights lie in memory: [neurons, K] or [K, neurons].
enum class Weights { kByNeuron, kByK };

// Byte offset of a 16-byte chunk in a slice whose rows are kColumns elements long. The XOR makes the eight rows that
// one ldmatrix phase reads fall into eight different 16-byte bank groups: a row of 64 bytes has half of them.
template <int kColumns>
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    static_assert(kColumns == 32 || kColumns % 64 == 0, "two rows span all banks, or one does");
    int const swizzle = kColumns == 32 ? row >> 1 & 3 : row & 7;
    return static_cast<uint32_t>(row * kColumns * 2 + ((chunk ^ swizzle) * kBytesChunk));
}

// Brings slices [kRows, kColumns] of an operand into shared memory, one after the other: to the right or, kDown, below.
template <int kRows, int kColumns, int kThreads, bool kDown>
class SliceLoader {
  public:
    __device__ __forceinline__ explicit SliceLoader(Operand const& operand)
        : source_(operand.data + first_row() * operand.stride + first_column()),
          stride_(operand.stride),
          rows_left_(operand.rows - first_row()),
          columns_left_(operand.columns - first_column()) {}

    // A slice comes in pieces, of a chunk a thread.
    static constexpr int kPieces = (kRows * kColumns / kVector + kThreads - 1) / kThreads;

    __device__ __forceinline__ void load_piece(uint32_t destination, int piece) const {
        int const i = piece * kRowsAtOnce;
        if (kRows % kRowsAtOnce != 0 && first_row() + i >= kRows) {
            return;
        }
        // Rows that a thread loads are a multiple of 8 apart, so the swizzle is the same for all.
        copy_async(destination + chunk_offset<kColumns>(first_row(), first_column() / kVector) + i * kColumns * 2,
                   source_ + i * stride_, columns_left_ > 0 && i < rows_left_);
    }

    // To the next slice.
    __device__ __forceinline__ void advance() {
        if constexpr (kDown) {
            source_ += kRows * stride_;
            rows_left_ -= kRows;
        } else {
            source_ += kColumns;
            columns_left_ -= kColumns;
        }
    }

  private:
    static constexpr int kChunksPerRow = kColumns / kVector;
    static constexpr int kRowsAtOnce = kThreads / kChunksPerRow;
    static_assert(kRowsAtOnce % 8 == 0, "see load_piece()");

    static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kChunksPerRow; }
    static __device__ __forceinline__ int first_column() {
        return static_cast<int>(threadIdx.x) % kChunksPerRow * kVector;
    }

    uint16_t const* source_;
    int64_t stride_;
    int rows_left_;
    int columns_left_;
};

template <class Cfg>
struct Fragments {
    uint32_t tokens[Cfg::kTilesM][4];
    uint32_t weights[Cfg::kTilesN / 2][4];  // [0], [1]: columns 0-7; [2], [3]: columns 8-15
};

template <class Cfg>
struct Accumulators {
    float sums[Cfg::kTilesM][Cfg::kTilesN][4];

    // Of this thread's sums [i][...][2 * half] and the next one: the row within the block.
    static __device__ __forceinline__ int row_of(int i, int half) {
        int const warp_m = static_cast<int>(threadIdx.x) / kWarpSize / Cfg::kWarpsN;
        return warp_m * Cfg::WARP_M + i * MMA_M + half * 8 + static_cast<int>(threadIdx.x) % kWarpSize / 4;
    }
    // Of [...][j][even]: the column within the tile.
    static __device__ __forceinline__ int column_of(int j) {
        int const warp_n = static_cast<int>(threadIdx.x) / kWarpSize % Cfg::kWarpsN;
        return warp_n * Cfg::WARP_N + j * MMA_N + static_cast<int>(threadIdx.x) % 4 * 2;
    }
};

template <class Cfg, Weights kWeights>
__device__ __forceinline__ void load_fragments(Fragments<Cfg>& fragments, uint32_t stage, int k_step) {
    // NOTE: steps and columns at a constant distance are found by an XOR with that, as in chunk_offset; rows a multiple
    // of 16 apart have the same swizzle. So few offsets are kept.
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int const first_row = warp / Cfg::kWarpsN * Cfg::WARP_M;
    int const first_column = warp % Cfg::kWarpsN * Cfg::WARP_N;
    uint32_t const step_bytes = static_cast<uint32_t>(k_step * MMA_K * 2);
    uint32_t const tokens = stage + (chunk_offset<BLOCK_K>(first_row + lane % 16, lane / 16) ^ step_bytes);
#pragma unroll
    for (int i = 0; i < Cfg::kTilesM; ++i) {
        load_matrix_x4<false>(fragments.tokens[i], tokens + i * MMA_M * BLOCK_K * 2);
    }
    constexpr int kColumns = 2 * MMA_N;  // that one ldmatrix.x4 fetches
    if constexpr (kWeights == Weights::kByNeuron) {
        int const row = first_column + lane % 8 + lane / 16 * 8;
        uint32_t const weights = stage + Cfg::kBytesTokens + (chunk_offset<BLOCK_K>(row, lane / 8 % 2) ^ step_bytes);
#pragma unroll
        for (int j = 0; j < Cfg::kTilesN / 2; ++j) {
            load_matrix_x4<false>(fragments.weights[j], weights + j * kColumns * BLOCK_K * 2);
        }
    } else {
        static_assert(Cfg::WARP_N % 64 == 0, "the XOR changes no bit of first_column");
        uint32_t const weights = stage + Cfg::kBytesTokens + k_step * MMA_K * BLOCK_N * 2;
        uint32_t const offset = chunk_offset<BLOCK_N>(lane % 16, first_column / kVector + lane / 16);
#pragma unroll
        for (int j = 0; j < Cfg::kTilesN / 2; ++j) {
            load_matrix_x4<true>(fragments.weights[j], weights + (offset ^ j * kColumns * 2));
        }
    }
}

// All of a CTA: the sums of tokens [BLOCK_M, K] and weights, over num_slices slices of K. Shared memory may be used
// again afterwards; before, it must not be in use.
template <class Element, class Cfg, Weights kWeights>
__device__ __forceinline__ void multiply(Accumulators<Cfg>& accumulators, unsigned char* shared, Operand const& tokens,
                                         Operand const& weights, int num_slices) {
    constexpr int kStepsPerSlice = BLOCK_K / MMA_K;
    constexpr bool kByK = kWeights == Weights::kByK;
    uint32_t const shared_base = shared_address(shared);

    SliceLoader<Cfg::BLOCK_M, BLOCK_K, Cfg::kThreads, false> token_loader(tokens);
    SliceLoader<kByK ? BLOCK_K : BLOCK_N, kByK ? BLOCK_N : BLOCK_K, Cfg::kThreads, kByK> weight_loader(weights);
    constexpr int kTokenPieces = decltype(token_loader)::kPieces;
    constexpr int kPieces = kTokenPieces + decltype(weight_loader)::kPieces;
    auto const load_piece = [&](int slice, int piece) {
        uint32_t const stage = shared_base + slice % Cfg::kNumStages * Cfg::kBytesStage;
        if (slice >= num_slices) {
            return;
        }
        if (piece < kTokenPieces) {
            token_loader.load_piece(stage, piece);
        } else {
            weight_loader.load_piece(stage + Cfg::kBytesTokens, piece - kTokenPieces);
        }
    };
    // Past the last slice an empty group is committed, so that the number of groups to wait for stays constant.
    auto const end_slice = [&] {
        token_loader.advance();
        weight_loader.advance();
        commit_async();
    };

    // Prologue
    for (int slice = 0; slice < Cfg::kNumStages - 1; ++slice) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            load_piece(slice, piece);
        }
        end_slice();
    }
    wait_async<Cfg::kNumStages - 2>();
    __syncthreads();

#pragma unroll
    for (int i = 0; i < Cfg::kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < Cfg::kTilesN; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                accumulators.sums[i][j][k] = 0.0f;
            }
        }
    }
    Fragments<Cfg> fragments[2];
    load_fragments<Cfg, kWeights>(fragments[0], shared_base, 0);

    // Main loop: the fragments of the next step are fetched while the current ones are multiplied. A slice's loads are
    // shared out to the steps: all in one step are 11 to 13 % slower.
    for (int slice = 0; slice < num_slices; ++slice) {
#pragma unroll
        for (int step = 0; step < kStepsPerSlice; ++step) {
            int slice_next = slice;
            if (step == kStepsPerSlice - 1) {
                // All warps have taken their last fragments of this slice: its stage may be refilled after this
                // barrier. The latest slice's loads are not yet committed.
                slice_next = slice + 1;
                wait_async<Cfg::kNumStages - 3>();
                __syncthreads();
            }
            // After the last slice this reads a stage that holds old data, which is never multiplied.
            load_fragments<Cfg, kWeights>(fragments[(step + 1) % 2],
                                          shared_base + slice_next % Cfg::kNumStages * Cfg::kBytesStage,
                                          (step + 1) % kStepsPerSlice);
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                if (piece * kStepsPerSlice / kPieces == step) {
                    load_piece(slice + Cfg::kNumStages - 1, piece);
                }
            }
            if (step == kStepsPerSlice - 1) {
                end_slice();
            }
#pragma unroll
            for (int i = 0; i < Cfg::kTilesM; ++i) {
#pragma unroll
                for (int j = 0; j < Cfg::kTilesN; ++j) {
                    uint32_t const* const pair = &fragments[step % 2].weights[j / 2][j % 2 * 2];
                    Element::mma(accumulators.sums[i][j], fragments[step % 2].tokens[i], pair[0], pair[1]);
                }
            }
        }
    }
    static_assert(kStepsPerSlice % 2 == 0, "each slice starts with fragments[0]");
    wait_async<0>();
    __syncthreads();
}

// Adds the bias, and if kAddsResult the values in the place of the result, and leaves the rounded result in shared
// memory. Only columns that have one read the bias.
template <class Element, class Cfg, bool kAddsResult = false>
__device__ __forceinline__ void store_result(unsigned char* shared, Accumulators<Cfg> const& accumulators,
                                             uint16_t const* bias, int num_columns) {
    uint16_t* const result = reinterpret_cast<uint16_t*>(shared);
#pragma unroll
    for (int j = 0; j < Cfg::kTilesN; ++j) {
        int const column = accumulators.column_of(j);
        float biases[2] = {0.0f, 0.0f};
        if (bias != nullptr) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                biases[k] = column + k < num_columns ? Element::to_float(bias[column + k]) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < Cfg::kTilesM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float const* const sums = &accumulators.sums[i][j][half * 2];
                uint32_t* const place =
                    reinterpret_cast<uint32_t*>(result + accumulators.row_of(i, half) * Cfg::kResultStride + column);
                float2 values = make_float2(sums[0] + biases[0], sums[1] + biases[1]);
                if constexpr (kAddsResult) {
                    float2 const before = Element::to_float2(*place);
                    values.x += before.x;
                    values.y += before.y;
                }
                *place = Element::from_float2(values.x, values.y);
            }
        }
    }
    __syncthreads();
}

// This lane's eight columns of a row of the result.
template <class Cfg>
__device__ __forceinline__ uint4 const* result_of(unsigned char const* shared, int row) {
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    return reinterpret_cast<uint4 const*>(reinterpret_cast<uint16_t const*>(shared) + row * Cfg::kResultStride +
                                          lane * kVector);
}

}  // namespace twell::matmul_generic

// Gate projection with packing for every GPU from sm_80 on: cp.async, ldmatrix, mma.sync.
//
// One CTA computes [BLOCK_M rows, one TwELL tile of 256 neurons] and packs it, so each (row, tile) has one writer and
// its entries come out in column order without atomics.
#ifndef TWELL_KERNELS_GATE_GENERIC_CUH_
#define TWELL_KERNELS_GATE_GENERIC_CUH_

#include "element.cuh"
#include "pack.cuh"
#include "twell/twell.h"

namespace twell::gate_generic {

constexpr int BLOCK_N = TWELL_TILE;
constexpr int BLOCK_K = 32;
constexpr int MMA_M = 16;
constexpr int MMA_N = 8;
constexpr int MMA_K = 16;

struct Params {
    uint16_t const* x;       // [tokens, d_model]
    uint16_t const* w_gate;  // [d_ff, d_model]
    uint16_t const* b_gate;  // [d_ff] or null
    uint32_t* packed;        // [tokens, num_tiles * words_per_tile]
    uint16_t* spilled;       // [tokens, num_tiles * TWELL_TILE] or null: see pack.cuh
    int64_t tokens;
    int d_model;
    int d_ff;
    int num_tiles;
    int words_per_tile;
    Activation act;
};

// Shape of one CTA: kWarpsM x kWarpsN warps share BLOCK_M x 256; kNumStages BLOCK_K-slices are in flight.
template <int kBlockM, int kWarpsAlongM, int kWarpsAlongN, int kStages>
struct Config {
    static constexpr int BLOCK_M = kBlockM;
    static constexpr int kWarpsM = kWarpsAlongM;
    static constexpr int kWarpsN = kWarpsAlongN;
    static constexpr int kNumStages = kStages;

    static constexpr int kThreads = kWarpsM * kWarpsN * kWarpSize;
    static constexpr int WARP_M = BLOCK_M / kWarpsM;
    static constexpr int WARP_N = BLOCK_N / kWarpsN;
    static constexpr int kTilesM = WARP_M / MMA_M;
    static constexpr int kTilesN = WARP_N / MMA_N;
    static_assert(WARP_M % MMA_M == 0, "a warp owns whole 16-row tensor-core tiles");
    static_assert(WARP_N % (2 * MMA_N) == 0, "one ldmatrix.x4 fetches B for 16 columns");

    // Shared memory: stages of A [BLOCK_M, BLOCK_K] and B [BLOCK_N, BLOCK_K]; afterwards the activated tile.
    static constexpr int kBytesA = BLOCK_M * BLOCK_K * 2;
    static constexpr int kBytesB = BLOCK_N * BLOCK_K * 2;
    static constexpr int kBytesStage = kBytesA + kBytesB;
    // 16 bytes of padding move each row by four banks, so the accumulators' 8 rows x 4 words hit 32 banks.
    static constexpr int kTileStride = BLOCK_N + 8;
    static constexpr int kBytesTile = BLOCK_M * kTileStride * 2;
    static constexpr int kSharedBytes = kBytesStage * kNumStages > kBytesTile ? kBytesStage* kNumStages : kBytesTile;
    static_assert(kSharedBytes <= 99 * 1024, "sm_86, sm_89 and sm_120 give a block 99 KiB");
};

__device__ __forceinline__ uint32_t shared_address(void const* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory, or fills them with zeros; then the source is not read and may be any address.
__device__ __forceinline__ void copy_async(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_async() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix_x4(uint32_t (&fragment)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(address)
                 : "memory");
}

// Byte offset of a 16-byte chunk in a [rows, BLOCK_K] slice. A slice row is 64 bytes, so two rows span all banks; the
// XOR makes the eight rows that one ldmatrix phase reads fall into eight different 16-byte bank groups.
__device__ __forceinline__ uint32_t chunk_offset(int row, int chunk) {
    return static_cast<uint32_t>(row * (BLOCK_K * 2) + ((chunk ^ ((row >> 1) & 3)) << 4));
}

// Brings BLOCK_K-slices of kRows rows into shared memory, one after the other. Rows from `num_rows` on and columns from
// d_model on are zeros: d_model is a multiple of 8, so a 16-byte chunk is either wholly inside or wholly outside.
template <int kRows, int kThreads>
class SliceLoader {
  public:
    __device__ __forceinline__ SliceLoader(uint16_t const* matrix, int num_rows, int d_model)
        : source_(matrix + static_cast<int64_t>(first_row()) * d_model + first_column()),
          row_stride_(static_cast<int64_t>(kRowsAtOnce) * d_model),
          columns_left_(d_model - first_column()),
          rows_left_(num_rows - first_row()) {}

    __device__ __forceinline__ void load(uint32_t destination) {
        bool const column_valid = columns_left_ > 0;
        // Rows that a thread loads are a multiple of 8 apart, so the swizzle is the same for all.
        uint32_t const offset = chunk_offset(first_row(), first_column() / kVector);
#pragma unroll
        for (int i = 0; i < kRows; i += kRowsAtOnce) {
            if (kRows % kRowsAtOnce != 0 && first_row() >= kRows) {
                break;
            }
            copy_async(destination + offset + i * (BLOCK_K * 2), source_ + i / kRowsAtOnce * row_stride_,
                       column_valid && i < rows_left_);
        }
        source_ += BLOCK_K;
        columns_left_ -= BLOCK_K;
    }

  private:
    static constexpr int kChunksPerRow = BLOCK_K / kVector;
    static constexpr int kRowsAtOnce = kThreads / kChunksPerRow;
    static_assert(kRowsAtOnce % 8 == 0, "see load()");
    static_assert(kRows % kRowsAtOnce == 0 || kRows < kRowsAtOnce, "a thread loads the same chunk of every row block");

    static __device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) / kChunksPerRow; }
    static __device__ __forceinline__ int first_column() {
        return static_cast<int>(threadIdx.x) % kChunksPerRow * kVector;
    }

    uint16_t const* source_;
    int64_t row_stride_;
    int columns_left_;
    int rows_left_;
};

template <class Cfg>
struct Fragments {
    uint32_t a[Cfg::kTilesM][4];
    uint32_t b[Cfg::kTilesN / 2][4];  // [0], [1]: columns 0-7; [2], [3]: columns 8-15
};

template <class Cfg>
__device__ __forceinline__ void load_fragments(Fragments<Cfg>& fragments, uint32_t stage, int warp_m, int warp_n,
                                               int k_step) {
    int const lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int i = 0; i < Cfg::kTilesM; ++i) {
        int const row = warp_m * Cfg::WARP_M + i * MMA_M + lane % 16;
        load_matrix_x4(fragments.a[i], stage + chunk_offset(row, k_step * 2 + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < Cfg::kTilesN / 2; ++j) {
        int const row = warp_n * Cfg::WARP_N + j * 2 * MMA_N + lane % 8 + (lane / 16) * 8;
        load_matrix_x4(fragments.b[j], stage + Cfg::kBytesA + chunk_offset(row, k_step * 2 + (lane / 8) % 2));
    }
}

// The 1: shared memory allows few blocks a multiprocessor anyway, so registers need not be saved for more.
template <class Element, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, 1) gate_kernel(Params const params) {
    constexpr int kStepsPerSlice = BLOCK_K / MMA_K;
    extern __shared__ __align__(128) unsigned char shared[];
    uint32_t const shared_base = shared_address(shared);

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const warp_m = warp / Cfg::kWarpsN;
    int const warp_n = warp % Cfg::kWarpsN;

    // Tiles of one row block are neighbours in launch order, so the rows of x stay in L2 while they are reused.
    int const tile_idx = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.num_tiles));
    int64_t const row_begin = static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(params.num_tiles)) * Cfg::BLOCK_M;
    int const column_begin = tile_idx * BLOCK_N;
    int const num_rows = static_cast<int>(min(params.tokens - row_begin, static_cast<int64_t>(Cfg::BLOCK_M)));
    int const num_columns = min(params.d_ff - column_begin, BLOCK_N);
    uint16_t const* const x = params.x + row_begin * params.d_model;
    uint16_t const* const w = params.w_gate + static_cast<int64_t>(column_begin) * params.d_model;
    int const num_slices = (params.d_model + BLOCK_K - 1) / BLOCK_K;

    // Past the last slice an empty group is committed, so that the number of groups to wait for stays constant.
    SliceLoader<Cfg::BLOCK_M, Cfg::kThreads> loader_a(x, num_rows, params.d_model);
    SliceLoader<BLOCK_N, Cfg::kThreads> loader_b(w, num_columns, params.d_model);
    auto const load_stage = [&](int slice) {
        if (slice < num_slices) {
            uint32_t const stage = shared_base + (slice % Cfg::kNumStages) * Cfg::kBytesStage;
            loader_a.load(stage);
            loader_b.load(stage + Cfg::kBytesA);
        }
        commit_async();
    };

    // Prologue
    for (int slice = 0; slice < Cfg::kNumStages - 1; ++slice) {
        load_stage(slice);
    }
    wait_async<Cfg::kNumStages - 2>();
    __syncthreads();

    float accumulators[Cfg::kTilesM][Cfg::kTilesN][4] = {};
    Fragments<Cfg> fragments[2];
    load_fragments<Cfg>(fragments[0], shared_base, warp_m, warp_n, 0);

    // Main loop: the fragments of the next step are fetched while the current ones are multiplied.
    for (int slice = 0; slice < num_slices; ++slice) {
#pragma unroll
        for (int step = 0; step < kStepsPerSlice; ++step) {
            int slice_next = slice;
            if (step == kStepsPerSlice - 1) {
                // All warps have taken their last fragments of this slice: its stage may be refilled after this
                // barrier.
                slice_next = slice + 1;
                wait_async<Cfg::kNumStages - 2>();
                __syncthreads();
            }
            // After the last slice this reads a stage that holds old data, which is never multiplied.
            load_fragments<Cfg>(fragments[(step + 1) % 2],
                                shared_base + (slice_next % Cfg::kNumStages) * Cfg::kBytesStage, warp_m, warp_n,
                                (step + 1) % kStepsPerSlice);
            if (step == 0) {
                load_stage(slice + Cfg::kNumStages - 1);
            }
#pragma unroll
            for (int i = 0; i < Cfg::kTilesM; ++i) {
#pragma unroll
                for (int j = 0; j < Cfg::kTilesN; ++j) {
                    uint32_t const* const b = &fragments[step % 2].b[j / 2][(j % 2) * 2];
                    Element::mma(accumulators[i][j], fragments[step % 2].a[i], b[0], b[1]);
                }
            }
        }
    }
    static_assert(kStepsPerSlice % 2 == 0, "each slice starts with fragments[0]");

    // Epilogue: bias, rounding and activation into a 16-bit tile [BLOCK_M, 256] that takes the stages' place.
    wait_async<0>();
    __syncthreads();
    uint16_t* const tile = reinterpret_cast<uint16_t*>(shared);
#pragma unroll
    for (int j = 0; j < Cfg::kTilesN; ++j) {
        int const column = warp_n * Cfg::WARP_N + j * MMA_N + (lane % 4) * 2;
        // NOTE: a NaN or infinity in x makes even zero-filled weights give NaN, so columns outside are masked by index.
        bool const valid[2] = {column < num_columns, column + 1 < num_columns};
        uint32_t const mask = (valid[0] ? 0xffffu : 0u) | (valid[1] ? 0xffff0000u : 0u);
        float bias[2] = {0.0f, 0.0f};
        if (params.b_gate != nullptr) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                bias[k] = valid[k] ? Element::to_float(params.b_gate[column_begin + column + k]) : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < Cfg::kTilesM; ++i) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const row = warp_m * Cfg::WARP_M + i * MMA_M + half * 8 + lane / 4;
                float const* const z = &accumulators[i][j][half * 2];
                *reinterpret_cast<uint32_t*>(tile + row * Cfg::kTileStride + column) =
                    activate2<Element>(z[0] + bias[0], z[1] + bias[1], params.act) & mask;
            }
        }
    }
    __syncthreads();

    int const words_per_row = params.num_tiles * params.words_per_tile;
    int const spilled_per_row = params.num_tiles * TWELL_TILE;
    uint16_t* const spilled =
        params.spilled == nullptr ? nullptr : params.spilled + row_begin * spilled_per_row + column_begin;
    uint32_t* const words = params.packed + row_begin * words_per_row + tile_idx * params.words_per_tile;
    constexpr int kWarps = Cfg::kThreads / kWarpSize;
    constexpr int kRowsAtOnce = Cfg::BLOCK_M / kWarps < 4 ? Cfg::BLOCK_M / kWarps : 4;
    static_assert(Cfg::BLOCK_M % (kWarps * kRowsAtOnce) == 0, "rows read are rows of the tile");
    for (int begin = warp; begin < num_rows; begin += kWarps * kRowsAtOnce) {
        Octet octets[kRowsAtOnce];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            int const row = begin + r * kWarps;
            uint4 const vector = *reinterpret_cast<uint4 const*>(tile + row * Cfg::kTileStride + lane * kVector);
            octets[r] = {vector.x, vector.y, vector.z, vector.w};
        }
        pack_rows(octets, (num_rows - begin + kWarps - 1) / kWarps, words + begin * words_per_row,
                  kWarps * words_per_row, spilled == nullptr ? nullptr : spilled + begin * spilled_per_row,
                  kWarps * spilled_per_row, column_begin, params.words_per_tile - 1);
    }
}

}  // namespace twell::gate_generic

#endif  // TWELL_KERNELS_GATE_GENERIC_CUH_

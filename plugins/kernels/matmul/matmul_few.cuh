// Products of few tokens, for every GPU from sm_80 on, where the time is that of reading the weights.
//
// The weights are the A operand of the tensor cores (16 neurons) and the tokens the B operand (8 tokens). The sum over
// d_model may visit its terms in any order, as long as both operands do: a lane takes the 8 neighbouring elements of
// one 16-byte vector as its share of two 16-wide steps, so fragments need no rearranging. Each warp has its own share
// of d_model and its own queue in shared memory: the CTA meets only once, to add up.
#pragma once

#include <stdint.h>

#include "device/block_scales.cuh"
#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "twell/twell.h"

namespace twell::matmul_few {

constexpr int kWarps = 8;  // they share out d_model, so results depend on their number
constexpr int kThreads = kWarps * kWarpSize;
// Neurons lie along MMA_M, tokens along MMA_N.
// Elements of d_model in one step of a warp, in 16-byte vectors: a cache line of each row.
constexpr int kVectorsPerStep = 8;
constexpr int kRowsAtOnce = kWarpSize / kVectorsPerStep;

__device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) % kWarpSize / kVectorsPerStep; }

// Bytes that one warp keeps of one step: the lines of the neurons' weights, then of the tokens.
template <int kTilesM, int kTilesN>
constexpr int kBytesWarpStage = (kTilesM * MMA_M + kTilesN * MMA_N) * kVectorsPerStep * 16;

// Rows `first` + i of a matrix, i < count. The rows from there on are zeros and are not read.
template <class Stored>
struct Consecutive {
    using Element = Stored;
    static constexpr bool kReside = false;
    Stored const* matrix;
    int64_t first;
    int count;
    float const* block_scales = nullptr;  // see block_scales_of: of all rows, which lie in one block
};

// Rows `first` + list[i] of a matrix, i < count; likewise.
template <class Stored>
struct Listed {
    using Element = Stored;
    static constexpr bool kReside = false;
    Stored const* matrix;
    int64_t first;
    int count;
    int const* list;
    float const* block_scales = nullptr;
};

// Rows in shared memory, `stride` bytes apart, zeros from d_model on up to a whole step of all warps. They are there
// when arrive() returns, which is called with the first weights under way. Rows that are missing are the last one
// again: nobody reads their sums.
template <int kRows, class Arrive>
struct Resident {
    static constexpr bool kReside = true;
    uint32_t rows;
    int stride;
    Arrive arrive;

    // Where a lane begins to read of eight rows, in the warp's share of the first step.
    __device__ __forceinline__ uint32_t first_chunk() const {
        int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
        int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
        return rows + min(lane / 4, kRows - 1) * stride + (warp * kVectorsPerStep + lane % 4) * 16;
    }
};

// Bytes of a row's line, and of those that a warp copies at once.
template <class Stored>
constexpr int kBytesLine = kVectorsPerStep * kVector * static_cast<int>(sizeof(Stored));
template <class Stored>
constexpr int kBytesLines = kRowsAtOnce * kBytesLine<Stored>;

// Copies a lane's part of kRows rows: the vector at `lane % 8` of each line of rows `lane / 8`, `lane / 8` + 4, ...
template <int kRows, class Source>
class LineLoader;

template <int kRows, class Stored>
class LineLoader<kRows, Consecutive<Stored>> {
  public:
    __device__ __forceinline__ LineLoader(Consecutive<Stored> const& source, int d_model, int first_vector)
        : pointer_(source.matrix + (source.first + first_row()) * d_model + first_vector * kVector),
          row_stride_(static_cast<uint32_t>(kRowsAtOnce * d_model)),
          rows_left_(source.count - first_row()) {}

    __device__ __forceinline__ void load(uint32_t destination, int vector, bool valid) const {
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
            copy_vector_async(destination + i * kBytesLines<Stored>,
                              pointer_ + vector * kVector + i * static_cast<uint64_t>(row_stride_),
                              valid && i * kRowsAtOnce < rows_left_);
        }
    }

  private:
    Stored const* pointer_;
    uint32_t row_stride_;
    int rows_left_;
};

template <int kRows, class Stored>
class LineLoader<kRows, Listed<Stored>> {
  public:
    __device__ __forceinline__ LineLoader(Listed<Stored> const& source, int d_model, int first_vector)
        : source_(source), d_model_(d_model), first_vector_(first_vector) {}

    __device__ __forceinline__ void load(uint32_t destination, int vector, bool valid) const {
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
            int const p = i * kRowsAtOnce + first_row();
            int64_t const row = source_.first + (p < source_.count ? source_.list[p] : 0);
            copy_vector_async(destination + i * kBytesLines<Stored>,
                              source_.matrix + row * d_model_ + (first_vector_ + vector) * kVector,
                              valid && p < source_.count);
        }
    }

  private:
    Listed<Stored> source_;
    int d_model_;
    int first_vector_;
};

template <int kTileRows, int kRows, class Arrive>
class LineLoader<kTileRows, Resident<kRows, Arrive>> {
  public:
    __device__ __forceinline__ LineLoader(Resident<kRows, Arrive> const&, int, int) {}
    __device__ __forceinline__ void load(uint32_t, int, bool) const {}
};

// Where a lane puts its vector of a line, and from where it takes the first of two vectors of a row; the second is
// where the distance to it differs in the bit that `swap` has, too. Vectors of odd rows swap their halves, so that the
// two rows x four vectors that a quarter of a warp reads at once lie in different banks; in FP8 it is four rows, half
// of a warp and odd pairs of rows.
template <class Stored>
struct Places {
    static constexpr int kVectorBytes = kVector * static_cast<int>(sizeof(Stored));
    static constexpr int kQuad = 4 * kVectorBytes;
    static constexpr int kPairs = sizeof(Stored) == 1 ? 1 : 0;  // bits of a row's number that do not tell
    static constexpr int kBytesRows = 8 * kBytesLine<Stored>;   // of eight rows

    __device__ __forceinline__ static uint32_t write_offset(int lane) {
        return lane / 8 * kBytesLine<Stored> + ((lane % 8) ^ ((lane / 8 >> kPairs & 1) << 2)) * kVectorBytes;
    }
    __device__ __forceinline__ static uint32_t read_offset(int lane) {
        return lane / 4 * kBytesLine<Stored> + (lane % 4) * kVectorBytes;
    }
    __device__ __forceinline__ static uint32_t read_swap(int lane) { return (lane / 4 >> kPairs & 1) * kQuad; }
};

template <int kTilesM, int kTilesN>
__device__ __forceinline__ void multiply_by(float factor, float (&accumulators)[kTilesM][kTilesN][4]) {
#pragma unroll
    for (int i = 0; i < kTilesM * kTilesN * 4; ++i) {
        accumulators[i / (kTilesN * 4)][i / 4 % kTilesN][i % 4] *= factor;
    }
}

// accumulators += matrix[rows, k] x[tokens, k] over this warp's share of k. The order of each sum does not depend on
// the number of tiles. begin() is called before anything is read. Queues have no place for tokens that are Resident.
template <class Element, int kTilesM, int kTilesN, int kNumStages, class Neurons, class Tokens, class Begin>
__device__ __forceinline__ void multiply(float (&accumulators)[kTilesM][kTilesN][4], Neurons const& neurons,
                                         Tokens const& tokens, int d_model, uint32_t queue, Begin begin) {
    constexpr int kQueuedN = Tokens::kReside ? 0 : kTilesN;
    constexpr int kBytesStage = kBytesWarpStage<kTilesM, kQueuedN>;
    using Stored = typename Neurons::Element;
    using PlacesW = Places<Stored>;
    using PlacesX = Places<uint16_t>;
    constexpr int kBytesRows = PlacesX::kBytesRows;
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const num_vectors = d_model / kVector;
    int const num_steps = (num_vectors + kVectorsPerStep * kWarps - 1) / (kVectorsPerStep * kWarps);
    int const first_vector = warp * kVectorsPerStep + lane % kVectorsPerStep;
    queue += warp * (kNumStages * kBytesStage);

    uint32_t const write_offset = PlacesX::write_offset(lane);
    uint32_t const read_offset = PlacesX::read_offset(lane);
    uint32_t const read_swap = PlacesX::read_swap(lane);

    LineLoader<kTilesM * MMA_M, Neurons> const weight_loader(neurons, d_model, first_vector);
    LineLoader<kTilesN * MMA_N, Tokens> const x_loader(tokens, d_model, first_vector);
    // A vector past the end is zero in both operands. Past the last step an empty group is committed, so that the
    // number of groups to wait for stays constant.
    auto const load_stage = [&](int step, uint32_t stage) {
        if (step < num_steps) {
            int const vector = step * (kVectorsPerStep * kWarps);
            bool const valid = first_vector + vector < num_vectors;
            x_loader.load(stage + kTilesM * 2 * kBytesRows + write_offset, vector, valid);
            weight_loader.load(stage + PlacesW::write_offset(lane), vector, valid);
        }
        commit_async();
    };
    begin();
#pragma unroll
    for (int stage = 0; stage < kNumStages; ++stage) {
        load_stage(stage, queue + stage * kBytesStage);
    }
    uint32_t resident = 0;
    if constexpr (Tokens::kReside) {
        static_assert(kTilesN == 1, "first_chunk is of eight rows");
        tokens.arrive();
        resident = tokens.first_chunk();
    }
    uint32_t stage = queue;
    // NOTE: there are no registers for a step's sums beside the others, so these are brought to the scale of a step
    // before it is added.
    constexpr int kVectorsPerBlock = TWELL_SCALE_BLOCK_SIZE / kVector;
    static_assert(kVectorsPerBlock % kVectorsPerStep == 0, "a step of a warp lies in one block");
    bool const has_block_scales = sizeof(Stored) == 1 && neurons.block_scales != nullptr;
    auto const block_scale = [&](int step) {  // behind the last vector, where all is zero, that of the last one
        int const vector = min((step * kWarps + warp) * kVectorsPerStep, num_vectors - 1);
        return nonzero_scale(neurons.block_scales[vector / kVectorsPerBlock]);
    };
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        if (has_block_scales && step != 0) {
            multiply_by(block_scale(step - 1) / block_scale(step), accumulators);
        }
        wait_async<kNumStages - 1>();
        __syncwarp();
#pragma unroll
        for (int quad = 0; quad < kVectorsPerStep / 4; ++quad) {
            uint32_t const fragments = stage + read_offset + ((quad * 64) ^ read_swap);
            uint32_t const weights =
                stage + PlacesW::read_offset(lane) + ((quad * PlacesW::kQuad) ^ PlacesW::read_swap(lane));
            uint32_t a[2][kTilesM][4];
#pragma unroll
            for (int i = 0; i < kTilesM; ++i) {
                uint4 const low =
                    as_elements<Element>(load_shared_vector<Stored>(weights + i * 2 * PlacesW::kBytesRows));
                uint4 const high =
                    as_elements<Element>(load_shared_vector<Stored>(weights + (i * 2 + 1) * PlacesW::kBytesRows));
                a[0][i][0] = low.x, a[0][i][1] = high.x, a[0][i][2] = low.y, a[0][i][3] = high.y;
                a[1][i][0] = low.z, a[1][i][1] = high.z, a[1][i][2] = low.w, a[1][i][3] = high.w;
            }
#pragma unroll
            for (int j = 0; j < kTilesN; ++j) {
                uint4 const b =
                    load_chunk(Tokens::kReside ? resident + quad * 64 : fragments + (kTilesM * 2 + j) * kBytesRows);
#pragma unroll
                for (int i = 0; i < kTilesM; ++i) {
                    Element::mma(accumulators[i][j], a[0][i], b.x, b.y);
                }
#pragma unroll
                for (int i = 0; i < kTilesM; ++i) {
                    Element::mma(accumulators[i][j], a[1][i], b.z, b.w);
                }
            }
        }
        __syncwarp();  // all lanes have taken their fragments
        load_stage(step + kNumStages, stage);
        resident += kVectorsPerStep * kWarps * 16;
        stage = stage == queue + (kNumStages - 1) * kBytesStage ? queue : stage + kBytesStage;
    }
    wait_async<0>();
    if (has_block_scales) {
        multiply_by(block_scale(num_steps - 1), accumulators);
    }
}

// Adds up the warps' shares and calls emit(m, n, sum) once for each of the 16 kTilesM x 8 kTilesN sums.
template <int kTilesM, int kTilesN, int kTilesExchanged, class Emit>
__device__ __forceinline__ void exchange(float const (&accumulators)[kTilesM][kTilesN][4], float* buffer, Emit emit) {
    constexpr int kSums = kTilesM * kTilesExchanged * 4 * kWarpSize;  // in fragment order, so lanes are neighbours
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
#pragma unroll
    for (int begin = 0; begin < kTilesN; begin += kTilesExchanged) {
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
            for (int j = 0; j < kTilesExchanged; ++j) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    buffer[warp * kSums + ((i * kTilesExchanged + j) * 4 + k) * kWarpSize + lane] =
                        accumulators[i][begin + j][k];
                }
            }
        }
        __syncthreads();
        for (int e = threadIdx.x; e < kSums; e += kThreads) {
            float sum = buffer[e];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) {
                sum += buffer[w * kSums + e];
            }
            int const k = e / kWarpSize % 4;
            int const tile = e / (4 * kWarpSize);
            int const m = tile / kTilesExchanged * MMA_M + (k / 2) * 8 + lane / 4;
            int const n = (begin + tile % kTilesExchanged) * MMA_N + lane % 4 * 2 + k % 2;
            emit(m, n, sum);
        }
    }
    __syncthreads();
}

}  // namespace twell::matmul_few

// A linear layer for up to 16 tokens, where the time is that of reading the weights once.
//
// A CTA has blocks of 16 outputs, and brings the norm of all tokens' rows into shared memory once. As in
// matmul_few.cuh, weights are the A operand of the tensor cores and tokens the B operand, each warp has a share of the
// inputs and a queue of weights in shared memory, and a lane takes 16 neighbouring bytes as its share of several steps.
// Queues go on from one block to the next. The first weights, and those of the norm, are under way before this launch
// waits for the one before.
#pragma once

#include "device/cp_async.cuh"
#include "device/dependent_launch.cuh"
#include "linear/choose.cuh"
#include "linear/layer.cuh"
#include "matmul/matmul_few.cuh"

namespace twell::linear_few {

using linear::Norm;
using linear::Outputs;
using matmul_few::kVectorsPerStep;

constexpr int kRowsAtOnce = matmul_few::kRowsAtOnce;  // of weights, that a warp copies at once
constexpr int kChunk = 16;                            // bytes that a lane copies
constexpr int kBytesLine = kVectorsPerStep * kChunk;  // of a row of weights, in one step of a warp
constexpr int kBytesStage = MMA_M * kBytesLine;
constexpr int kTokenStride = MMA_M + 4;  // floats: the lanes' sums, of 8 outputs x 4 pairs of tokens, hit 32 banks

template <int kWarpsOfCta, int kTokenTiles, int kStages>
struct Config {
    static constexpr int kWarps = kWarpsOfCta;
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kTilesN = kTokenTiles;
    static constexpr int kTokens = kTilesN * MMA_N;
    static constexpr int kNumStages = kStages;
    static constexpr int kOutputs = MMA_M * kTokens;  // of a block
    static_assert(kOutputs <= kThreads, "each has a thread");
    // The next launch finds a place beside this one, but for the rows of more than 8 tokens.
    static constexpr int kMinBlocks = kTilesN == 1 ? 2 : 1;

    // Shared memory: the queues; the warps' sums [kWarps, kTokens, kTokenStride]; twice [kWarps] sums of rows; moments
    // [kTokens]; the rows [tokens, row_bytes].
    static constexpr int kBytesQueues = kWarps * kNumStages * kBytesStage;
    static constexpr int kBytesSums = kWarps * kTokens * kTokenStride * static_cast<int>(sizeof(float));
    static constexpr int kBytesRowSums = 2 * kWarps * static_cast<int>(sizeof(float));
    static constexpr int kBytesMoments = kTokens * static_cast<int>(sizeof(linear::Moments));
    static constexpr int kBytesBesideRows = kBytesQueues + kBytesSums + kBytesRowSums + kBytesMoments;
    static_assert(kBytesBesideRows % kChunk == 0, "rows begin on 16 bytes");
};

// Bytes from a row to the next: so many that the 16-byte reads of two tokens' rows by eight lanes, four each, lie in
// different banks.
template <class Stored>
__host__ __device__ constexpr int64_t row_bytes(int in) {
    return (int64_t{in} * 2 + 127) / 128 * 128 + (sizeof(Stored) == 1 ? 16 : 64);
}

template <class Stored>
struct Params {
    uint16_t const* x;         // [tokens, in]
    Stored const* weight;      // [out, in], rows of a multiple of 16 bytes
    uint16_t const* bias;      // [out] or null
    uint16_t const* residual;  // [tokens, out] or null
    float const* scale;        // of output n at n * scale_step, but see scale_columns; null of 16-bit weights
    Norm norm;
    Outputs outputs;
    uint64_t* keys;  // [tokens, kMostKeys], a CTA's at its number: see choose.cuh; null: `outputs` are stored
    int scale_step;
    int tokens;  // up to Config::kTokens
    int in;
    int out;
    int scale_columns;  // not 0: blocks of outputs and inputs have a scale each, [.., scale_columns]
};

// Copies a warp's lines of weights, block after block: in each the steps of the warp's share of the inputs.
template <class Stored, class Cfg>
class WeightLoader {
  public:
    __device__ __forceinline__ WeightLoader(Params<Stored> const& params, int steps)
        : params_(params), steps_(steps), chunks_(chunks_of(params)), block_(static_cast<int>(blockIdx.x)) {
        enter_block();
    }

    static __device__ __forceinline__ int chunks_of(Params<Stored> const& params) {
        return params.in / (kChunk / static_cast<int>(sizeof(Stored)));
    }

    // The next step's lines; behind the last block an empty group.
    __device__ __forceinline__ void load(uint32_t stage) {
        if (rows_left_ > -first_row()) {
            int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
            uint32_t const destination = stage + matmul_few::Places<uint16_t>::write_offset(lane);
            bool const valid = first_chunk() + step_ * kVectorsPerStep * Cfg::kWarps < chunks_;
#pragma unroll
            for (int i = 0; i < MMA_M / kRowsAtOnce; ++i) {
                copy_async(destination + i * kRowsAtOnce * kBytesLine, pointer_ + i * kRowsAtOnce * row_bytes_of(),
                           valid && i * kRowsAtOnce < rows_left_);
            }
            pointer_ += Cfg::kWarps * kBytesLine;
            if (++step_ == steps_) {
                block_ += static_cast<int>(gridDim.x);
                enter_block();
            }
        }
        commit_async();
    }

  private:
    static __device__ __forceinline__ int first_row() { return matmul_few::first_row(); }
    static __device__ __forceinline__ int first_chunk() {
        return static_cast<int>(threadIdx.x) / kWarpSize * kVectorsPerStep +
               static_cast<int>(threadIdx.x) % kVectorsPerStep;
    }
    __device__ __forceinline__ int64_t row_bytes_of() const {
        return int64_t{params_.in} * static_cast<int>(sizeof(Stored));
    }
    __device__ __forceinline__ void enter_block() {
        step_ = 0;
        int64_t const row = int64_t{block_} * MMA_M + first_row();
        pointer_ =
            reinterpret_cast<unsigned char const*>(params_.weight) + row * row_bytes_of() + first_chunk() * kChunk;
        int64_t const left = params_.out - row;
        rows_left_ = static_cast<int>(left < -MMA_M ? -MMA_M : left);
    }

    Params<Stored> const& params_;
    unsigned char const* pointer_;
    int steps_;
    int chunks_;
    int block_;
    int step_;
    int rows_left_;  // of the matrix, from this lane's first one on
};

// sums += weights of a stage * rows of x, over the inputs of this warp's step: chunks from first_chunk + lane % 4 on.
template <class Element, class Stored, class Cfg>
__device__ __forceinline__ void multiply(float (&sums)[Cfg::kTilesN][4], uint32_t stage,
                                         uint32_t const (&rows)[Cfg::kTilesN], int first_chunk, int chunks) {
    using Places = matmul_few::Places<uint16_t>;
    constexpr int kVectors = 2 / static_cast<int>(sizeof(Stored));  // of x, that belong to a chunk of weights
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int quad = 0; quad < kVectorsPerStep / 4; ++quad) {
        uint32_t const weights = stage + Places::read_offset(lane) + ((quad * Places::kQuad) ^ Places::read_swap(lane));
        uint4 const low = load_chunk(weights);
        uint4 const high = load_chunk(weights + Places::kBytesRows);
        int const chunk = first_chunk + quad * 4 + lane % 4;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            uint4 a[2];
            if constexpr (sizeof(Stored) == 1) {
                a[0] = as_elements<Element>(v == 0 ? make_uint2(low.x, low.y) : make_uint2(low.z, low.w));
                a[1] = as_elements<Element>(v == 0 ? make_uint2(high.x, high.y) : make_uint2(high.z, high.w));
            } else {
                a[0] = low, a[1] = high;
            }
            uint32_t const first[4] = {a[0].x, a[1].x, a[0].y, a[1].y};
            uint32_t const second[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
#pragma unroll
            for (int j = 0; j < Cfg::kTilesN; ++j) {
                // Behind the last chunk weights are zeros; values behind a row may be no numbers.
                uint4 b = make_uint4(0, 0, 0, 0);
                if (chunk < chunks) {
                    b = load_chunk(rows[j] + (chunk * kVectors + v) * kChunk);
                }
                Element::mma(sums[j], first, b.x, b.y);
                Element::mma(sums[j], second, b.z, b.w);
            }
        }
    }
}

// Brings the norm of all rows into shared memory. Teams of warps copy a row each; where there are more rows than warps,
// one after the other. Then each thread normalises the same columns of all rows, `held` of the first ones.
template <class Element, class Stored, class Cfg>
__device__ __forceinline__ void load_rows(Params<Stored> const& params, linear::NormVector held, unsigned char* rows,
                                          float* row_sums, linear::Moments* moments) {
    int const thread = static_cast<int>(threadIdx.x);
    int const warp = thread / kWarpSize;
    int const vectors = params.in / kVector;
    int teams = 1;
    while (teams < params.tokens && teams < Cfg::kWarps) {
        teams *= 2;
    }
    int const warps = Cfg::kWarps / teams;
    int const team = warp / warps;
    int const first = thread - team * warps * kWarpSize;
    int buffer = 0;
    auto const sum_of_row = [&](float value) {
        float* const sums = row_sums + buffer * Cfg::kWarps;  // a barrier lies between two uses of a buffer
        buffer ^= 1;
        float const sum = sum_of_warp(value);
        if (thread % kWarpSize == 0) {
            sums[warp] = sum;
        }
        __syncthreads();
        float total = 0.0f;
        for (int i = 0; i < warps; ++i) {
            total += sums[team * warps + i];
        }
        return total;
    };
    auto const row = [&](int token) {
        return reinterpret_cast<uint16_t*>(rows + token * row_bytes<Stored>(params.in));
    };
    for (int begin = 0; begin < params.tokens; begin += teams) {
        int const token = begin + team;
        bool const exists = token < params.tokens;
        linear::Moments const found =
            linear::copy_row<Element>(row(token), params.x + int64_t{token} * params.in, params.norm,
                                      exists ? vectors : 0, first, warps * kWarpSize, sum_of_row);
        if (exists && first == 0) {
            moments[token] = found;
        }
    }
    __syncthreads();
    if (params.norm.kind == TWELL_NORM_NONE) {
        return;
    }
    for (int v = thread; v < vectors; v += Cfg::kThreads) {
        held = v == thread ? held : linear::load_norm(params.norm, v, vectors);
#pragma unroll 1
        for (int token = 0; token < params.tokens; ++token) {
            auto* const place = reinterpret_cast<uint4*>(row(token)) + v;
            *place = linear::normalise<Element>(*place, params.norm, held, moments[token]);
        }
    }
    __syncthreads();
}

// The scale that a block of outputs and a warp's step of inputs share.
template <class Stored, class Cfg>
__device__ __forceinline__ float block_scale_of(Params<Stored> const& params, int block, int step) {
    static_assert(TWELL_SCALE_BLOCK_SIZE % MMA_M == 0 && kBytesLine == TWELL_SCALE_BLOCK_SIZE,
                  "outputs lie in one block, and a step of bytes is one");
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int const column = min(step * Cfg::kWarps + warp, params.scale_columns - 1);  // behind the last one: of zeros
    return params.scale[int64_t{block / (TWELL_SCALE_BLOCK_SIZE / MMA_M)} * params.scale_columns + column];
}

template <class Element, class Stored, class Cfg>
__global__ void __launch_bounds__(Cfg::kThreads, Cfg::kMinBlocks) linear_kernel(Params<Stored> const params) {
    extern __shared__ __align__(128) unsigned char shared[];
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    float* const warp_sums = reinterpret_cast<float*>(shared + Cfg::kBytesQueues);
    float* const row_sums = reinterpret_cast<float*>(shared + Cfg::kBytesQueues + Cfg::kBytesSums);
    auto* const moments =
        reinterpret_cast<linear::Moments*>(shared + Cfg::kBytesQueues + Cfg::kBytesSums + Cfg::kBytesRowSums);
    unsigned char* const rows = shared + Cfg::kBytesBesideRows;
    uint32_t const queue = shared_address(shared) + warp * (Cfg::kNumStages * kBytesStage);

    constexpr int kChunksOfStep = kVectorsPerStep * Cfg::kWarps;
    int const chunks = WeightLoader<Stored, Cfg>::chunks_of(params);
    int const steps = (chunks + kChunksOfStep - 1) / kChunksOfStep;
    int const blocks = (params.out + MMA_M - 1) / MMA_M;
    bool const has_block_scales = sizeof(Stored) == 1 && params.scale_columns != 0;

    WeightLoader<Stored, Cfg> loader(params, steps);
#pragma unroll
    for (int i = 0; i < Cfg::kNumStages; ++i) {
        loader.load(queue + i * kBytesStage);
    }
    linear::NormVector const held = linear::load_norm(params.norm, static_cast<int>(threadIdx.x), params.in / kVector);
    wait_for_previous_launch();
    allow_dependent_launch();
    load_rows<Element, Stored, Cfg>(params, held, rows, row_sums, moments);

    // Tokens that are not there are another one: nobody reads their sums.
    uint32_t row_addresses[Cfg::kTilesN];
#pragma unroll
    for (int j = 0; j < Cfg::kTilesN; ++j) {
        row_addresses[j] = shared_address(rows) + static_cast<uint32_t>(min(j * MMA_N + lane / 4, params.tokens - 1) *
                                                                        row_bytes<Stored>(params.in));
    }
    // The element of each block that this thread adds up and stores.
    int const token = static_cast<int>(threadIdx.x) / MMA_M;
    int const output = static_cast<int>(threadIdx.x) % MMA_M;
    bool const chooses = params.keys != nullptr;
    uint64_t best = 0;
    uint32_t stage = queue;
#pragma unroll 1
    for (int block = static_cast<int>(blockIdx.x); block < blocks; block += static_cast<int>(gridDim.x)) {
        int const column = block * MMA_M + output;
        bool const stores = threadIdx.x < Cfg::kOutputs && token < params.tokens && column < params.out;
        uint16_t bias = 0;
        uint16_t residual = 0;
        float scale = 1.0f;
        if (stores) {
            bias = params.bias == nullptr ? bias : params.bias[column];
            residual = params.residual == nullptr ? residual : params.residual[int64_t{token} * params.out + column];
            if constexpr (sizeof(Stored) == 1) {
                scale = has_block_scales ? 1.0f : params.scale[int64_t{column} * params.scale_step];
            }
        }
        float sums[Cfg::kTilesN][4] = {};
        float scaled_sums[Cfg::kTilesN][4] = {};  // of steps, times the scales of blocks
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
            float const block_scale = has_block_scales ? block_scale_of<Stored, Cfg>(params, block, step) : 1.0f;
            wait_async<Cfg::kNumStages - 1>();
            __syncwarp();
            multiply<Element, Stored, Cfg>(sums, stage, row_addresses, step * kChunksOfStep + warp * kVectorsPerStep,
                                           chunks);
            __syncwarp();  // all lanes have taken their weights
            loader.load(stage);
            if (has_block_scales) {
#pragma unroll
                for (int j = 0; j < Cfg::kTilesN; ++j) {
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        scaled_sums[j][k] = fmaf(sums[j][k], block_scale, scaled_sums[j][k]);
                        sums[j][k] = 0.0f;
                    }
                }
            }
            stage = stage == queue + (Cfg::kNumStages - 1) * kBytesStage ? queue : stage + kBytesStage;
        }
        // NOTE: else they were converted, and so waited for, before the products.
        asm volatile("" : "+h"(bias), "+h"(residual), "+f"(scale));
        __syncthreads();  // the block before has been added up
#pragma unroll
        for (int j = 0; j < Cfg::kTilesN; ++j) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int const row = warp * Cfg::kTokens + j * MMA_N + lane % 4 * 2 + k % 2;
                warp_sums[row * kTokenStride + k / 2 * 8 + lane / 4] =
                    has_block_scales ? scaled_sums[j][k] : sums[j][k];
            }
        }
        __syncthreads();
        if (stores) {
            float const* const mine = warp_sums + token * kTokenStride + output;
            float sum = mine[0];
#pragma unroll
            for (int w = 1; w < Cfg::kWarps; ++w) {
                sum += mine[w * Cfg::kTokens * kTokenStride];
            }
            uint16_t const y =
                Element::from_float(fmaf(sum, scale, Element::to_float(bias) + Element::to_float(residual)));
            if (chooses) {
                best = max(best, linear_choose::key_of(Element::to_float(y), column));
            } else {
                *params.outputs.place(token, column) = y;
            }
        }
    }
    wait_async<0>();
    if (chooses) {
        best = linear_choose::largest_of_lanes<MMA_M>(best);
        if (threadIdx.x < Cfg::kOutputs && token < params.tokens && output == 0) {
            params.keys[token * linear_choose::kMostKeys + static_cast<int>(blockIdx.x)] = best;
        }
    }
}

}  // namespace twell::linear_few

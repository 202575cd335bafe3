// Gate and up projections for few tokens, for every GPU from sm_80 on: h[t, n] of the active neurons n of each token t.
//
// With few tokens the time is that of reading w_gate, so a CTA owns few neurons and all of d_model, and every
// multiprocessor streams. The CTA that finds a neuron active computes its up projection at once: no other CTA has to
// know, so nothing is packed, no tile can overflow, and the up projection is spread over the device however unequal the
// tokens are.
//
// The weights are the A operand of the tensor cores (16 neurons) and the tokens the B operand (8 tokens). The sum over
// d_model may visit its terms in any order, as long as both operands do: a lane takes the 8 neighbouring elements of
// one 16-byte vector as its share of two 16-wide steps, so fragments need no rearranging. Each warp has its own share
// of d_model and its own queue in shared memory: the CTA meets only once, to add up.
#pragma once

#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/vector.cuh"
#include "matmul/matmul_generic.cuh"
#include "twell/twell.h"

namespace twell::gate_up_few {

using matmul_generic::commit_async;
using matmul_generic::copy_async;
using matmul_generic::shared_address;
using matmul_generic::wait_async;

constexpr int kWarps = 8;  // they share out d_model, so results depend on their number
constexpr int kThreads = kWarps * kWarpSize;
// Neurons lie along MMA_M, tokens along MMA_N.
// Elements of d_model in one step of a warp, in 16-byte vectors: a cache line of each row.
constexpr int kVectorsPerStep = 8;
constexpr int kBytesPiece = kWarpSize * 16;
constexpr int kRowsAtOnce = kWarpSize / kVectorsPerStep;

__device__ __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) % kWarpSize / kVectorsPerStep; }

// What one warp keeps of one step: the lines of the neurons' weights, then of the tokens.
template <int kTilesM, int kTilesN>
constexpr int kBytesWarpStage = (kTilesM * MMA_M + kTilesN * MMA_N) * kVectorsPerStep * 16;

// Tokens' mask words: bit n % 32 of word n / 32 tells whether neuron n is active.
constexpr int kMaskBits = 32;
static_assert(kMaskBits % MMA_M == 0, "a CTA stores halves of a mask word");

// NOTE: not BlockTensors, with which fewer loops are unrolled.
struct Params {
    uint16_t const* x;       // [tokens, d_model]
    uint16_t const* w_gate;  // [d_ff, d_model]
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* w_up;    // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;    // [d_ff] or null
    uint16_t const* w_down;  // [d_ff, d_out]; only brought closer
    uint32_t* masks;         // [tokens, num_mask_words]
    float* h;                // [tokens, d_ff], written where a neuron is active
    int* counters;           // [num_counters], which become 0: see down_few.cuh and down_sm90.cuh
    int num_counters;
    // For a down projection that may be dense, or null:
    uint16_t* h_rounded;  // [tokens, num_mask_words * kMaskBits], of the element type, 0 where no neuron is active
    int2* counted;        // [CTAs]: see few.h
    int tokens;
    int d_model;
    int d_ff;
    int d_out;
    int num_mask_words;
    bool relu_on_up;  // dReLU
    Activation act;
};

// A warp's dot products fetch so many 16-byte vectors a lane of both rows at once.
constexpr int kDotSteps = 8;
constexpr int kBytesDot = kDotSteps * 2 * kBytesPiece;

constexpr int kMaxTokens = 64;

// A CTA computes 16 kTilesM neurons for 8 kTilesN tokens; kNumStages steps of weights are in flight. Registers are kept
// free for kMinBlocks CTAs a multiprocessor.
template <int kNeuronTiles, int kTokenTiles, int kStages, int kBlocks>
struct Config {
    static constexpr int kTilesM = kNeuronTiles;
    static constexpr int kTilesN = kTokenTiles;
    static constexpr int kNumStages = kStages;
    static constexpr int kMinBlocks = kBlocks;
    static constexpr int kNeurons = kTilesM * MMA_M;
    static constexpr int kTokens = kTilesN * MMA_N;
    static_assert(kTilesM * kTokens <= kThreads, "one thread for each mask");
    static_assert(kTokens <= kMaxTokens, "");

    // Token tiles whose sums the warps exchange at once.
    static constexpr int kTilesExchanged = kTilesN < 4 ? kTilesN : 4;

    // Shared memory: the warps' queues; then the sums that they exchange, in the same place.
    static constexpr int kBytesStage = kWarps * kBytesWarpStage<kTilesM, kTilesN>;
    static constexpr int kBytesExchange = kWarps * kTilesM * kTilesExchanged * 4 * kWarpSize * 4;
    static_assert(kBytesExchange <= kBytesStage, "");
    static constexpr int kBytesStages = kBytesStage * kNumStages;
    // Then dot products, as many at once as there is place for.
    static constexpr int kDotSlots = kBytesStages >= 3 * kWarps * kBytesDot   ? 3
                                     : kBytesStages >= 2 * kWarps * kBytesDot ? 2
                                                                              : 1;
    static constexpr int kBytesDots = kWarps * kDotSlots * kBytesDot;
    static constexpr int kBytesQueue = kBytesStages > kBytesDots ? kBytesStages : kBytesDots;
    // The activated gate values, behind the queues.
    static constexpr int kStrideG = kTokens + 2;  // padded: neighbouring lanes read a column
    static constexpr int kSharedBytes = kBytesQueue + kNeurons * kStrideG * 2;
};

// Active pairs of a neuron and a token, up to which a warp computes u for each.
constexpr int kMaxPairs = 2 * kWarps;
// Active neurons of one token, up to which their rows of w_down are brought closer.
constexpr int kMostPrefetched = 8;

template <class Cfg>
struct Shared {
    uint16_t b_gate[Cfg::kNeurons];
    uint16_t b_up[Cfg::kNeurons];
    uint32_t neuron_any[Cfg::kTilesM];    // which of a tile's 16 neurons are active for any token
    uint32_t token_any[kMaxTokens / 32];  // which tokens have any active neuron here
    int num_pairs;
    int most_of_token[Cfg::kTilesM];  // of each 16 neurons
    uint16_t pairs[kMaxPairs];        // neuron * kMaxTokens + token of active pairs
    int neurons[Cfg::kNeurons];       // the active ones
    int tokens[Cfg::kTokens];
};

// Like copy_async, but through the L1 cache: for what other warps read, too.
__device__ __forceinline__ void copy_async_cached(uint32_t destination, void const* source, bool valid) {
    int const bytes = valid ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "r"(address)
                 : "memory");
    return vector;
}

// Rows `first` + i of a matrix, i < count. The rows from there on are zeros and are not read.
struct Consecutive {
    uint16_t const* matrix;
    int64_t first;
    int count;
};

// Rows `first` + list[i] of a matrix, i < count; likewise.
struct Listed {
    uint16_t const* matrix;
    int64_t first;
    int count;
    int const* list;
};

// What a lane copies of kRows rows: the 16 bytes at `lane % 8` of each line of rows `lane / 8`, `lane / 8` + 4, ...
template <int kRows, class Source>
class LineLoader;

template <int kRows>
class LineLoader<kRows, Consecutive> {
  public:
    __device__ __forceinline__ LineLoader(Consecutive const& source, int d_model, int first_vector)
        : pointer_(source.matrix + (source.first + first_row()) * d_model + first_vector * kVector),
          row_stride_(static_cast<uint32_t>(kRowsAtOnce * d_model)),
          rows_left_(source.count - first_row()) {}

    __device__ __forceinline__ void load(uint32_t destination, int vector, bool valid) const {
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
            copy_async(destination + i * kBytesPiece,
                       pointer_ + vector * kVector + i * static_cast<uint64_t>(row_stride_),
                       valid && i * kRowsAtOnce < rows_left_);
        }
    }

  private:
    uint16_t const* pointer_;
    uint32_t row_stride_;
    int rows_left_;
};

template <int kRows>
class LineLoader<kRows, Listed> {
  public:
    __device__ __forceinline__ LineLoader(Listed const& source, int d_model, int first_vector)
        : source_(source), d_model_(d_model), first_vector_(first_vector) {}

    __device__ __forceinline__ void load(uint32_t destination, int vector, bool valid) const {
#pragma unroll
        for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
            int const p = i * kRowsAtOnce + first_row();
            int64_t const row = source_.first + (p < source_.count ? source_.list[p] : 0);
            copy_async(destination + i * kBytesPiece,
                       source_.matrix + row * d_model_ + (first_vector_ + vector) * kVector,
                       valid && p < source_.count);
        }
    }

  private:
    Listed source_;
    int d_model_;
    int first_vector_;
};

// accumulators += matrix[rows, k] x[tokens, k] over this warp's share of k. The order of each sum does not depend on
// the number of tiles. begin() is called before anything is read.
template <class Element, int kTilesM, int kTilesN, int kNumStages, class Source, class Begin>
__device__ __forceinline__ void multiply(float (&accumulators)[kTilesM][kTilesN][4], Source const& neurons,
                                         Source const& tokens, int d_model, uint32_t queue, Begin begin) {
    constexpr int kBytesStage = kBytesWarpStage<kTilesM, kTilesN>;
    constexpr int kBytesRows = 8 * kVectorsPerStep * 16;  // of eight rows
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const num_vectors = d_model / kVector;
    int const num_steps = (num_vectors + kVectorsPerStep * kWarps - 1) / (kVectorsPerStep * kWarps);
    int const first_vector = warp * kVectorsPerStep + lane % kVectorsPerStep;
    queue += warp * (kNumStages * kBytesStage);

    // The vectors of odd rows swap their halves, so that the two rows x four vectors that a quarter of a warp reads at
    // once lie in different banks.
    uint32_t const write_offset = lane / 8 * 128 + ((lane % 8) ^ ((lane / 8 & 1) << 2)) * 16;
    uint32_t const read_offset = lane / 4 * 128 + (lane % 4) * 16;
    uint32_t const read_swap = (lane / 4 & 1) * 64;

    LineLoader<kTilesM * MMA_M, Source> const weight_loader(neurons, d_model, first_vector);
    LineLoader<kTilesN * MMA_N, Source> const x_loader(tokens, d_model, first_vector);
    // A vector past the end is zero in both operands. Past the last step an empty group is committed, so that the
    // number of groups to wait for stays constant.
    auto const load_stage = [&](int step, uint32_t stage) {
        if (step < num_steps) {
            int const vector = step * (kVectorsPerStep * kWarps);
            bool const valid = first_vector + vector < num_vectors;
            x_loader.load(stage + kTilesM * 2 * kBytesRows + write_offset, vector, valid);
            weight_loader.load(stage + write_offset, vector, valid);
        }
        commit_async();
    };
    begin();
#pragma unroll
    for (int stage = 0; stage < kNumStages; ++stage) {
        load_stage(stage, queue + stage * kBytesStage);
    }
    uint32_t stage = queue;
#pragma unroll 1
    for (int step = 0; step < num_steps; ++step) {
        wait_async<kNumStages - 1>();
        __syncwarp();
#pragma unroll
        for (int quad = 0; quad < kVectorsPerStep / 4; ++quad) {
            uint32_t const fragments = stage + read_offset + ((quad * 64) ^ read_swap);
            uint32_t a[2][kTilesM][4];
#pragma unroll
            for (int i = 0; i < kTilesM; ++i) {
                uint4 const low = load_shared(fragments + i * 2 * kBytesRows);
                uint4 const high = load_shared(fragments + (i * 2 + 1) * kBytesRows);
                a[0][i][0] = low.x, a[0][i][1] = high.x, a[0][i][2] = low.y, a[0][i][3] = high.y;
                a[1][i][0] = low.z, a[1][i][1] = high.z, a[1][i][2] = low.w, a[1][i][3] = high.w;
            }
#pragma unroll
            for (int j = 0; j < kTilesN; ++j) {
                uint4 const b = load_shared(fragments + (kTilesM * 2 + j) * kBytesRows);
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
        stage = stage == queue + (kNumStages - 1) * kBytesStage ? queue : stage + kBytesStage;
    }
    wait_async<0>();
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

template <class Element, class Cfg, class Source, class Begin, class End, class Emit>
__device__ __forceinline__ void project(Source const& neurons, Source const& tokens, int d_model,
                                        unsigned char* dynamic, Begin begin, End end, Emit emit) {
    float accumulators[Cfg::kTilesM][Cfg::kTilesN][4] = {};
    multiply<Element, Cfg::kTilesM, Cfg::kTilesN, Cfg::kNumStages>(accumulators, neurons, tokens, d_model,
                                                                   shared_address(dynamic), begin);
    end();
    exchange<Cfg::kTilesM, Cfg::kTilesN, Cfg::kTilesExchanged>(accumulators, reinterpret_cast<float*>(dynamic), emit);
}

// Calls emit(i, x_of(i) . w_of(i)) in one lane for i = 0 ... count - 1, by one warp. `queue` is kSlots x kBytesDot
// bytes of shared memory of this warp's own: there the rows of kSlots products are under way at once, and no compiler
// can delay a load to its use. The order of a sum depends on d_model only.
template <class Element, int kSlots, class XOf, class WOf, class Emit>
__device__ __forceinline__ void dot_products(int count, int d_model, uint32_t queue, XOf x_of, WOf w_of, Emit emit) {
    int const lane = threadIdx.x % kWarpSize;
    int const num_vectors = d_model / kVector;
    int const num_chunks = (num_vectors + kDotSteps * kWarpSize - 1) / (kDotSteps * kWarpSize);
    int const num_items = count * num_chunks;
    queue += lane * 16;

    auto const fetch = [&](int item, uint32_t slot) {
        if (item < num_items) {
            int const i = item / num_chunks;
            int const first = (item - i * num_chunks) * (kDotSteps * kWarpSize) + lane;
            uint16_t const* const w = w_of(i) + first * kVector;
            uint16_t const* const x = x_of(i) + first * kVector;
            // A vector past the end is zero in both rows.
#pragma unroll
            for (int k = 0; k < kDotSteps; ++k) {
                copy_async(slot + k * kBytesPiece, w + k * kWarpSize * kVector, first + k * kWarpSize < num_vectors);
            }
#pragma unroll
            for (int k = 0; k < kDotSteps; ++k) {
                copy_async_cached(slot + (kDotSteps + k) * kBytesPiece, x + k * kWarpSize * kVector,
                                  first + k * kWarpSize < num_vectors);
            }
        }
        commit_async();
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
        fetch(slot, queue + slot * kBytesDot);
    }
    uint32_t slot = queue;
    for (int i = 0, item = 0; i < count; ++i) {
        float parts[4] = {};  // shorter chains of dependent additions
        for (int chunk = 0; chunk < num_chunks; ++chunk, ++item) {
            wait_async<kSlots - 1>();
#pragma unroll
            for (int k = 0; k < kDotSteps; ++k) {
                accumulate<Element>(parts[k % 4], load_shared(slot + (kDotSteps + k) * kBytesPiece),
                                    load_shared(slot + k * kBytesPiece));
            }
            fetch(item + kSlots, slot);
            slot = slot == queue + (kSlots - 1) * kBytesDot ? queue : slot + kBytesDot;
        }
        float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (lane == 0) {
            emit(i, sum);
        }
    }
    wait_async<0>();
}

// Brings a row into L2, by one warp.
__device__ __forceinline__ void prefetch_row(uint16_t const* row, int length) {
    constexpr int kLine = 64;  // elements
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % kWarpSize * kLine; i < length; i += kWarpSize * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
    }
}

template <class Element, class Cfg>
__global__ void __launch_bounds__(kThreads, Cfg::kMinBlocks) gate_up_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ Shared<Cfg> shared;
    uint16_t* const g = reinterpret_cast<uint16_t*>(dynamic + Cfg::kBytesQueue);  // [kNeurons, kStrideG]

    int const thread = threadIdx.x;
    int const neuron_begin = blockIdx.x * Cfg::kNeurons;
    if (thread < Cfg::kTilesM) {
        shared.neuron_any[thread] = 0;
        shared.most_of_token[thread] = 0;
    }
    if (thread < kMaxTokens / 32) {
        shared.token_any[thread] = 0;
    }
    if (thread == 0) {
        shared.num_pairs = 0;
    }
    int64_t const stride_rounded = static_cast<int64_t>(params.num_mask_words) * kMaskBits;
    // Biases are fetched first and put down last, so that nothing waits for them.
    bool const has_bias = thread < Cfg::kNeurons && neuron_begin + thread < params.d_ff;
    uint16_t b_gate = 0;
    uint16_t b_up = 0;
    auto const begin = [&] {
        wait_for_previous_launch();
        allow_dependent_launch();
        if (has_bias && params.b_gate != nullptr) {
            b_gate = params.b_gate[neuron_begin + thread];
        }
        if (has_bias && params.b_up != nullptr) {
            b_up = params.b_up[neuron_begin + thread];
        }
        if (params.h_rounded != nullptr) {
            constexpr int kVectors = Cfg::kNeurons / kVector;
            for (int i = thread; i < params.tokens * kVectors; i += kThreads) {
                int const n = neuron_begin + i % kVectors * kVector;
                if (n < stride_rounded) {
                    *reinterpret_cast<uint4*>(params.h_rounded + i / kVectors * stride_rounded + n) = {};
                }
            }
        }
        for (int i = blockIdx.x * kThreads + thread; i < params.num_counters; i += gridDim.x * kThreads) {
            params.counters[i] = 0;
        }
    };
    auto const end = [&] {
        if (has_bias) {
            shared.b_gate[thread] = b_gate;
            shared.b_up[thread] = b_up;
        }
    };

    // Gate projection
    project<Element, Cfg>(
        Consecutive{params.w_gate, neuron_begin, params.d_ff - neuron_begin}, Consecutive{params.x, 0, params.tokens},
        params.d_model, dynamic, begin, end, [&](int m, int n, float sum) {
            bool const valid = neuron_begin + m < params.d_ff && n < params.tokens;
            float const z = params.b_gate == nullptr ? sum : sum + Element::to_float(shared.b_gate[m]);
            g[m * Cfg::kStrideG + n] = valid ? activate<Element>(z, params.act) : static_cast<uint16_t>(0);
        });

    // Which neurons are active: one thread for 16 neurons of a token.
    if (thread < Cfg::kTilesM * Cfg::kTokens) {
        int const tile = thread / Cfg::kTokens;
        int const token = thread % Cfg::kTokens;
        uint32_t mask = 0;
#pragma unroll
        for (int m = 0; m < MMA_M; ++m) {
            mask |= (is_nonzero(g[(tile * MMA_M + m) * Cfg::kStrideG + token]) ? 1u : 0u) << m;
        }
        int const half = neuron_begin / MMA_M + tile;
        constexpr int kHalves = kMaskBits / MMA_M;
        if (token < params.tokens && half < params.num_mask_words * kHalves) {
            reinterpret_cast<uint16_t*>(params.masks)[token * params.num_mask_words * kHalves + half] =
                static_cast<uint16_t>(mask);
        }
        if (mask != 0) {
            atomicOr(&shared.neuron_any[tile], mask);
            atomicOr(&shared.token_any[token / 32], 1u << (token % 32));
            atomicMax(&shared.most_of_token[tile], __popc(mask));
            for (int pair = atomicAdd(&shared.num_pairs, __popc(mask)); mask != 0 && pair < kMaxPairs; ++pair) {
                shared.pairs[pair] = static_cast<uint16_t>((tile * MMA_M + __ffs(mask) - 1) * kMaxTokens + token);
                mask &= mask - 1;
            }
        }
    }
    __syncthreads();

    auto const finish = [&](int m, int token, float sum) {
        uint16_t const bits = g[m * Cfg::kStrideG + token];
        if (is_nonzero(bits)) {
            float u = params.b_up == nullptr ? sum : sum + Element::to_float(shared.b_up[m]);
            u = params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
            float const h = Element::to_float(bits) * u;
            params.h[static_cast<int64_t>(token) * params.d_ff + neuron_begin + m] = h;
            if (params.h_rounded != nullptr) {
                params.h_rounded[token * stride_rounded + neuron_begin + m] = Element::from_float(h);
            }
        }
    };
    // The next kernel reads this row.
    auto const prefetch_w_down = [&](int m) {
        prefetch_row(params.w_down + static_cast<int64_t>(neuron_begin + m) * params.d_out, params.d_out);
    };

    // Up projection of few pairs: a warp each. (In whatever order they were found: each has its own place in h.)
    // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
    int const num_pairs = shared.num_pairs;
    if (params.counted != nullptr && thread == 0) {
        int most = 0;
#pragma unroll
        for (int i = 0; i < Cfg::kTilesM; ++i) {
            most += shared.most_of_token[i];
        }
        params.counted[blockIdx.x] = make_int2(num_pairs, most);
    }
    if (num_pairs <= kMaxPairs) {
        int const warp = thread / kWarpSize;
        int const count = (num_pairs - warp + kWarps - 1) / kWarps;  // this warp's
        auto const neuron_of = [&](int i) { return shared.pairs[warp + i * kWarps] / kMaxTokens; };
        auto const token_of = [&](int i) { return shared.pairs[warp + i * kWarps] % kMaxTokens; };
        // Where most are active, everybody streams, and who prefetches is in the way.
        bool const prefetches = params.tokens > 1 || num_pairs <= kMostPrefetched;
        for (int i = 0; i < count; ++i) {
            if (prefetches) {
                prefetch_w_down(neuron_of(i));
            }
            if (params.w_up == nullptr && thread % kWarpSize == 0) {
                finish(neuron_of(i), token_of(i), 1.0f);
            }
        }
        if (params.w_up != nullptr) {
            dot_products<Element, Cfg::kDotSlots>(
                count, params.d_model, shared_address(dynamic) + warp * (Cfg::kDotSlots * kBytesDot),
                [&](int i) { return params.x + static_cast<int64_t>(token_of(i)) * params.d_model; },
                [&](int i) { return params.w_up + static_cast<int64_t>(neuron_begin + neuron_of(i)) * params.d_model; },
                [&](int i, float sum) { finish(neuron_of(i), token_of(i), sum); });
        }
        return;
    }

    // Of many, like the gate projection, with the active neurons and tokens only. First the lists of them, in ascending
    // order.
    int num_neurons = 0;
#pragma unroll
    for (int i = 0; i < Cfg::kTilesM; ++i) {
        uint32_t const mask = shared.neuron_any[i];
        if (thread / MMA_M == i && (mask >> (thread % MMA_M) & 1u) != 0) {
            shared.neurons[num_neurons + __popc(mask & ((1u << (thread % MMA_M)) - 1u))] = thread;
        }
        num_neurons += __popc(mask);
    }
    uint32_t const tokens_low = shared.token_any[0];
    uint32_t const tokens_high = shared.token_any[1];
    int const num_tokens = __popc(tokens_low) + __popc(tokens_high);
    if (thread < Cfg::kTokens) {
        uint32_t const mask = thread < 32 ? tokens_low : tokens_high;
        if ((mask >> (thread % 32) & 1u) != 0) {
            int const before = thread < 32 ? 0 : __popc(tokens_low);
            shared.tokens[before + __popc(mask & ((1u << (thread % 32)) - 1u))] = thread;
        }
    }
    __syncthreads();
    if (params.h_rounded == nullptr) {  // else the next kernel probably reads all, in another order
        for (int p = thread / kWarpSize; p < num_neurons; p += kWarps) {
            prefetch_w_down(shared.neurons[p]);
        }
    }
    if (params.w_up == nullptr) {
        for (int i = thread; i < Cfg::kNeurons * Cfg::kTokens; i += kThreads) {
            finish(i / Cfg::kTokens, i % Cfg::kTokens, 1.0f);
        }
        return;
    }
    project<Element, Cfg>(
        Listed{params.w_up, neuron_begin, num_neurons, shared.neurons}, Listed{params.x, 0, num_tokens, shared.tokens},
        params.d_model, dynamic, [] {}, [] {},
        [&](int m, int n, float sum) {
            if (m < num_neurons && n < num_tokens) {
                finish(shared.neurons[m], shared.tokens[n], sum);
            }
        });
}

}  // namespace twell::gate_up_few

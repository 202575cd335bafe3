// The whole block for one or two tokens, for every GPU from sm_80 on, where a row of each matrix is short enough for a
// CTA to read at once, and there are no more neurons than all CTAs take at once.
//
// The time is that of reading w_gate, then of all that follows, one latency after the other. So all CTAs have equally
// many neurons; and the one that finds a neuron active also multiplies h by the neuron's row of w_down, which it has
// sent for together with that of w_up. Then only the CTAs' contributions to y are left to add up, in their order.
//
// With a norm every CTA normalises the tokens itself, in shared memory, while its first weights are under way: those it
// sends for before it waits for the launch before. Without one the tokens come first, as they are, with the weights.
#pragma once

#include "device/block.cuh"
#include "device/cp_async.cuh"
#include "device/dependent_launch.cuh"
#include "device/dot_rows.cuh"
#include "device/element.cuh"
#include "device/epilogue.cuh"
#include "device/gather_rows.cuh"
#include "device/load.cuh"
#include "device/norm.cuh"
#include "device/shared.cuh"
#include "device/vector.cuh"
#include "matmul/matmul_few.cuh"
#include "one_or_two_tokens/one_or_two.h"

namespace twell::contribute_few {

using matmul_few::kThreads;
using matmul_few::kWarps;

constexpr int kMostTokens = kMostTokensOneOrTwo;
constexpr int kNeurons = kNeuronsOfCtaOneOrTwo;
static_assert(kNeurons == MMA_M, "the extent of the tensor cores' tile");
// Registers are kept free for one more, so that a CTA that adds up has a place beside them, and they beside it.
constexpr int kMinBlocks = 4;
constexpr int kMostColumns = kMostColumnsOneOrTwo;
static_assert(kMostColumns == kThreads * kVector, "a thread has a vector of each row");

// Shared memory: the warps' queues; with a norm then rows of x, and sums of u. Afterwards rows of w_down lie in the
// queues, and without a norm, behind those of the i-th warp, the sums of the i-th token's u.
template <int kTokens, bool kHasNorm>
struct Layout {
    static constexpr int kNumStages = kHasNorm ? 4 : 3;
    static constexpr int kQueuedTiles = kHasNorm ? 0 : 1;                                          // of tokens
    static constexpr int kBytesQueue = kNumStages * matmul_few::kBytesWarpStage<1, kQueuedTiles>;  // of a warp
    static constexpr int kBytesQueues = kWarps * kBytesQueue;
    static constexpr int kBytesDown = kNeurons * kBytesPiece;
    static constexpr int kBytesUp = kNeurons * kWarps * static_cast<int>(sizeof(float));  // of a token
    // Of two rows the 64 bytes that four lanes read at once lie in different banks.
    static constexpr int kBytesRow = kMostColumns * 2 + 64;
    static constexpr int kOffsetUp = kHasNorm ? kBytesQueues + kTokens * kBytesRow : kBytesDown;
    static constexpr int kStrideUp = kHasNorm ? kBytesUp : kBytesQueue;
    static constexpr int kSharedBytes = kHasNorm ? kOffsetUp + kTokens * kBytesUp : kBytesQueues;
    static_assert(kBytesDown + (kHasNorm ? 0 : kBytesUp) <= kBytesQueue && kMostTokens <= kWarps,
                  "the rows and sums find a place in the queues");
};

// All CTAs that add up read at the same time which ones contribute, but not all of them the same copy.
constexpr int kCopies = 8;

template <class Stored>
struct ParamsOf : BlockTensorsOf<Stored> {
    float* contributions;   // [tokens, num_ctas, d_out], written by those that contribute
    uint32_t* contributes;  // [kCopies, tokens, num_ctas]: 0 if it does not
    int num_ctas;
    int neurons_each;  // of a CTA
    int neurons_left;  // that many CTAs have one more
    norm::Norm norm;
};

// Computes the contribution of each CTA's neurons to y.
template <class Element, class Stored, int kTokens, bool kHasNorm>
__global__ void __launch_bounds__(kThreads, kMinBlocks) contribute_kernel(ParamsOf<Stored> const params) {
    static_assert(kTokens * kNeurons <= kWarpSize && kTokens <= kMostTokens, "a lane has a neuron of a token");
    using Places = Layout<kTokens, kHasNorm>;
    constexpr int kBytesQueue = Places::kBytesQueue;
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float gate_parts[kWarps][kTokens][kNeurons];
    __shared__ float row_sums[2][kWarps];  // with a norm
    auto const up_parts = [](int token) {
        return reinterpret_cast<float*>(dynamic + token * Places::kStrideUp + Places::kOffsetUp);
    };

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const cta = static_cast<int>(blockIdx.x);
    int const neuron_begin = cta * params.neurons_each + min(cta, params.neurons_left);
    int const num_neurons = params.neurons_each + (cta < params.neurons_left ? 1 : 0);
    // A lane's; if there is one token, two lanes have the same.
    int const neuron = lane % kNeurons;
    int const token = lane / kNeurons % kTokens;
    bool const has_neuron = neuron < num_neurons;
    uint16_t b_gate = 0;
    uint16_t b_up = 0;
    uint32_t cut = 0;
    float scales[3] = {};                                        // of the lane's rows of weights
    int const column = static_cast<int>(threadIdx.x) * kVector;  // of x, and of y
    auto const begin = [&] {
        if constexpr (!kHasNorm) {
            wait_for_previous_launch();
            allow_dependent_launch();
        }
        if (has_neuron && params.b_gate != nullptr) {
            b_gate = params.b_gate[neuron_begin + neuron];
        }
        if (has_neuron && params.b_up != nullptr) {
            b_up = params.b_up[neuron_begin + neuron];
        }
        cut = cut_of<Element>(params.act.cut, params.act.cuts, neuron_begin + neuron, params.d_ff);
        if constexpr (ParamsOf<Stored>::kHasScales) {
            if (has_neuron) {
                scales[0] = scale_sum(params, params.gate_scale, 1.0f, neuron_begin + neuron);
                scales[1] =
                    params.w_up == nullptr ? 1.0f : scale_sum(params, params.up_scale, 1.0f, neuron_begin + neuron);
                scales[2] = scale_h(params, 1.0f, neuron_begin + neuron);
            }
        }
    };
    // A thread has a vector of each row.
    auto const x_place = [&](int t) {
        return reinterpret_cast<uint4*>(dynamic + Places::kBytesQueues + t * Places::kBytesRow) + threadIdx.x;
    };
    auto const normalise = [&] {
        int const vectors = params.d_model / kVector;
        int const v = static_cast<int>(threadIdx.x);
        norm::NormVector const of_columns = norm::load_norm(params.norm, v, vectors);
        wait_for_previous_launch();
        allow_dependent_launch();
        uint4 held[kTokens];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            held[t] = load_written_vector_if(params.x + t * params.d_model + column, v < vectors);
        }
        norm::SumOfRow<kThreads> sum_of_row = {row_sums};
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            auto const load = [&](int) { return held[t]; };
            norm::Moments const moments = norm::find_moments<Element, 1>(
                params.norm, vectors, v, kThreads, load, [](int, uint4) {}, load, sum_of_row);
            *x_place(t) = v < vectors ? norm::normalise<Element>(held[t], params.norm, of_columns, moments) : uint4{};
        }
        __syncthreads();
    };
    float accumulators[1][1][4] = {};
    uint32_t const queues = shared_address(dynamic);
    matmul_few::Consecutive<Stored> const neurons = {params.w_gate, neuron_begin, num_neurons};
    if constexpr (kHasNorm) {
        matmul_few::Resident<kTokens, decltype(normalise)> const tokens = {queues + Places::kBytesQueues,
                                                                           Places::kBytesRow, normalise};
        matmul_few::multiply<Element, 1, 1, Places::kNumStages>(accumulators, neurons, tokens, params.d_model, queues,
                                                                begin);
    } else {
        matmul_few::multiply<Element, 1, 1, Places::kNumStages>(accumulators, neurons,
                                                                matmul_few::Consecutive<uint16_t>{params.x, 0, kTokens},
                                                                params.d_model, queues, begin);
    }
    if (lane % 4 == 0) {  // the first two of eight tokens
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            gate_parts[warp][t][lane / 4] = accumulators[0][0][t];
            gate_parts[warp][t][lane / 4 + 8] = accumulators[0][0][t + 2];
        }
    }
    __syncthreads();
    // Each warp adds up for itself, so that all of them know.
    float z = ParamsOf<Stored>::kHasScales ? 0.0f : Element::to_float(b_gate);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        z += gate_parts[w][token][neuron];
    }
    if constexpr (ParamsOf<Stored>::kHasScales) {
        z = z * scales[0] + Element::to_float(b_gate);
    }
    uint16_t const g = has_neuron ? activate<Element>(z, params.act.square, cut) : static_cast<uint16_t>(0);
    uint32_t const found = __ballot_sync(0xffffffffu, is_nonzero(g));
    uint32_t active[kTokens];
    uint32_t any = 0;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        active[t] = found >> t * kNeurons & ((1u << kNeurons) - 1);
        any |= active[t];
    }
    if (threadIdx.x < kCopies) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            params.contributes[(static_cast<int>(threadIdx.x) * kTokens + t) * params.num_ctas + cta] = active[t];
        }
    }
    if (any == 0) {
        return;
    }

    // Rows of w_down. Columns past the end repeat the last ones and are not stored.
    uint32_t const pieces = queues + warp * kBytesQueue + lane * 16;
    Stored const* const w_down =
        params.w_down + static_cast<int64_t>(neuron_begin) * params.d_out + min(column, params.d_out - kVector);
    send_for_set(pieces, w_down, params.d_out, any);

    float h = Element::to_float(g);
    if (params.w_up != nullptr) {
        uint16_t const* const x = params.x + min(column, params.d_model - kVector);
        bool const exists = column < params.d_model;
        auto const x_of = [&](int t) {
            if constexpr (kHasNorm) {
                return *x_place(t);
            }
            uint4 const loaded = __ldcg(reinterpret_cast<uint4 const*>(x + t * params.d_model));
            return exists ? loaded : uint4{};  // whatever it is, infinity times 0 would be a NaN
        };
        if ((any & (any - 1)) == 0) {
            dot_set<Element, kTokens, 1, kWarps>(x_of, params.w_up, params.d_model, neuron_begin, any, up_parts);
        } else {
            dot_set<Element, kTokens, 4, kWarps>(x_of, params.w_up, params.d_model, neuron_begin, any, up_parts);
        }
        __syncthreads();
        // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
        float u = ParamsOf<Stored>::kHasScales ? 0.0f : Element::to_float(b_up);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            u += up_parts(token)[neuron * kWarps + w];  // of an inactive neuron whatever is there: not used
        }
        if constexpr (ParamsOf<Stored>::kHasScales) {
            u = u * scales[1] + Element::to_float(b_up);
        }
        u = params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
        h *= u;
    }
    if constexpr (ParamsOf<Stored>::kHasScales) {
        h *= scales[2];
    }

    wait_async<0>();
    float sums[kTokens][kVector] = {};
    use_set<Stored>(pieces, any, [&](int n, Vector<Stored> row) {
        float weights[kVector];
        unpack<Element>(weights, row);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            float const factor = __shfl_sync(0xffffffffu, h, t * kNeurons + n);
            if (kTokens == 1 || (active[t] >> n & 1) != 0) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    sums[t][i] = fmaf(factor, weights[i], sums[t][i]);
                }
            }
        }
    });
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
        if (active[t] != 0 && column < params.d_out) {
            float4* const contribution = reinterpret_cast<float4*>(
                params.contributions + static_cast<int64_t>(t * params.num_ctas + cta) * params.d_out + column);
            contribution[0] = make_float4(sums[t][0], sums[t][1], sums[t][2], sums[t][3]);
            contribution[1] = make_float4(sums[t][4], sums[t][5], sums[t][6], sums[t][7]);
        }
    }
}

// A CTA adds up some columns of a token; its warps share out the contributions.
constexpr int kAddColumns = 16;
constexpr int kAddThreads = 512;
constexpr int kAddLanes = kAddColumns / 4;       // side by side, with four columns each
constexpr int kAddRows = kWarpSize / kAddLanes;  // of a warp at a time
constexpr int kAddWarps = kAddThreads / kWarpSize;
constexpr int kMostCtas = kMostCtasOneOrTwo;
static_assert(kMostCtas == kAddWarps * kWarpSize, "a lane looks at one");

template <class Element, class Stored>
__global__ void __launch_bounds__(kAddThreads) add_kernel(ParamsOf<Stored> const params) {
    __shared__ float parts[kAddWarps][kAddColumns];
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const slab = static_cast<int>(blockIdx.x);
    int const column = slab * kAddColumns + lane % kAddLanes * 4;
    int const first_cta = params.num_ctas * warp / kAddWarps;
    int const count = params.num_ctas * (warp + 1) / kAddWarps - first_cta;
    int const token = static_cast<int>(blockIdx.y);
    int const tokens = static_cast<int>(gridDim.y);
    uint32_t const* const contributes =
        params.contributes + (slab % kCopies * tokens + token) * params.num_ctas + first_cta;
    float const* const contribution =
        params.contributions +
        static_cast<int64_t>(token * params.num_ctas + first_cta + lane / kAddLanes) * params.d_out + column;
    allow_dependent_launch();
    wait_for_previous_launch();
    bool const one_contributes = lane < count && __ldcg(contributes + lane) != 0;
    uint32_t const there = __ballot_sync(0xffffffffu, one_contributes) >> lane / kAddLanes;
    float4 values[kAddLanes];
#pragma unroll
    for (int r = 0; r < kAddLanes; ++r) {
        values[r] = load_from_l2_if(contribution + static_cast<int64_t>(r * kAddRows) * params.d_out,
                                    (there >> r * kAddRows & 1) != 0 && column < params.d_out);
    }
    // Comes together with the contributions.
    float y[1] = {};
    float scale[1] = {1.0f};
    int const stored = slab * kAddColumns + thread;
    bool const stores = thread < kAddColumns && stored < params.d_out;
    if (stores) {
        add_bias_and_residual<Element>(y, params, token, stored);
        scale_outputs(scale, params, stored);
    }
    float4 sum = {};
#pragma unroll
    for (int r = 0; r < kAddLanes; ++r) {
        add(sum, values[r]);
    }
#pragma unroll
    for (int distance = kAddLanes; distance < kWarpSize; distance *= 2) {
        add(sum,
            make_float4(__shfl_xor_sync(0xffffffffu, sum.x, distance), __shfl_xor_sync(0xffffffffu, sum.y, distance),
                        __shfl_xor_sync(0xffffffffu, sum.z, distance), __shfl_xor_sync(0xffffffffu, sum.w, distance)));
    }
    if (lane < kAddLanes) {
        *reinterpret_cast<float4*>(&parts[warp][lane * 4]) = sum;
    }
    __syncthreads();
    if (stores) {
#pragma unroll
        for (int w = 0; w < kAddWarps; ++w) {
            y[0] += ParamsOf<Stored>::kHasScales ? parts[w][thread] * scale[0] : parts[w][thread];
        }
        params.y[token * params.d_out + stored] = Element::from_float(y[0]);
    }
}

}  // namespace twell::contribute_few

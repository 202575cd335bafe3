// The whole block for one token, for every GPU from sm_80 on, where a row of each matrix is short enough for a CTA to
// read at once, and there are no more neurons than all CTAs take at once.
//
// The time is that of reading w_gate, then of whatever follows, one latency after the other. So all CTAs have equally
// many neurons; and the one that finds a neuron active also multiplies h by the neuron's row of w_down, which it has sent
// for together with that of w_up. What is left is to add up what CTAs contribute to y, in their order.
#ifndef TWELL_KERNELS_ONE_TOKEN_CUH_
#define TWELL_KERNELS_ONE_TOKEN_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "gate_up_few.cuh"
#include "vector.cuh"

namespace twell::one_token {

using gate_up_few::kBytesPiece;
using gate_up_few::kThreads;
using gate_up_few::kWarps;

constexpr int kNeurons = MMA_M;  // of a CTA, at most
constexpr int kCtasPerMultiprocessor = 3;
constexpr int kMostColumns = kThreads * kVector;  // of a matrix: a thread has a vector of each row
constexpr int kNumStages = 3;
constexpr int kBytesQueue = kNumStages * gate_up_few::kBytesWarpStage<1, 1>;  // of a warp
constexpr int kSharedBytes = kWarps * kBytesQueue;
static_assert(kNeurons * kBytesPiece <= kBytesQueue, "rows of w_down lie there afterwards");

// All CTAs that add up read at the same time which ones contribute, but not all of them the same copy.
constexpr int kCopies = 8;

struct Params {
    uint16_t const* x;       // [d_model]
    uint16_t const* w_gate;  // [d_ff, d_model]
    uint16_t const* b_gate;  // [d_ff] or null
    uint16_t const* w_up;    // [d_ff, d_model], null in a plain block
    uint16_t const* b_up;    // [d_ff] or null
    uint16_t const* w_down;  // [d_ff, d_out]
    uint16_t const* b_down;  // [d_out] or null
    uint16_t* y;             // [d_out]
    float* contributions;    // [num_ctas, d_out], written by those that contribute
    uint32_t* contributes;   // [kCopies, num_ctas]: 0 if it does not
    int num_ctas;
    int neurons_each;  // of a CTA
    int neurons_left;  // so many CTAs have one more
    int d_model;
    int d_ff;
    int d_out;
    bool relu_on_up;  // dReLU
    Activation act;
};

// load_vector, or zeros.
__device__ __forceinline__ uint4 load_vector_if(uint16_t const* pointer, bool exists) {
    uint4 vector;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %5, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "mov.b32 %2, 0;\n"
        "mov.b32 %3, 0;\n"
        "@exists ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&r"(vector.x), "=&r"(vector.y), "=&r"(vector.z), "=&r"(vector.w)
        : "l"(pointer), "r"(static_cast<int>(exists)));
    return vector;
}

// Multiplies x by rows of w_up, those of a set of the neurons from `neuron_begin` on, kRows at once, and leaves each
// warp's part of the sums.
template <class Element, int kRows>
__device__ __forceinline__ void multiply_up(Params const& params, int neuron_begin, uint32_t set,
                                            float (&parts)[kNeurons][kWarps]) {
    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const k = static_cast<int>(threadIdx.x) * kVector;
    bool const exists = k < params.d_model;
    uint16_t const* const w_up = params.w_up + static_cast<int64_t>(neuron_begin) * params.d_model + k;
    while (set != 0) {
        uint4 weights[kRows];
        uint32_t rest = set;
#pragma unroll
        for (int r = 0; r < kRows; ++r, rest &= rest - 1) {
            weights[r] =
                load_vector_if(w_up + static_cast<int64_t>(__ffs(rest) - 1) * params.d_model, exists && rest != 0);
        }
        uint4 const x = __ldcg(reinterpret_cast<uint4 const*>(params.x + min(k, params.d_model - kVector)));
        float sums[kRows] = {};
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            accumulate<Element>(sums[r], x, weights[r]);
        }
#pragma unroll
        for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], distance);
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r, set &= set - 1) {
            if (set != 0 && lane == 0) {
                parts[__ffs(set) - 1][warp] = sums[r];
            }
        }
    }
}

// What each CTA's neurons contribute to y.
template <class Element>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) contribute_kernel(Params const params) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    __shared__ float gate_parts[kWarps][kNeurons];
    __shared__ float up_parts[kNeurons][kWarps];

    int const lane = threadIdx.x % kWarpSize;
    int const warp = threadIdx.x / kWarpSize;
    int const cta = static_cast<int>(blockIdx.x);
    int const neuron_begin = cta * params.neurons_each + min(cta, params.neurons_left);
    int const num_neurons = params.neurons_each + (cta < params.neurons_left ? 1 : 0);
    // Two lanes have the same neuron.
    bool const has_neuron = lane % kNeurons < num_neurons;
    int const neuron = neuron_begin + lane % kNeurons;
    uint16_t b_gate = 0;
    uint16_t b_up = 0;
    auto const begin = [&] {
        wait_for_previous_launch();
        allow_dependent_launch();
        if (has_neuron && params.b_gate != nullptr) {
            b_gate = params.b_gate[neuron];
        }
        if (has_neuron && params.b_up != nullptr) {
            b_up = params.b_up[neuron];
        }
    };
    float accumulators[1][1][4] = {};
    uint32_t const queues = gate_up_few::shared_address(dynamic);
    gate_up_few::multiply<Element, 1, 1, kNumStages>(
        accumulators, gate_up_few::Consecutive{params.w_gate, neuron_begin, num_neurons},
        gate_up_few::Consecutive{params.x, 0, 1}, params.d_model, queues, begin);
    if (lane % 4 == 0) {  // the token is the first of eight
        gate_parts[warp][lane / 4] = accumulators[0][0][0];
        gate_parts[warp][lane / 4 + 8] = accumulators[0][0][2];
    }
    __syncthreads();
    // Each warp adds up for itself, so that all of them know.
    float z = Element::to_float(b_gate);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        z += gate_parts[w][lane % kNeurons];
    }
    uint16_t const g = has_neuron ? activate<Element>(z, params.act) : static_cast<uint16_t>(0);
    uint32_t const active = __ballot_sync(0xffffffffu, is_nonzero(g)) & ((1u << kNeurons) - 1);
    if (threadIdx.x < kCopies) {
        params.contributes[static_cast<int>(threadIdx.x) * params.num_ctas + cta] = active;
    }
    if (active == 0) {
        return;
    }

    // Rows of w_down. Columns past the end repeat the last ones and are not stored.
    int const column = static_cast<int>(threadIdx.x) * kVector;
    uint32_t const pieces = queues + warp * kBytesQueue + lane * 16;
    uint16_t const* const w_down =
        params.w_down + static_cast<int64_t>(neuron_begin) * params.d_out + min(column, params.d_out - kVector);
    uint32_t piece = pieces;
    for (uint32_t rest = active; rest != 0; rest &= rest - 1, piece += kBytesPiece) {
        gate_up_few::copy_async(piece, w_down + static_cast<int64_t>(__ffs(rest) - 1) * params.d_out, true);
    }
    gate_up_few::commit_async();

    float h = Element::to_float(g);
    if (params.w_up != nullptr) {
        if ((active & (active - 1)) == 0) {
            multiply_up<Element, 1>(params, neuron_begin, active, up_parts);
        } else {
            multiply_up<Element, 4>(params, neuron_begin, active, up_parts);
        }
        __syncthreads();
        // NOTE: u and h stay in fp32; a dense fp16 block, which stores both, can overflow here.
        float u = Element::to_float(b_up);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            u += up_parts[lane % kNeurons][w];  // of an inactive neuron whatever is there: not used
        }
        u = params.relu_on_up && u <= 0.0f ? 0.0f : u;  // NaN is kept
        h *= u;
    }

    gate_up_few::wait_async<0>();
    float sums[kVector] = {};
    piece = pieces;
    for (uint32_t rest = active; rest != 0; rest &= rest - 1, piece += kBytesPiece) {
        float const factor = __shfl_sync(0xffffffffu, h, __ffs(rest) - 1);
        float weights[kVector];
        unpack<Element>(weights, gate_up_few::load_shared(piece));
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            sums[i] = fmaf(factor, weights[i], sums[i]);
        }
    }
    if (column < params.d_out) {
        float4* const contribution =
            reinterpret_cast<float4*>(params.contributions + static_cast<int64_t>(cta) * params.d_out + column);
        contribution[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
        contribution[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    }
}

// A CTA adds up some columns; its warps share out the contributions.
constexpr int kAddColumns = 16;
constexpr int kAddThreads = 512;
constexpr int kAddLanes = kAddColumns / 4;       // side by side, with four columns each
constexpr int kAddRows = kWarpSize / kAddLanes;  // of a warp at a time
constexpr int kAddWarps = kAddThreads / kWarpSize;
constexpr int kMostCtas = kAddWarps * kWarpSize;  // a lane looks at one

// Zeros if they do not exist. Volatile, so that loads are under way together.
__device__ __forceinline__ float4 load_if(float const* pointer, bool exists) {
    float4 values;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %5, 0;\n"
        "mov.f32 %0, 0f00000000;\n"
        "mov.f32 %1, 0f00000000;\n"
        "mov.f32 %2, 0f00000000;\n"
        "mov.f32 %3, 0f00000000;\n"
        "@exists ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n"
        "}\n"
        : "=&f"(values.x), "=&f"(values.y), "=&f"(values.z), "=&f"(values.w)
        : "l"(pointer), "r"(static_cast<int>(exists))
        : "memory");
    return values;
}

template <class Element>
__global__ void __launch_bounds__(kAddThreads) add_kernel(Params const params) {
    __shared__ float parts[kAddWarps][kAddColumns];
    int const thread = threadIdx.x;
    int const lane = thread % kWarpSize;
    int const warp = thread / kWarpSize;
    int const slab = static_cast<int>(blockIdx.x);
    int const column = slab * kAddColumns + lane % kAddLanes * 4;
    int const first_cta = params.num_ctas * warp / kAddWarps;
    int const count = params.num_ctas * (warp + 1) / kAddWarps - first_cta;
    uint32_t const* const contributes = params.contributes + slab % kCopies * params.num_ctas + first_cta;
    float const* const contribution =
        params.contributions + static_cast<int64_t>(first_cta + lane / kAddLanes) * params.d_out + column;
    allow_dependent_launch();
    wait_for_previous_launch();
    bool const one_contributes = lane < count && __ldcg(contributes + lane) != 0;
    uint32_t const there = __ballot_sync(0xffffffffu, one_contributes) >> lane / kAddLanes;
    float4 values[kAddLanes];
#pragma unroll
    for (int r = 0; r < kAddLanes; ++r) {
        values[r] = load_if(contribution + static_cast<int64_t>(r * kAddRows) * params.d_out,
                            (there >> r * kAddRows & 1) != 0 && column < params.d_out);
    }
    float4 sum = {};
#pragma unroll
    for (int r = 0; r < kAddLanes; ++r) {
        sum.x += values[r].x;
        sum.y += values[r].y;
        sum.z += values[r].z;
        sum.w += values[r].w;
    }
#pragma unroll
    for (int distance = kAddLanes; distance < kWarpSize; distance *= 2) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, distance);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, distance);
        sum.z += __shfl_xor_sync(0xffffffffu, sum.z, distance);
        sum.w += __shfl_xor_sync(0xffffffffu, sum.w, distance);
    }
    if (lane < kAddLanes) {
        *reinterpret_cast<float4*>(&parts[warp][lane * 4]) = sum;
    }
    __syncthreads();
    int const stored = slab * kAddColumns + thread;
    if (thread < kAddColumns && stored < params.d_out) {
        float y = params.b_down == nullptr ? 0.0f : Element::to_float(params.b_down[stored]);
#pragma unroll
        for (int w = 0; w < kAddWarps; ++w) {
            y += parts[w][thread];
        }
        params.y[stored] = Element::from_float(y);
    }
}

}  // namespace twell::one_token

#endif  // TWELL_KERNELS_ONE_TOKEN_CUH_

// Experts with many tokens on Hopper (sm_90a): dense products of groups, by TMA and wgmma.
//
// As in matmul_sm90.cuh the products are transposed, neurons x tokens. A CTA goes through pieces of work: a group's
// tokens times 256 rows of w_up, or 128 of w_gate and the same of w_up, or times 256 columns of w_down. A thread loads,
// also slices of the next piece, and two warpgroups multiply: of each half of the rows they have 64 each. A group's
// tokens are neighbouring rows of their matrix: gather_kernel brings x into the order of slots, in which h is anyway. A
// box of tokens may hold those of the next group, too; nothing is made of their sums.
//
// The tensor cores take weights in FP8 only with tokens in FP8. Here they are widened on their way through registers.
#pragma once

#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/warps.cuh"
#include "experts/down.cuh"
#include "experts/many.cuh"
#include "experts/up.cuh"
#include "matmul/matmul_sm90.cuh"

namespace twell::experts {

namespace sm90 = matmul_sm90;

constexpr int kHalves = 2;  // of a piece's rows: matrices, or neighbours in one
constexpr int kHalfRows = sm90::BLOCK_M;
constexpr int kRegistersLoader = 40;
constexpr int kRegistersMultiply = 232;
static_assert(sm90::registers_suffice(kRegistersLoader, kRegistersMultiply), "setmaxnreg.inc would wait for ever");

// A result for matmul_sm90.cuh's pass_result.
template <int kColumns>
struct PassedColumns {
    static constexpr int BLOCK_N = kColumns;
    static constexpr bool kIsTall = false;
    static constexpr int kBytesWarp = 2 * 2 * sm90::kRowsPerSwizzle * sm90::kBytesWarpRow;
};

// Where everything lies in shared memory. kWidth: tokens of a group.
template <class Stored, int kWidth>
struct ManySm90 {
    static constexpr bool kBytes = sizeof(Stored) == 1;
    static constexpr int kBytesWarp = PassedColumns<kWidth>::kBytesWarp;
    static constexpr int kTokenBoxes = kBytes ? 2 : 1;
    static constexpr int kSlice = kTokenBoxes * sm90::kRowElements;  // of the products' common extent
    static constexpr int kBytesHalf = kHalfRows * sm90::kBytesRow;
    static constexpr int kBytesBox = kWidth * sm90::kBytesRow;
    static constexpr int kBytesStage = kHalves * kBytesHalf + kTokenBoxes * kBytesBox;
    static constexpr int kBytesResult = sm90::kConsumerWarps * kBytesWarp;
    static constexpr int kStages = (sm90::kMaxSharedBytes - 256 - kBytesResult) / kBytesStage;
    static constexpr int kOffsetResult = kStages * kBytesStage;
    static constexpr int kOffsetBarriers = kOffsetResult + kBytesResult;
    static constexpr int kSharedBytes = kOffsetBarriers + 2 * kStages * 8;
    static_assert(kStages >= 3, "or loads and products take turns");

    uint32_t base;

    __device__ __forceinline__ uint32_t weights(int stage) const { return base + stage * kBytesStage; }
    __device__ __forceinline__ uint32_t tokens(int stage) const { return weights(stage) + kHalves * kBytesHalf; }
    __device__ __forceinline__ uint32_t result(int warp) const { return base + kOffsetResult + warp * kBytesWarp; }
    __device__ __forceinline__ uint32_t full(int stage) const { return base + kOffsetBarriers + stage * 8; }
    __device__ __forceinline__ uint32_t empty(int stage) const { return full(kStages + stage); }
};

template <class Inner>
struct ManySm90Params {
    // [experts, rows, columns], of FP8 two columns as one. Boxes have 128 rows; of w_down in 16 bits 64, as a slice
    // has.
    CUtensorMap weights[kHalves];
    CUtensorMap tokens;  // [pairs, columns], boxes of [width, 64]
    Inner inner;
    int num_tiles;   // pieces of a group
    int num_slices;  // of the products' common extent
};

// kMatrices: as in many.cuh. The first row of a half, of a piece's tile.
template <int kMatrices>
__device__ __forceinline__ int first_of(int tile, int half) {
    return kMatrices == 2 ? tile * kHalfRows : (tile * kHalves + half) * kHalfRows;
}

template <class Stored, int kMatrices, int kWidth, class Params>
__device__ __forceinline__ void load_pieces(Params const& params, ManySm90<Stored, kWidth> const& shared, int rows) {
    using Shape = ManySm90<Stored, kWidth>;
    Groups const& groups = params.inner.groups;
    sm90::Ring<Shape::kStages> ring;
    int const num_pieces = groups.most_groups * params.num_tiles;
    for (int piece = static_cast<int>(blockIdx.x); piece < num_pieces; piece += static_cast<int>(gridDim.x)) {
        Group const group = group_of(groups, piece / params.num_tiles);
        if (group.count == 0) {
            continue;
        }
        for (int slice = 0; slice < params.num_slices; ++slice, ring.advance()) {
            uint32_t const full = shared.full(ring.stage);
            wait_barrier(shared.empty(ring.stage), ring.parity ^ 1);
            arrive_and_expect(full, Shape::kBytesStage);
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                uint32_t const to = shared.weights(ring.stage) + half * Shape::kBytesHalf;
                CUtensorMap const& map = params.weights[half];
                // Of a half outside of the matrix nothing is used; TMA takes longer to fill up than to read.
                int first = first_of<kMatrices>(piece % params.num_tiles, half);
                first = first < rows ? first : 0;
                if constexpr (kMatrices != 0) {
                    load_box(to, map, full, slice * sm90::kRowElements, first, group.expert);
                } else if constexpr (Shape::kBytes) {
                    load_box(to, map, full, first / 2, slice * Shape::kSlice, group.expert);
                } else {
#pragma unroll
                    for (int consumer = 0; consumer < sm90::kConsumers; ++consumer) {
                        int const column = first + consumer * sm90::WGMMA_M;
                        load_box(to + consumer * (sm90::BLOCK_K * sm90::kBytesRow), map, full,
                                 column < rows ? column : 0, slice * Shape::kSlice, group.expert);
                    }
                }
            }
#pragma unroll
            for (int box = 0; box < Shape::kTokenBoxes; ++box) {
                load_box(shared.tokens(ring.stage) + box * Shape::kBytesBox, params.tokens, full,
                         slice * Shape::kSlice + box * sm90::kRowElements, group.begin);
            }
        }
    }
}

// A warp's 16 rows of a half, times 32 of a slice from `at` on, widened: operands of two steps of wgmma. For w_down
// rows lane / 4 and that plus 8 of the sums are columns 2 * (lane / 4) and the next one. Of w_up the 16 columns of a
// step lie in the order 0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, ... 15; gather_kernel gives x the same.
template <class Element, bool kIsDown>
__device__ __forceinline__ void load_widened(uint32_t (&a)[2][4], uint32_t half, int consumer_warp, int at) {
    int const lane = threadIdx.x % kWarpSize;
    uint32_t words[4];
    if constexpr (kIsDown) {
        uint32_t const row = half + (at + lane) * sm90::kBytesRow;
        load_matrix_x4<true>(words, row + ((consumer_warp ^ (lane % sm90::kRowsPerSwizzle)) << 4));
    } else {
        int const row = consumer_warp * sm90::kWarpNeurons + lane % 16;
        int const chunk = at / 16 + lane / 16;
        load_matrix_x4<false>(words, half + row * sm90::kBytesRow + ((chunk ^ (row % sm90::kRowsPerSwizzle)) << 4));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
        uint2 const first = widen4<Element>(kIsDown ? __byte_perm(words[2 * step], 0, 0x3120) : words[2 * step]);
        uint2 const second =
            widen4<Element>(kIsDown ? __byte_perm(words[2 * step + 1], 0, 0x3120) : words[2 * step + 1]);
        a[step][0] = first.x;
        a[step][1] = kIsDown ? first.y : second.x;
        a[step][2] = kIsDown ? second.x : first.y;
        a[step][3] = second.y;
    }
}

// sums = a piece's products, by one warp of a consumer, of weights in FP8. A slice comes in two parts: one is widened
// while the other is multiplied.
template <class Element, bool kIsDown, int kWidth, int kSums>
__device__ __forceinline__ void multiply_widened(float (&sums)[kHalves][kSums], ManySm90<E4m3, kWidth> const& shared,
                                                 sm90::Ring<ManySm90<E4m3, kWidth>::kStages>& ring, int consumer_warp,
                                                 int num_slices) {
    using Shape = ManySm90<E4m3, kWidth>;
    constexpr int kColumns = kSums * 2;
    constexpr int kParts = 2;
    constexpr int kSteps = Shape::kSlice / kParts / sm90::WGMMA_K;
    uint32_t a[kParts][kHalves][kSteps][4];
    auto const release = [&](int stage) {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) {
            arrive(shared.empty(stage));
        }
    };
    // The compiler does not know that wgmma reads these until it has ended.
    auto const keep = [&](int part) {
#pragma unroll
        for (int i = 0; i < kHalves * kSteps; ++i) {
            uint32_t const(&words)[4] = a[part][i / kSteps][i % kSteps];
            asm volatile("" ::"r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
        }
    };
    int stage_before = 0;
    for (int slice = 0; slice < num_slices; ++slice, ring.advance()) {
        wait_barrier(shared.full(ring.stage), ring.parity);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
#pragma unroll
                for (int step = 0; step < kSteps; step += 2) {
                    uint32_t two[2][4];
                    load_widened<Element, kIsDown>(two, shared.weights(ring.stage) + half * Shape::kBytesHalf,
                                                   consumer_warp, (part * kSteps + step) * sm90::WGMMA_K);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        a[part][half][step + i / 4][i % 4] = two[i / 4][i % 4];
                    }
                }
            }
            uint64_t const b = sm90::describe(shared.tokens(ring.stage) + part * Shape::kBytesBox);
            begin_wgmma();
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int half = 0; half < kHalves; ++half) {
                    Wgmma<Element, kColumns>::run(sums[half], a[part][half][step],
                                                  b + (step * (sm90::WGMMA_K * 2) >> 4), (slice | part | step) != 0);
                }
            }
            commit_wgmma();
            wait_wgmma<1>();
            keep(1 - part);
            if (part == 0 && slice != 0) {
                release(stage_before);
            }
        }
        stage_before = ring.stage;
    }
    wait_wgmma<0>();
    keep(kParts - 1);
#pragma unroll
    for (int i = 0; i < kHalves * kSums; ++i) {
        asm volatile("" : "+f"(sums[i / kSums][i % kSums])::"memory");
    }
    release(stage_before);
}

// Calls use(std::integral_constant) with the tokens of a product: those of a group, or, if it has no more, half of
// them. With weights in FP8 there are not enough registers for a choice.
template <class Stored, int kWidth, class Use>
__device__ __forceinline__ void with_columns(int count, Use use) {
    if constexpr (sizeof(Stored) == 2) {
        if (count <= kWidth / 2) {
            return use(std::integral_constant<int, kWidth / 2>());
        }
    }
    use(std::integral_constant<int, kWidth>());
}

// Goes through a CTA's pieces. finish(group, tile, sums, consumer_warp, warp_bytes) is what a consumer warp does with
// its sums of both halves.
template <class Element, class Stored, int kMatrices, int kWidth, class Params, class Finish>
__device__ __forceinline__ void multiply_pieces(Params const& params, unsigned char* memory, int rows, Finish finish) {
    using Shape = ManySm90<Stored, kWidth>;
    Shape const shared = {shared_address(memory)};
    int const warp = threadIdx.x / kWarpSize;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Shape::kStages; ++stage) {
            init_barrier(shared.full(stage), 1);
            init_barrier(shared.empty(stage), sm90::kConsumerWarps);
        }
        publish_barriers();
        prefetch_map(params.weights[0]);
        prefetch_map(params.weights[1]);
        prefetch_map(params.tokens);
    }
    __syncthreads();
    wait_for_previous_launch();
    allow_dependent_launch();
    if (warp < sm90::kWarpgroupWarps) {
        give_registers<kRegistersLoader>();
        if (threadIdx.x == 0) {
            load_pieces<Stored, kMatrices>(params, shared, rows);
        }
        return;
    }
    take_registers<kRegistersMultiply>();
    int const consumer_warp = warp - sm90::kWarpgroupWarps;
    int const consumer = consumer_warp / sm90::kWarpgroupWarps;
    sm90::Ring<Shape::kStages> ring;
    Groups const& groups = params.inner.groups;
    int const num_pieces = groups.most_groups * params.num_tiles;
    for (int piece = static_cast<int>(blockIdx.x); piece < num_pieces; piece += static_cast<int>(gridDim.x)) {
        Group const group = group_of(groups, piece / params.num_tiles);
        if (group.count == 0) {
            continue;
        }
        with_columns<Stored, kWidth>(group.count, [&](auto columns) {
            constexpr int kColumns = decltype(columns)::value;
            float sums[kHalves][sm90::WGMMA_M * kColumns / sm90::kWarpgroupSize];
            if constexpr (Shape::kBytes) {
                multiply_widened<Element, kMatrices == 0>(sums, shared, ring, consumer_warp, params.num_slices);
            } else {
                sm90::multiply_slices<Element, kColumns, kMatrices == 0, Shape::kBytesHalf>(
                    sums, ring, params.num_slices, [&](int stage) { return shared.full(stage); },
                    [&](int stage) { return shared.weights(stage) + consumer * (sm90::WGMMA_M * sm90::kBytesRow); },
                    [&](int stage) { return shared.tokens(stage); },
                    [&](int, int stage) {
                        if (threadIdx.x % kWarpSize == 0) {
                            arrive(shared.empty(stage));
                        }
                    });
            }
            finish(group, piece % params.num_tiles, sums, consumer_warp, shared.result(consumer_warp));
        });
    }
}

// Copies rows of x into the order of slots, a warp a row. kPermuted: as load_widened wants them.
struct GatherParams {
    Groups groups;
    uint16_t const* x;  // [tokens, d_model]
    uint16_t* sorted;   // [pairs, d_model]
    int d_model;
    int top;
};

constexpr int kGatherThreads = 256;
constexpr int kGatherRows = kGatherThreads / kWarpSize;

template <bool kPermuted>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(GatherParams const params) {
    wait_for_previous_launch();
    allow_dependent_launch();
    Group const group = group_of(params.groups, static_cast<int>(blockIdx.y));
    int const slot = static_cast<int>(blockIdx.x) * kGatherRows + static_cast<int>(threadIdx.x) / kWarpSize;
    if (slot >= group.count) {
        return;
    }
    int64_t const token = pair_of(params.groups, group.begin + slot) / params.top;
    auto const* const from = reinterpret_cast<uint4 const*>(params.x + token * params.d_model);
    auto* const to = reinterpret_cast<uint4*>(params.sorted + int64_t{group.begin + slot} * params.d_model);
    constexpr int kStep = kPermuted ? 2 : 1;
    for (int i = static_cast<int>(threadIdx.x) % kWarpSize * kStep; i < params.d_model / kVector;
         i += kWarpSize * kStep) {
        if constexpr (kPermuted) {
            uint4 const a = __ldg(from + i);
            uint4 const b = __ldg(from + i + 1);
            to[i] = make_uint4(a.x, a.z, b.x, b.z);
            to[i + 1] = make_uint4(a.y, a.w, b.y, b.w);
        } else {
            to[i] = __ldg(from + i);
        }
    }
}

template <class Element, class Stored, int kMatrices, int kWidth>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    many_up_sm90_kernel(__grid_constant__ const ManySm90Params<UpParams> params) {
    using Shape = ManySm90<Stored, kWidth>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    UpParams const& up = params.inner;
    int const pitch = many_pitch(up.d_ff);
    auto const finish = [&](Group const& group, int tile, auto const& sums, int consumer_warp, uint32_t warp_bytes) {
        constexpr int kColumns = sizeof(sums[0]) / sizeof(float) * 2;
        int const lane = threadIdx.x % kWarpSize;
        float const* const cuts = up.thresholds == nullptr ? nullptr : up.thresholds + int64_t{group.expert} * up.d_ff;
        constexpr int kActivated = kMatrices == 2 ? 1 : kHalves;
#pragma unroll
        for (int half = 0; half < kActivated; ++half) {
            int const first = first_of<kMatrices>(tile, half) + consumer_warp * sm90::kWarpNeurons;
            uint32_t cut[2];  // of the thread's two neurons
            float scales[kHalves][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int const neuron = min(first + lane / 4 + k * 8, up.d_ff - 1);
                cut[k] = cut_of<Element>(up.cut, cuts, neuron, up.d_ff);
                if constexpr (Shape::kBytes) {
                    auto const scale_of = [&](Matrix const& matrix) {
                        return __ldg(matrix.scale + int64_t{group.expert} * matrix.scale_of_expert +
                                     int64_t{neuron} * matrix.scale_of_row);
                    };
                    scales[0][k] = scale_of(kMatrices == 2 ? up.gate : up.up);
                    scales[1][k] = scale_of(up.up);
                }
            }
            sm90::pass_result<PassedColumns<kColumns>>(
                warp_bytes,
                [&](int i) {
                    int const k = i % 4 / 2;
                    uint32_t pair = activate2<Element>(sums[half][i] * scales[0][k], sums[half][i + 1] * scales[0][k],
                                                       up.square, cut[k]);
                    if constexpr (kMatrices == 2) {
                        float2 const u = make_float2(sums[1][i] * scales[1][k], sums[1][i + 1] * scales[1][k]);
                        pair = times_up<Element>(pair, u, up.relu_on_up);
                    }
                    return pair;
                },
                [&](int token, int chunk, uint4 values) {
                    int const neuron = first + chunk * kVector;
                    if (token < group.count && neuron < pitch) {
                        *reinterpret_cast<uint4*>(up.h + int64_t{group.begin + token} * pitch + neuron) = values;
                    }
                });
        }
    };
    multiply_pieces<Element, Stored, kMatrices, kWidth>(params, shared_bytes, up.d_ff, finish);
}

template <class Element, class Stored, int kWidth>
__global__ void __launch_bounds__(sm90::kThreads, 1)
    many_down_sm90_kernel(__grid_constant__ const ManySm90Params<DownParams> params) {
    using Shape = ManySm90<Stored, kWidth>;
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    DownParams const& down = params.inner;
    int const pitch = many_pitch(down.d_ff);
    auto const finish = [&](Group const& group, int tile, auto const& sums, int consumer_warp, uint32_t) {
        constexpr int kColumns = sizeof(sums[0]) / sizeof(float) * 2;
        int const lane = threadIdx.x % kWarpSize;
        // Of the i-th 32 tokens each lane has one's.
        int pairs[kColumns / kWarpSize];
        float weights[kColumns / kWarpSize];
#pragma unroll
        for (int i = 0; i < kColumns / kWarpSize; ++i) {
            int const token = min(i * kWarpSize + lane, group.count - 1);
            pairs[i] = pair_of(down.groups, group.begin + token);
            weights[i] = __ldg(down.weights + pairs[i]);
        }
        // Of the thread's sums, two of either half.
        auto const column_of = [&](int k) {
            int const first = first_of<0>(tile, k / 2) + consumer_warp * sm90::kWarpNeurons;
            return first + (Shape::kBytes ? lane / 4 * 2 + k % 2 : lane / 4 + k % 2 * 8);
        };
        auto const scale_of = [&](int column) {
            return Shape::kBytes && column < down.d_out ? scale_of_output(down, group.expert, column) : 1.0f;
        };
        float scales[2 * kHalves];
#pragma unroll
        for (int k = 0; k < 2 * kHalves; ++k) {
            scales[k] = scale_of(column_of(k));
        }
        bool are_finite = true;
#pragma unroll
        for (int i = 0; i < kColumns / 2; i += 4) {
#pragma unroll
            for (int t = 0; t < 2; ++t) {
                int const token = i * 2 + lane % 4 * 2 + t;
                int const pair = __shfl_sync(kAllLanes, pairs[i * 2 / kWarpSize], token % kWarpSize);
                float const weight = __shfl_sync(kAllLanes, weights[i * 2 / kWarpSize], token % kWarpSize);
                if (token >= group.count) {
                    continue;
                }
                float* const y = down.y + int64_t{pair} * down.d_out;
#pragma unroll
                for (int k = 0; k < 2 * kHalves; ++k) {
                    int const column = column_of(k);
                    if (column < down.d_out) {
                        float const value = sums[k / 2][i + k % 2 * 2 + t] * scales[k] * weight;
                        are_finite = are_finite && isfinite(value);
                        y[column] = value;
                    }
                }
            }
        }
        if (!are_finite) {
#pragma unroll 1
            for (int i = 0; i < kColumns / 4 * 2 * kHalves; ++i) {
                int const token = i / 4 / 2 * 8 + lane % 4 * 2 + i / 4 % 2;
                int const column = column_of(i % 4);
                if (token >= group.count || column >= down.d_out) {
                    continue;
                }
                int const pair = pair_of(down.groups, group.begin + token);
                float* const y = down.y + int64_t{pair} * down.d_out + column;
                if (!isfinite(*y)) {
                    uint16_t const* const h = down.h + int64_t{group.begin + token} * pitch;
                    float const sum = sum_of_active<Element, Stored>(down, group.expert, h, 1, column);
                    *y = __ldg(down.weights + pair) * sum * scale_of(column);
                }
            }
        }
    };
    multiply_pieces<Element, Stored, 0, kWidth>(params, shared_bytes, down.d_out, finish);
}

}  // namespace twell::experts

// Down projections of groups, by CTAs that stay: warps that copy rows of active neurons to a ring in shared memory run
// ahead of those that multiply, across the ends of groups, so that the reading of memory never stops.
#pragma once

#include "device/cp_async.cuh"
#include "device/element.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "experts/down.cuh"

namespace twell::experts {

constexpr int kStreamWarps = 8;   // that multiply: all neurons, and columns of their own
constexpr int kCopyThreads = 128;
constexpr int kStreamThreads = kStreamWarps * kWarpSize + kCopyThreads;

// kTiles: of kTile tokens.
template <int kTiles, int kOut>
struct Stream {
    static constexpr int kWidth = kTiles * kTile;
    static constexpr int kProducts = (kTiles + 1) / 2;  // of 16 tokens
    static constexpr int kColumns = kStreamWarps * kOut;
    // Rows of 16 bytes in different banks.
    static constexpr int kPitch = kColumns * 2 + 16;
    static constexpr int kHiddenPitch = kTiles == 1 ? 16 : kWidth * 2 + 16;
    static constexpr int kStageBytes = kNeurons * (kPitch + kHiddenPitch);
    static constexpr int kStages = 100 * 1024 / kStageBytes;  // three microseconds of the memory's rate

    static int shared_bytes(int d_ff) { return kStages * kStageBytes + (d_ff + 15) / 16 * 16 * 2; }
};

// What those that multiply know of a stage.
struct StageOf {
    int group;  // -1: there is no more
    int column;
    int begin;  // the group's first slot
    int count;  // of its slots in the last stage of a piece of work, or 0
};

__device__ __forceinline__ void sync_copying() { asm volatile("bar.sync 1, %0;" ::"n"(kCopyThreads) : "memory"); }

// Arrives when this thread's copies have come.
__device__ __forceinline__ void arrive_behind_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// By a warp: the neurons that are active for any token of a group. Returns how many.
__device__ __forceinline__ int list_neurons(uint16_t* list, uint16_t const* masks, int num_masks, int lane) {
    constexpr int kAtOnce = 4;
    int count = 0;
    for (int first = 0; first < num_masks; first += kAtOnce * kWarpSize) {
        uint32_t loaded[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            int const at = first + i * kWarpSize + lane;
            loaded[i] = at < num_masks ? __ldcg(masks + at) : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            uint32_t const up_to = sum_up_to(static_cast<uint32_t>(__popc(loaded[i])));
            int at = count + static_cast<int>(up_to) - __popc(loaded[i]);
            for (uint32_t mask = loaded[i]; mask != 0; mask &= mask - 1) {
                int const bit = __ffs(static_cast<int>(mask)) - 1;
                list[at++] = static_cast<uint16_t>((first + i * kWarpSize + lane) * MMA_M + bit);
            }
            count += static_cast<int>(__shfl_sync(kAllLanes, up_to, kWarpSize - 1));
        }
    }
    return count;
}

template <class Element, int kTiles, int kOut>
__global__ void __launch_bounds__(kStreamThreads, 1) down_sm90_kernel(DownParams const params) {
    using Shape = Stream<kTiles, kOut>;
    constexpr int kStages = Shape::kStages;
    constexpr int kColumns = Shape::kColumns;
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ __align__(8) uint64_t full_barriers[kStages];
    __shared__ __align__(8) uint64_t empty_barriers[kStages];
    __shared__ __align__(16) StageOf stages[kStages];
    __shared__ int next_work;
    __shared__ int num_listed;
    auto* const list = reinterpret_cast<uint16_t*>(memory + kStages * Shape::kStageBytes);
    uint32_t const ring = shared_address(memory);
    uint32_t const full = shared_address(full_barriers);
    uint32_t const empty = shared_address(empty_barriers);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            init_barrier(full + i * 8, kCopyThreads + 1);
            init_barrier(empty + i * 8, kStreamWarps);
        }
    }
    __syncthreads();
    wait_for_previous_launch();
    allow_dependent_launch();
    int const warp = static_cast<int>(threadIdx.x) / kWarpSize;
    int const lane = static_cast<int>(threadIdx.x) % kWarpSize;
    int stage = 0;
    uint32_t parity = 0;
    auto const advance = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };

    if (warp >= kStreamWarps) {
        int const thread = static_cast<int>(threadIdx.x) - kStreamWarps * kWarpSize;
        int const pieces = (params.d_out + kColumns - 1) / kColumns;
        int const num_masks = (params.d_ff + MMA_M - 1) / MMA_M;
        int work = static_cast<int>(blockIdx.x);
        while (work < params.groups.most_groups * pieces) {
            int following = 0;
            if (thread == 0) {
                following = static_cast<int>(gridDim.x) + atomicAdd(params.groups.ticket, 1);
            }
            int const number = work / pieces;
            int const first_column = (work - number * pieces) * kColumns;
            Group const group = group_of(params.groups, number);
            if (group.count == 0) {
                break;  // those that exist come first
            }
            if (thread < kWarpSize) {
                int const count = list_neurons(list, params.masks + int64_t{number} * num_masks, num_masks, lane);
                if (lane == 0) {
                    num_listed = count;
                    next_work = following;
                }
            }
            sync_copying();
            int const listed = num_listed;
            work = next_work;
            auto const* const rows = static_cast<uint16_t const*>(params.down.values) +
                                     group.expert * params.down.expert_stride + first_column;
            uint16_t const* const hidden = params.h + int64_t{number} * params.d_ff * Shape::kWidth;
            int first = 0;
            do {  // a group without active neurons has a stage of zeros
                wait_barrier(empty + stage * 8, parity ^ 1);
                uint32_t const base = ring + stage * Shape::kStageBytes;
                constexpr int kChunks = kColumns / kVector;
                static_assert(kNeurons * kChunks % kCopyThreads == 0, "all threads copy as much");
#pragma unroll
                for (int j = 0; j < kNeurons * kChunks / kCopyThreads; ++j) {
                    int const i = j * kCopyThreads + thread;
                    int const row = i / kChunks;
                    int const in_row = i % kChunks * kVector;
                    bool const exists = first + row < listed && first_column + in_row < params.d_out;
                    int const neuron = exists ? list[first + row] : 0;
                    copy_async(base + row * Shape::kPitch + in_row * 2,
                               rows + neuron * params.down.row_stride + (exists ? in_row : 0), exists);
                }
                if (thread < kNeurons * kTiles) {
                    int const row = thread / kTiles;
                    int const tile = thread % kTiles;
                    bool const exists = first + row < listed;
                    int const neuron = exists ? list[first + row] : 0;
                    copy_async(base + kNeurons * Shape::kPitch + row * Shape::kHiddenPitch + tile * kTile * 2,
                               hidden + int64_t{neuron} * Shape::kWidth + tile * kTile, exists);
                }
                first += kNeurons;
                if (thread == 0) {
                    stages[stage] = {number, first_column, group.begin, first < listed ? 0 : group.count};
                    arrive(full + stage * 8);
                }
                arrive_behind_copies(full + stage * 8);
                advance();
            } while (first < listed);
            sync_copying();  // the list is no longer read
        }
        wait_barrier(empty + stage * 8, parity ^ 1);
        if (thread == 0) {
            stages[stage] = {-1, 0, 0, 0};
        }
        arrive_behind_copies(full + stage * 8);
        if (thread == 0) {
            arrive(full + stage * 8);
        }
        return;
    }

    int const r = lane / 4;
    int const c = lane % 4;
    float sums[Shape::kProducts][kOut / 8][4] = {};
    for (;; advance()) {
        wait_barrier(full + stage * 8, parity);
        StageOf const now = stages[stage];
        if (now.group < 0) {
            return;
        }
        uint32_t const base = ring + stage * Shape::kStageBytes;
        uint32_t const hidden = base + kNeurons * Shape::kPitch;
        uint32_t a[Shape::kProducts][4];
        if constexpr (kTiles == 1) {
            uint32_t found[4];
            load_matrix_x4<true>(found, hidden + lane % 16 * Shape::kHiddenPitch);
            a[0][0] = found[0], a[0][1] = 0, a[0][2] = found[1], a[0][3] = 0;
        } else {
#pragma unroll
            for (int p = 0; p < Shape::kProducts; ++p) {
                int const neuron = lane / 16 * 8 + lane % 8;
                int const token = p * MMA_M + lane / 8 % 2 * 8;
                load_matrix_x4<true>(a[p], hidden + neuron * Shape::kHiddenPitch + token * 2);
            }
        }
        uint32_t const rows = base + lane % 16 * Shape::kPitch + (warp * kOut + lane / 16 * 8) * 2;
#pragma unroll
        for (int n = 0; n < kOut / 16; ++n) {
            uint32_t b[4];
            load_matrix_x4<true>(b, rows + n * 16 * 2);
#pragma unroll
            for (int p = 0; p < Shape::kProducts; ++p) {
                Element::mma(sums[p][2 * n], a[p], b[0], b[1]);
                Element::mma(sums[p][2 * n + 1], a[p], b[2], b[3]);
            }
        }
        __syncwarp();
        if (lane == 0) {
            arrive(empty + stage * 8);
        }
        if (now.count == 0) {
            continue;
        }
#pragma unroll
        for (int p = 0; p < Shape::kProducts; ++p) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int const token = p * MMA_M + half * 8 + r;
                if (token < now.count) {
                    int const pair = pair_of(params.groups, now.begin + token);
                    float const weight = __ldg(params.weights + pair);
                    int const first = now.column + warp * kOut + 2 * c;
                    float* const y = params.y + int64_t{pair} * params.d_out;
                    bool are_finite = true;
#pragma unroll
                    for (int j = 0; j < kOut / 8; ++j) {
                        float2 const values =
                            make_float2(sums[p][j][2 * half] * weight, sums[p][j][2 * half + 1] * weight);
                        if (first + j * 8 < params.d_out) {
                            are_finite = are_finite && isfinite(values.x) && isfinite(values.y);
                            *reinterpret_cast<float2*>(y + first + j * 8) = values;
                        }
                    }
                    if (!are_finite) {
#pragma unroll 1
                        for (int i = 0; i < kOut / 4; ++i) {
                            int const column = first + i / 2 * 8 + i % 2;
                            if (column < params.d_out && !isfinite(y[column])) {
                                uint16_t const* const h =
                                    params.h + int64_t{now.group} * params.d_ff * Shape::kWidth + token;
                                y[column] = weight * sum_of_active<Element, uint16_t>(
                                                         params, group_of(params.groups, now.group).expert, h,
                                                         Shape::kWidth, column);
                            }
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int p = 0; p < Shape::kProducts; ++p) {
#pragma unroll
            for (int j = 0; j < kOut / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[p][j][i] = 0.0f;
                }
            }
        }
    }
}

}  // namespace twell::experts

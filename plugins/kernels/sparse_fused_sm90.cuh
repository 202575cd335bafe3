// Both sparse projections in one kernel (sm_90a): the up projection waits for L2 and the down projection for shared
// memory, so they run side by side.
//
// A CTA keeps kColumns columns of Wd, a slab, in shared memory. Its warps have three roles:
//
// up     computes h as in sparse_up.cuh, share after share of all units, taken from a counter: nobody waits for a CTA
//        that has no place yet
// scout  looks which rows have all of their h, in the order of the rows, and tells the CTA how many these are
// down   follows in that order: y of this CTA's columns. A lane has a row, and a warp kInterleavedRows; or all lanes share
//        out the entries of one row that has many. Entries come through a ring.
//
// The order of a sum follows from the number of entries: results are bitwise repeatable.
#ifndef TWELL_KERNELS_SPARSE_FUSED_SM90_CUH_
#define TWELL_KERNELS_SPARSE_FUSED_SM90_CUH_

#include "dependent_launch.cuh"
#include "element.cuh"
#include "sparse_up.cuh"
#include "vector.cuh"

namespace twell::sparse_fused_sm90 {

constexpr int kUpWarps = 16;
constexpr int kFirstWarps = 8;  // of the down projection, and the scout
constexpr int kDownWarps = kFirstWarps - 1;
constexpr int kThreads = (kUpWarps + kFirstWarps) * kWarpSize;
constexpr int kNeuronsAtOnce = 4;  // of the up projection

constexpr int kColumns = 2 * kVector;
constexpr int kRows = kInterleavedRows;
static_assert(kRows == kWarpSize, "a lane has a row");

// A warp's ring: kChunks times kSteps entries for each lane.
constexpr int kSteps = 4;
constexpr int kAtOnce = 2;  // steps whose weights are read together
constexpr int kChunks = 6;
constexpr int kRingEntries = kChunks * kSteps * kWarpSize;
constexpr int kRingsBytes = kDownWarps * kRingEntries * static_cast<int>(sizeof(SparseEntry));
constexpr int kReadyBytes = 16;

// The slab: a row of zeros, for entries that are not there, then a row for each neuron. Every other four rows have
// their halves exchanged, so that any eight rows' halves may lie in different banks.
constexpr int kSlabRowBytes = kColumns * static_cast<int>(sizeof(uint16_t));
constexpr int kHalfBytes = kSlabRowBytes / 2;
__host__ __device__ constexpr int slab_bytes(int d_ff) { return (d_ff + 1) * kSlabRowBytes; }
__host__ __device__ constexpr int shared_bytes(int d_ff) { return kReadyBytes + kRingsBytes + slab_bytes(d_ff); }

// Where the first half of a slab's row is. The second is where this differs in kHalfBytes.
__device__ __forceinline__ uint32_t first_half(uint32_t slab_row) {
    return slab_row * kSlabRowBytes + (slab_row / 4 % 2) * kHalfBytes;
}

struct Params {
    sparse_up::Params up;
    uint16_t const* w_down;  // [d_ff, d_out]
    uint16_t const* b_down;  // [d_out] or null
    uint16_t* y;             // [tokens, d_out]
    int d_ff;
    int d_out;
    uint32_t tokens;
    uint32_t num_slabs;  // CTA i has slab i % num_slabs
    uint32_t num_parts;  // CTAs that share out the rows of a slab
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t load_relaxed(uint32_t const* pointer) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// By one warp of the up projection.
template <class Element>
__device__ __forceinline__ void project_up(sparse_up::Params const& params) {
    using sparse_up::Share;
    Schedule const& schedule = params.schedule;
    bool const is_first = threadIdx.x % kWarpSize == 0;
    uint32_t const num_shares = __ldcg(&schedule.header->unit_count) * sparse_up::kWarps;
    auto const take = [&]() { return is_first ? atomicAdd(&schedule.header->taken_count, 1u) : 0; };
    auto const load_share = [&](uint32_t taken) {
        uint32_t const i = __shfl_sync(0xffffffffu, taken, 0);
        Unit const unit = i < num_shares ? schedule.units[i / sparse_up::kWarps] : Unit{0, 0, 0, kNoRange};
        return Share(unit, static_cast<int>(i % sparse_up::kWarps));
    };
    // What the next shares begin with comes while this one is computed.
    uint32_t taken = take();
    uint32_t next_taken = take();
    uint32_t last_taken = take();
    Share share = load_share(taken);
    Share next = load_share(next_taken);
    uint32_t word = share.load_word(params);
    while (__shfl_sync(0xffffffffu, taken, 0) < num_shares) {
        uint32_t const next_word = next.load_word(params);
        Share const last = load_share(last_taken);
        taken = next_taken;
        next_taken = last_taken;
        last_taken = take();
        sparse_up::compute<Element, kNeuronsAtOnce>(params, share, word,
                                                    [](uint32_t word) { return first_half((word & 0xffffu) + 1); });
        __syncwarp();
        if (is_first && share.count > 0) {
            asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(schedule.remaining + share.position),
                         "r"(-share.count)
                         : "memory");
        }
        share = next;
        word = next_word;
        next = last;
    }
}

// By one warp: *ready becomes the number of rows, from the front of the order on, that have all of their h.
__device__ __forceinline__ void scout(uint32_t const* remaining, uint32_t tokens, uint32_t* ready) {
    constexpr int kLooks = 8;  // at kWarpSize rows each, at once
    uint32_t const lane = threadIdx.x % kWarpSize;
    uint32_t front = 0;
    while (front < tokens) {
        uint32_t left[kLooks];
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            uint32_t const position = front + i * kWarpSize + lane;
            left[i] = position < tokens ? load_relaxed(remaining + position) : 0;
        }
        uint32_t more = 0;
#pragma unroll
        for (int i = 0; i < kLooks; ++i) {
            uint32_t const waiting = __ballot_sync(0xffffffffu, left[i] != 0);
            more += more == i * kWarpSize ? (waiting == 0 ? kWarpSize : __ffs(waiting) - 1) : 0;
        }
        if (more == 0) {
            __nanosleep(200);
            continue;
        }
        front = min(front + more, tokens);
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            atomicExch(ready, front);
        }
    }
}

// What a warp of the down projection does, one after the other: long rows come first, alone, then groups of kRows rows.
struct Items {
    Schedule const* schedule;
    uint32_t long_begin;
    uint32_t long_end;
    uint32_t first_group;
    uint32_t count;
    uint32_t tokens;

    __device__ __forceinline__ Items(Schedule const& schedule, uint32_t tokens) : schedule(&schedule), tokens(tokens) {
        long_begin = __ldcg(&schedule.header->heavy_count);
        long_end = __ldcg(&schedule.header->long_end);
        first_group = long_end / kRows;
        count = long_end - long_begin + (tokens + kRows - 1) / kRows - first_group;
    }

    __device__ __forceinline__ bool is_long(uint32_t i) const { return i < long_end - long_begin; }

    // Where a group begins, or a long row is.
    __device__ __forceinline__ uint32_t first_position(uint32_t i) const {
        return is_long(i) ? long_begin + i : (first_group + i - (long_end - long_begin)) * kRows;
    }

    // This lane's row, or the long one. A row that is not there has no list.
    __device__ __forceinline__ RowWork load(uint32_t i) const {
        bool const alone = is_long(i);
        uint32_t const position = first_position(i) + (alone ? 0 : threadIdx.x % kRows);
        uint2 work = make_uint2(0, kNotListed);
        if (i < count && position < tokens && (alone || position >= long_end)) {
            work = *reinterpret_cast<uint2 const*>(schedule->row_order + position);
        }
        return {work.x, work.y};
    }
};

// A lane's part of an item.
struct Lane {
    int own_steps;  // its entries
    int num_steps;  // of all lanes, at most

    __device__ __forceinline__ Lane(bool alone, uint32_t count) {
        int const listed = count == kNotListed ? 0 : static_cast<int>(count);
        own_steps = alone ? (listed + kWarpSize - 1 - static_cast<int>(threadIdx.x) % kWarpSize) / kWarpSize : listed;
        num_steps = __reduce_max_sync(0xffffffffu, own_steps);
    }
};

// Brings a warp's entries into its ring, chunk after chunk, ahead of their use. A lane uses what it has asked for.
struct Reader {
    Items const& items;
    uint32_t* ready;  // shared memory
    uint32_t ring;    // shared memory, at this lane's first entry
    int max_listed;
    uint32_t item;
    uint32_t item_step;
    uint32_t next_count;
    int slot = 0;
    int left = 0;      // steps
    int own_left = 0;  // steps
    SparseEntry const* source = nullptr;

    __device__ __forceinline__ Reader(Items const& items, uint32_t* ready, uint32_t ring, int max_listed,
                                      uint32_t first_item, uint32_t item_step)
        : items(items), ready(ready), ring(ring), max_listed(max_listed), item(first_item), item_step(item_step) {
        next_count = items.load(item).count;
    }

    // Begins `item`, and makes the next one `item`.
    __device__ __forceinline__ void begin_item() {
        bool const alone = items.is_long(item);
        uint32_t const first = items.first_position(item);
        uint32_t const end = alone ? first + 1 : min(first + kRows, items.tokens);
        Lane const lane(alone, next_count);
        left = lane.num_steps;
        own_left = lane.own_steps;
        source = items.schedule->list(first, alone ? kLongNonzeros : 0, max_listed).first + threadIdx.x % kWarpSize;
        item += item_step;
        next_count = items.load(item).count;
        while (atomicAdd(ready, 0) < end) {
            __nanosleep(100);
        }
        __syncwarp();
    }

    // Asks for the next chunk, if there is one.
    __device__ __forceinline__ void read_chunk() {
        while (left <= 0 && item < items.count) {
            begin_item();
        }
        if (left > 0) {
            uint32_t const destination =
                ring + static_cast<uint32_t>(slot * kSteps * kWarpSize * static_cast<int>(sizeof(SparseEntry)));
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                bool const exists = s < own_left;
                // One that is not there becomes 0 times the row of zeros.
                asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(
                                 destination + s * kWarpSize * static_cast<int>(sizeof(SparseEntry))),
                             "l"(source + (exists ? s * kWarpSize : 0)), "r"(exists ? 8 : 0)
                             : "memory");
            }
            source += kSteps * kWarpSize;
            left -= kSteps;
            own_left -= kSteps;
        }
        slot = slot + 1 < kChunks ? slot + 1 : 0;
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
};

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 vector;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
                 : "r"(address));
    return vector;
}

// The sum over the warp of sums[i], given to lanes 2 i and 2 i + 1: half of the sums leave a lane in each step.
template <int kSums>
__device__ __forceinline__ float reduce(float const (&sums)[kSums]) {
    if constexpr (kSums == 1) {
        return sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 1);
    } else {
        constexpr int kHalf = kSums / 2;
        constexpr int kDistance = kHalf * kWarpSize / kColumns;
        bool const upper = (threadIdx.x & kDistance) != 0;
        float kept[kHalf];
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            float const low = sums[i];
            float const high = sums[i + kHalf];
            kept[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, kDistance);
        }
        return reduce(kept);
    }
}

// Adds the bias to a lane's row of y and rounds it, once.
template <class Element>
__device__ __forceinline__ void store_row(Params const& params, int64_t row, int column,
                                          float const (&sums)[kColumns]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int const first = column + half * kVector;
        if (first < params.d_out) {
            float values[kVector] = {};
            if (params.b_down != nullptr) {
                unpack<Element>(values, load_vector(params.b_down + first));
            }
#pragma unroll
            for (int k = 0; k < kVector; ++k) {
                values[k] += sums[half * kVector + k];
            }
            store_vector<Element>(params.y + row * params.d_out + first, values);
        }
    }
}

// The same for a long row, of which lanes 2 i and 2 i + 1 have column i.
template <class Element>
__device__ __forceinline__ void store_long(Params const& params, int64_t row, int column, float sum) {
    column += static_cast<int>(threadIdx.x) % kWarpSize / 2;
    if (threadIdx.x % 2 != 0 || column >= params.d_out) {
        return;
    }
    float const bias = params.b_down == nullptr ? 0.0f : Element::to_float(params.b_down[column]);
    params.y[row * params.d_out + column] = Element::from_float(sum + bias);
}

// By one warp of the down projection.
template <class Element>
__device__ __forceinline__ void project_down(Params const& params, uint32_t slab, uint32_t ring, uint32_t* ready,
                                             int warp) {
    int const column = static_cast<int>(blockIdx.x % params.num_slabs) * kColumns;
    ring += static_cast<uint32_t>(warp * kRingEntries + static_cast<int>(threadIdx.x) % kWarpSize) *
            static_cast<uint32_t>(sizeof(SparseEntry));
    Items const items(params.up.schedule, params.tokens);
    uint32_t const first_item = blockIdx.x / params.num_slabs + params.num_parts * warp;
    uint32_t const item_step = params.num_parts * kDownWarps;
    Reader reader(items, ready, ring, max_listed(params.up.num_tiles), first_item, item_step);
    RowWork next = items.load(first_item);
#pragma unroll 1
    for (int i = 0; i < kChunks; ++i) {
        reader.read_chunk();
    }
    int slot = 0;
    for (uint32_t item = first_item; item < items.count; item += item_step) {
        RowWork const work = next;
        next = items.load(item + item_step);
        bool const alone = items.is_long(item);
        int const num_steps = Lane(alone, work.count).num_steps;
        float sums[kColumns] = {};
        for (int step = 0; step < num_steps; step += kSteps) {
            asm volatile("cp.async.wait_group %0;" ::"n"(kChunks - 1) : "memory");
            uint32_t const chunk = ring + static_cast<uint32_t>(slot * kSteps * kWarpSize) *
                                              static_cast<uint32_t>(sizeof(SparseEntry));
            uint2 entries[kSteps];
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                             : "=r"(entries[s].x), "=r"(entries[s].y)
                             : "r"(chunk + s * kWarpSize * static_cast<uint32_t>(sizeof(SparseEntry)))
                             : "memory");
            }
            slot = slot + 1 < kChunks ? slot + 1 : 0;
#pragma unroll
            for (int first = 0; first < kSteps; first += kAtOnce) {
                uint4 vectors[kAtOnce][2];
#pragma unroll
                for (int s = 0; s < kAtOnce; ++s) {
                    uint32_t const place = entries[first + s].x;
                    vectors[s][0] = load_shared(slab + place);
                    vectors[s][1] = load_shared(slab + (place ^ kHalfBytes));
                }
                if (first == 0) {
                    reader.read_chunk();
                }
#pragma unroll
                for (int s = 0; s < kAtOnce; ++s) {
                    float const h = __uint_as_float(entries[first + s].y);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float w_values[kVector];
                        unpack<Element>(w_values, vectors[s][half]);
#pragma unroll
                        for (int k = 0; k < kVector; ++k) {
                            sums[half * kVector + k] = fmaf(h, w_values[k], sums[half * kVector + k]);
                        }
                    }
                }
            }
        }
        if (alone) {
            float const sum = reduce(sums);
            if (work.count != kNotListed) {
                store_long<Element>(params, work.row, column, sum);
            }
        } else if (work.count != kNotListed) {
            store_row<Element>(params, work.row, column, sums);
        }
    }
}

// By the down projection's warps and the scout: this CTA's columns of Wd. Columns that are not there become zeros.
__device__ __forceinline__ void load_slab(Params const& params, uint32_t slab, int thread) {
    int const half = thread % 2;
    int const column = static_cast<int>(blockIdx.x % params.num_slabs) * kColumns + half * kVector;
    uint16_t const* const source = params.w_down + min(column, params.d_out - kVector);
    for (int row = thread / 2; row <= params.d_ff; row += kFirstWarps * kWarpSize / 2) {
        int const bytes = row > 0 && column < params.d_out ? kHalfBytes : 0;
        uint32_t const destination =
            slab + (first_half(static_cast<uint32_t>(row)) ^ static_cast<uint32_t>(half * kHalfBytes));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination),
                     "l"(source + static_cast<int64_t>(max(row - 1, 0)) * params.d_out), "r"(bytes)
                     : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <class Element>
__global__ void __launch_bounds__(kThreads, 1) up_down_kernel(Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint4 shared[];
    uint32_t* const ready = reinterpret_cast<uint32_t*>(shared);
    uint32_t const rings = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + kReadyBytes;
    uint32_t const slab = rings + kRingsBytes;

    wait_for_previous_launch();
    allow_dependent_launch();  // NOTE: only now, as the next kernels begin with the schedule
    if (__ldcg(&params.up.schedule.header->heavy_count) == params.tokens) {
        return;
    }
    int const warp = threadIdx.x / kWarpSize;
    if (warp >= kFirstWarps) {
        project_up<Element>(params.up);
    } else {
        if (threadIdx.x == 0) {
            *ready = 0;
        }
        load_slab(params, slab, threadIdx.x);
        asm volatile("bar.sync 1, %0;" ::"n"(kFirstWarps* kWarpSize) : "memory");
        if (warp == kDownWarps) {
            scout(params.up.schedule.remaining, params.tokens, ready);
        } else {
            project_down<Element>(params, slab, rings, ready, warp);
        }
    }
#endif
}

}  // namespace twell::sparse_fused_sm90

#endif  // TWELL_KERNELS_SPARSE_FUSED_SM90_CUH_

// Attention of one token over a cache: see one_token.h.
//
// A cluster of CTAs shares the cache of one head, and computes all queries of the head's group, up to eight, as the
// rows of tensor-core products. Each warp takes tiles of 16 keys with a separate online softmax. At the end the warps
// of a CTA join their parts in shared memory, and the CTAs of a cluster theirs in each other's. All in a fixed order,
// so the same call gives the same bits.
#include <math.h>

#include <algorithm>

#include "device/cluster.cuh"
#include "device/dependent_launch.cuh"
#include "device/element.cuh"
#include "device/load.cuh"
#include "device/mbarrier.cuh"
#include "device/shared.cuh"
#include "device/tma.cuh"
#include "device/vector.cuh"
#include "device/warps.cuh"
#include "host/launch.h"
#include "one_token.h"
#include "rotate.cuh"

namespace twell {
namespace {

constexpr int kRows = 8;    // queries of a cluster
constexpr int kWarps = 8;   // of a CTA
constexpr int kSplits = 8;  // CTAs of a cluster at most
// CTAs of all clusters. Those of a cluster of more than two have to find places close together, one on each
// multiprocessor: on an H100 128 of them do not all find one at once.
constexpr int kMostCtas = 128;
constexpr int kMostCtasOfLarge = 64;
// Caches, one of a head and a sequence, up to which this is faster than cuDNN: some 2 to 4 us on an H100.
constexpr int kMostCaches = 64;
constexpr float kLog2E = 1.4426950408889634f;

struct Params {
    uint16_t const* q;          // [batch, heads, width]
    uint16_t const* keys;       // [batch, kv_heads, length, width]
    uint16_t const* values;     // likewise
    int32_t const* key_counts;  // [batch]
    uint16_t const* cosines;    // [batch, width]; or null, where queries are not rotated
    uint16_t const* sines;      // likewise
    uint16_t* y;                // as q
    int32_t length;
    int32_t kv_heads;
    int32_t group;   // heads / kv_heads
    int32_t splits;  // CTAs of a cluster
    float scale;     // of scores whose softmax is one of powers of two
};

// Groups of eight keys that a warp takes at once: as many as registers hold.
template <int WIDTH>
constexpr int kHalves = WIDTH > 128 ? 1 : 2;

template <int WIDTH>
struct Shared {
    float o[kWarps][kRows * WIDTH];
    float largest[kWarps][kRows];
    float sum[kWarps][kRows];
    // Sent by the CTAs of the cluster: their parts of this CTA's share of the result.
    float cluster_o[kRows * WIDTH];
    float cluster_largest[kSplits][kRows];
    float cluster_sum[kSplits][kRows];
    uint64_t arrived;
};

// The code of the kernel, which is empty for older architectures.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TWELL_HAS_CLUSTERS
constexpr uint32_t kAllLanes = 0xffffffffu;

// Stores in another CTA of the cluster, and lets its barrier know.
__device__ __forceinline__ void send(float* pointer, uint64_t* barrier, int cta, float value) {
    send_float(address_in_cta(shared_address(pointer), cta), value, address_in_cta(shared_address(barrier), cta));
}

// Joins the values of lanes with the same queries.
template <class Join>
__device__ __forceinline__ float over_keys(float value, Join const& join) {
#pragma unroll
    for (int distance = 4; distance < kWarpSize; distance *= 2) {
        value = join(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// The score that all exponents are relative to; 0 where all scores are -inf, so that all weights are 0.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// Element words `word` of two keys: the even (odd) elements side by side.
__device__ __forceinline__ uint32_t even_of(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x5410);
}
__device__ __forceinline__ uint32_t odd_of(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7632);
}

#endif

// blockIdx.x: CTAs of a cluster, blocks of kRows queries of a group, heads of the cache; blockIdx.y: sequences.
//
// Scores and result are computed transposed. Lane 4 g + t has of scores those of keys g and 8 + g for queries 2 t and
// 2 t + 1, and of the result eight neighbours of these queries. The order of the elements that a score sums up over is
// free, as is that of the result's rows: so fragments of keys and values are 16 bytes of memory.
template <class Element, int WIDTH>
__global__ void __launch_bounds__(32 * kWarps, 1) one_token_kernel(Params const p) {
#if defined(TWELL_HAS_CLUSTERS)
    constexpr int kPieces = (WIDTH + 31) / 32;       // of a key: four lanes' vectors
    constexpr int kValuePieces = (WIDTH + 63) / 64;  // of a value: eight lanes' vectors
    constexpr int kTile = 8 * kHalves<WIDTH>;        // keys of a warp at once
    constexpr int kCtaTile = kWarps * kTile;
    extern __shared__ __align__(16) char memory[];
    Shared<WIDTH>& shared = *reinterpret_cast<Shared<WIDTH>*>(memory);
    int const warp = threadIdx.x / kWarpSize;
    int const lane = threadIdx.x % kWarpSize;
    int const g = lane / 4;
    int const t = lane % 4;
    int const rank = static_cast<int>(cluster_rank());
    int const row_blocks = (p.group + kRows - 1) / kRows;
    int const cluster_idx = blockIdx.x / p.splits;
    int const kv_head = cluster_idx / row_blocks;
    int const row_begin = cluster_idx % row_blocks * kRows;
    int const rows = min(kRows, p.group - row_begin);
    int64_t const first_row = (int64_t{blockIdx.y} * p.kv_heads + kv_head) * p.group + row_begin;
    int64_t const cache_begin = (int64_t{blockIdx.y} * p.kv_heads + kv_head) * p.length * WIDTH;

    int const elements = rows * WIDTH;
    int const share = elements / p.splits;  // of the result, which this CTA joins
    int const sent = share + 2 * kRows;     // by each CTA to each

    allow_dependent_launch();
    uint32_t const arrived = shared_address(&shared.arrived);
    if (threadIdx.x == 0) {
        init_barrier(arrived, 1);
        publish_barriers();
        arrive_and_expect(arrived, p.splits * sent * static_cast<int>(sizeof(float)));
    }
    arrive_at_cluster();
    if (threadIdx.x == 0) {
        // Into L2, where the kernel before may still write: a prefetch does not need the final values.
        int const hint = min(max(__ldcg(p.key_counts + blockIdx.y), 0), p.length);
        int const places = min(kCtaTile, hint - rank * kCtaTile);
        if (places > 0) {
            int64_t const offset = cache_begin + int64_t{rank} * kCtaTile * WIDTH;
            prefetch_bytes(p.keys + offset, places * WIDTH * static_cast<int>(sizeof(uint16_t)));
            prefetch_bytes(p.values + offset, places * WIDTH * static_cast<int>(sizeof(uint16_t)));
        }
    }
    int const stride = p.splits * kCtaTile;
    int begin = rank * kCtaTile + warp * kTile;  // of this warp's tile
    // Where this lane's parts of it begin.
    uint16_t const* keys = p.keys + cache_begin + int64_t{begin + g} * WIDTH + 8 * t;
    uint16_t const* values = p.values + cache_begin + int64_t{begin + 2 * t} * WIDTH + 8 * g;
    wait_for_previous_launch();
    int const count = min(__ldcg(p.key_counts + blockIdx.y), p.length);

    uint4 q[kPieces];
    uint4 k[kHalves<WIDTH>][kPieces];
    uint4 v[2 * kHalves<WIDTH>][kValuePieces];
    auto const in_width = [](int column) { return WIDTH % 64 == 0 || column < WIDTH; };
    auto const load_keys = [&] {
#pragma unroll
        for (int half = 0; half < kHalves<WIDTH>; ++half) {
            bool const is_there = begin + 8 * half + g < count;
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
                k[half][i] = load_from_l2_if(keys + 8 * half * WIDTH + 32 * i, is_there && in_width(32 * i + 8 * t));
            }
        }
    };
    auto const load_values = [&] {
#pragma unroll
        for (int j = 0; j < 2 * kHalves<WIDTH>; ++j) {
            int const place = j / 2 * 8 + j % 2;
            bool const is_there = begin + place + 2 * t < count;
#pragma unroll
            for (int i = 0; i < kValuePieces; ++i) {
                v[j][i] = load_from_l2_if(values + place * WIDTH + 64 * i, is_there && in_width(64 * i + 8 * g));
            }
        }
    };
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        int const column = 32 * i + 8 * t;
        q[i] = load_from_l2_if(p.q + (first_row + g) * WIDTH + column, g < rows && in_width(column));
    }
    load_keys();
    load_values();
    if (p.cosines != nullptr) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            int const column = 32 * i + 8 * t;
            bool const is_first = column < WIDTH / 2;
            int const partner = is_first ? column + WIDTH / 2 : column - WIDTH / 2;
            bool const is_there = g < rows && in_width(column);
            int64_t const angle = int64_t{blockIdx.y} * WIDTH + column;
            q[i] = rotate<Element>(q[i], load_from_l2_if(p.q + (first_row + g) * WIDTH + partner, is_there),
                                   load_from_l2_if(p.cosines + angle, is_there),
                                   load_from_l2_if(p.sines + angle, is_there), is_first);
        }
    }

    // Of this lane's two queries: the largest score as far as it is known, and the sum over this lane's keys.
    float largest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};
    float o[kValuePieces][4][4] = {};
    while (begin < count) {
        float s[2][4] = {};  // halves of the sums
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            uint4 const upper = k[0][i];
            uint4 const lower = kHalves<WIDTH> == 2 ? k[kHalves<WIDTH> - 1][i] : uint4{};
            Element::mma(s[0], {upper.x, lower.x, upper.y, lower.y}, q[i].x, q[i].y);
            Element::mma(s[1], {upper.z, lower.z, upper.w, lower.w}, q[i].z, q[i].w);
        }
        int const place = begin + g;
        begin += stride;
        keys += int64_t{stride} * WIDTH;
        values += int64_t{stride} * WIDTH;
        load_keys();
        float weights[4];
        float shrinks[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float tile_largest = -INFINITY;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                bool const is_there = half < kHalves<WIDTH> && place + 8 * half < count;
                float const score = (s[0][2 * half + c] + s[1][2 * half + c]) * p.scale;
                weights[2 * half + c] = is_there ? score : -INFINITY;
                tile_largest = fmaxf(tile_largest, weights[2 * half + c]);
            }
            float const before = largest[c];
            largest[c] = fmaxf(before, over_keys(tile_largest, [](float a, float b) { return fmaxf(a, b); }));
            float const base = base_of(largest[c]);
            shrinks[c] = exp2f(before - base);
            sum[c] *= shrinks[c];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                weights[2 * half + c] = exp2f(weights[2 * half + c] - base);
                sum[c] += weights[2 * half + c];
            }
        }
        uint32_t const upper = transposed(Element::from_float2(weights[0], weights[1]));
        uint32_t const lower = transposed(Element::from_float2(weights[2], weights[3]));
#pragma unroll
        for (int i = 0; i < kValuePieces; ++i) {
            auto const word = [&](int j, int which) {
                if (j >= 2 * kHalves<WIDTH>) {
                    return 0u;
                }
                uint4 const& vector = v[j][i];
                return which == 0 ? vector.x : which == 1 ? vector.y : which == 2 ? vector.z : vector.w;
            };
#pragma unroll
            for (int w = 0; w < 4; ++w) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    o[i][w][c] *= shrinks[c % 2];
                }
                Element::mma(o[i][w],
                             {even_of(word(0, w), word(1, w)), odd_of(word(0, w), word(1, w)),
                              even_of(word(2, w), word(3, w)), odd_of(word(2, w), word(3, w))},
                             upper, lower);
            }
        }
        load_values();
    }

    // This warp's part.
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        sum[c] = over_keys(sum[c], [](float a, float b) { return a + b; });
        if (g == 0) {
            shared.largest[warp][2 * t + c] = largest[c];
            shared.sum[warp][2 * t + c] = sum[c];
        }
    }
#pragma unroll
    for (int i = 0; i < kValuePieces; ++i) {
        int const column = 64 * i + 8 * g;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            int const row = 2 * t + c;
            if (row < rows && column < WIDTH) {
                float4* const out = reinterpret_cast<float4*>(shared.o[warp] + row * WIDTH + column);
                out[0] = make_float4(o[i][0][c], o[i][0][c + 2], o[i][1][c], o[i][1][c + 2]);
                out[1] = make_float4(o[i][2][c], o[i][2][c + 2], o[i][3][c], o[i][3][c + 2]);
            }
        }
    }
    __syncthreads();
    wait_for_arrivals();  // the others have begun, and have their shared memory

    // The CTA's part, in shares to the CTAs of the cluster.
    auto const largest_of = [](auto const& parts, int count, int row) {
        float result = -INFINITY;
        for (int i = 0; i < count; ++i) {
            result = fmaxf(result, parts[i][row]);
        }
        return result;
    };
    for (int i = threadIdx.x; i < elements; i += blockDim.x) {
        int const row = i / WIDTH;
        float const base = base_of(largest_of(shared.largest, kWarps, row));
        float part = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            part += exp2f(shared.largest[w][row] - base) * shared.o[w][i];
        }
        int const owner = i / share;
        send(shared.cluster_o + rank * share + i - owner * share, &shared.arrived, owner, part);
    }
    for (int i = threadIdx.x; i < p.splits * kRows; i += blockDim.x) {
        int const row = i % kRows;
        float const cta_largest = largest_of(shared.largest, kWarps, row);
        float const base = base_of(cta_largest);
        float part = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            part += exp2f(shared.largest[w][row] - base) * shared.sum[w][row];
        }
        send(&shared.cluster_largest[rank][row], &shared.arrived, i / kRows, cta_largest);
        send(&shared.cluster_sum[rank][row], &shared.arrived, i / kRows, part);
    }
    wait_for_cluster(arrived, 0);

    // This CTA's share of the result.
    for (int i = threadIdx.x; i < share; i += blockDim.x) {
        int const element = rank * share + i;
        int const row = element / WIDTH;
        float const base = base_of(largest_of(shared.cluster_largest, p.splits, row));
        float part = 0.0f;
        float total = 0.0f;
        for (int cta = 0; cta < p.splits; ++cta) {
            float const weight = exp2f(shared.cluster_largest[cta][row] - base);
            part += weight * shared.cluster_o[cta * share + i];
            total += weight * shared.cluster_sum[cta][row];
        }
        p.y[first_row * WIDTH + element] = Element::from_float(part / total);
    }
#endif
}

// Returns use(kernel, bytes of shared memory, threads) for the kernel of a width, an error if there is none.
template <class Element, class Use>
cudaError_t with_width(int32_t width, Use const& use) {
    switch (width) {
#define TWELL_WIDTH(W) \
    case W:            \
        return use(one_token_kernel<Element, W>, static_cast<int>(sizeof(Shared<W>)), kWarps * kWarpSize)
        TWELL_WIDTH(64);
        TWELL_WIDTH(80);
        TWELL_WIDTH(96);
        TWELL_WIDTH(128);
        TWELL_WIDTH(256);
#undef TWELL_WIDTH
        default:
            return cudaErrorInvalidValue;
    }
}

template <class Element>
cudaError_t launch(twell_attention_problem const& problem, Params const& params, dim3 grid, Device const& device,
                   cudaStream_t stream) {
    return with_width<Element>(problem.width, [&](auto kernel, int shared_bytes, int threads) {
        return launch_dependent({"one_token"}, kernel, params, grid, threads, shared_bytes, device, stream, {}, 0,
                                static_cast<unsigned>(params.splits));
    });
}

// Clusters of a sequence.
int64_t clusters_of(twell_attention_problem const& problem) {
    int64_t const group = problem.heads / problem.kv_heads;
    return problem.kv_heads * ((group + kRows - 1) / kRows);
}

}  // namespace

bool takes_one_token(twell_attention_problem const& problem) {
    bool const has_width = with_width<Bf16>(problem.width, [](auto...) { return cudaSuccess; }) == cudaSuccess;
    if (problem.cached == 0 || problem.tokens != 1 || !has_width ||
        problem.batch * clusters_of(problem) > kMostCaches) {
        return false;
    }
    Device device = {};
    return query_device(device) == cudaSuccess && knows_dependent_launch(device);
}

cudaError_t attend_one_token(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                             cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(query_device(device));
    int64_t const clusters = clusters_of(problem);
    int splits = 1;
    while (splits < kSplits && problem.batch * clusters * splits * 2 <= (splits == 1 ? kMostCtas : kMostCtasOfLarge)) {
        splits *= 2;
    }
    Params params = {};
    params.q = static_cast<uint16_t const*>(tensors.q);
    params.keys = static_cast<uint16_t const*>(tensors.k);
    params.values = static_cast<uint16_t const*>(tensors.v);
    params.key_counts = tensors.lengths;
    if (problem.rotated == 1) {
        params.cosines = static_cast<uint16_t const*>(tensors.cosines);
        params.sines = static_cast<uint16_t const*>(tensors.sines);
    }
    params.y = static_cast<uint16_t*>(tensors.y);
    params.length = static_cast<int32_t>(problem.keys);
    params.kv_heads = problem.kv_heads;
    params.group = problem.heads / problem.kv_heads;
    params.splits = splits;
    params.scale = problem.scale * kLog2E;
    dim3 const grid(static_cast<unsigned>(clusters * splits), static_cast<unsigned>(problem.batch));
    return problem.dtype == TWELL_FP16 ? launch<Fp16>(problem, params, grid, device, stream)
                                       : launch<Bf16>(problem, params, grid, device, stream);
}

}  // namespace twell

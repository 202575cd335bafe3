// Attention over a cache: see over_caches.h.
//
// A cluster of CTAs shares the cache of one head, and computes up to eight queries of the head's group, those of a
// token and then those of the next, as the rows of tensor-core products. Each warp takes tiles of 16 keys with a
// separate online softmax. At the end the warps of a CTA join their parts in shared memory, and the CTAs of a cluster
// theirs in each other's. All in a fixed order, so the same call gives the same bits.
//
// Keys and values in FP8 become elements in registers, with their scales left out: that of the keys is in the scale of
// the scores, and results are multiplied by that of the values.
#include <math.h>

#include <algorithm>
#include <type_traits>

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
#include "over_caches.h"
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
// Caches of 16 bits, one of a head and a sequence, up to which this is faster than cuDNN: some 2 to 4 us on an H100.
constexpr int kMostCaches = 64;
constexpr float kLog2E = 1.4426950408889634f;

// Stored: of caches, uint16_t for elements, or E4m3.
template <class Stored>
struct Params {
    uint16_t const* q;            // [batch, tokens, heads, width]
    Stored const* keys;           // [batch, kv_heads, length, width]
    Stored const* values;         // likewise
    int32_t const* query_counts;  // [batch]
    int32_t const* key_counts;    // [batch]
    uint16_t const* cosines;      // [batch, tokens, width]; or null, where queries are not rotated
    uint16_t const* sines;        // likewise
    uint16_t* y;                  // as q
    int32_t tokens;
    int32_t length;
    int32_t kv_heads;
    int32_t group;      // heads / kv_heads
    int32_t splits;     // CTAs of a cluster
    float scale;        // of scores whose softmax is one of powers of two
    float value_scale;  // of values in FP8
};

template <class Stored>
constexpr bool kIsFp8 = sizeof(Stored) == 1;

// Groups of eight keys that a warp takes at once: as many as registers hold.
template <int WIDTH>
constexpr int kHalves = WIDTH > 128 ? 1 : 2;

// CTAs of a multiprocessor: in FP8 it takes two to have as many bytes on the way.
template <class Stored, int WIDTH>
constexpr int kCtas = kIsFp8<Stored> && WIDTH <= 128 ? 2 : 1;

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

// Two neighbours of fp16 as elements, which are exact.
template <class Element>
__device__ __forceinline__ uint32_t element_pair(uint32_t fp16_pair) {
    if constexpr (std::is_same_v<Element, Fp16>) {
        return fp16_pair;
    } else {
        float2 const values = Fp16::to_float2(fp16_pair);
        return Element::from_float2(values.x, values.y);
    }
}

// Of two values pair `index` of eight elements each: the first elements side by side, and the second ones.
template <class Element>
__device__ __forceinline__ uint2 side_by_side(uint4 first, uint4 second, int index) {
    auto const word = [index](uint4 vector) {
        return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
    };
    return make_uint2(__byte_perm(word(first), word(second), 0x5410), __byte_perm(word(first), word(second), 0x7632));
}
template <class Element>
__device__ __forceinline__ uint2 side_by_side(uint2 first, uint2 second, int index) {
    uint32_t const bytes = index < 2 ? __byte_perm(first.x, second.x, index == 0 ? 0x5140 : 0x7362)
                                     : __byte_perm(first.y, second.y, index == 2 ? 0x5140 : 0x7362);
    return make_uint2(element_pair<Element>(e4m3_to_fp16_pair(bytes)),
                      element_pair<Element>(e4m3_to_fp16_pair(bytes >> 16)));
}

// As load_from_l2_if.
__device__ __forceinline__ uint2 load_half_from_l2_if(E4m3 const* pointer, bool exists) {
    uint2 words;
    asm volatile(
        "{\n"
        ".reg .pred exists;\n"
        "setp.ne.s32 exists, %3, 0;\n"
        "mov.b32 %0, 0;\n"
        "mov.b32 %1, 0;\n"
        "@exists ld.global.cg.v2.u32 {%0, %1}, [%2];\n"
        "}\n"
        : "=&r"(words.x), "=&r"(words.y)
        : "l"(pointer), "r"(static_cast<int>(exists)));
    return words;
}

// Vectors of eight elements.
__device__ __forceinline__ uint4 load_value_if(uint16_t const* pointer, bool exists) {
    return load_from_l2_if(pointer, exists);
}
__device__ __forceinline__ uint2 load_value_if(E4m3 const* pointer, bool exists) {
    return load_half_from_l2_if(pointer, exists);
}

#endif

// The parts of a key, or of a query, that a lane of a group of four has: `kPieces` of eight elements each, which it
// loads as vectors of 16 bytes.
template <class Stored, int WIDTH>
struct KeyParts {
    static constexpr int kPiecesOfVector = kIsFp8<Stored> ? 2 : 1;
    static constexpr int kColumns = 4 * kPiecesOfVector * kVector;  // of the group's vectors
    static constexpr int kVectors = (WIDTH + kColumns - 1) / kColumns;
    static constexpr int kPieces = kVectors * kPiecesOfVector;
    static __device__ __forceinline__ int column(int vector, int lane) {
        return kColumns * vector + kPiecesOfVector * kVector * lane;
    }
    static __device__ __forceinline__ int column_of_piece(int piece, int lane) {
        return column(piece / kPiecesOfVector, lane) + piece % kPiecesOfVector * kVector;
    }
    // A piece as elements.
    template <class Element>
    static __device__ __forceinline__ uint4 piece(uint4 const (&vectors)[kVectors], int index) {
        uint4 const vector = vectors[index / kPiecesOfVector];
        if constexpr (kIsFp8<Stored>) {
            return as_elements<Element>(index % 2 == 0 ? make_uint2(vector.x, vector.y)
                                                       : make_uint2(vector.z, vector.w));
        } else {
            return vector;
        }
    }
};

// blockIdx.x: CTAs of a cluster, blocks of kRows queries of a group and of tokens, heads of the cache; blockIdx.y:
// sequences. Caches of 16 bits come with one token a sequence.
//
// Scores and result are computed transposed. Lane 4 g + t has of scores those of keys g and 8 + g for queries 2 t and
// 2 t + 1, and of the result eight neighbours of these queries. The order of the elements that a score sums up over is
// free, as is that of the result's rows: so fragments of keys and values are neighbours in memory, 16 bytes, or 8 of
// values in FP8.
template <class Element, class Stored, int WIDTH>
__global__ void __launch_bounds__(32 * kWarps, kCtas<Stored, WIDTH>) over_caches_kernel(Params<Stored> const p) {
#if defined(TWELL_HAS_CLUSTERS)
    using Parts = KeyParts<Stored, WIDTH>;
    constexpr bool kOneToken = !kIsFp8<Stored>;
    constexpr int kPieces = Parts::kPieces;
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
    int const tokens = kOneToken ? 1 : p.tokens;
    int const row_blocks = (tokens * p.group + kRows - 1) / kRows;
    int const cluster_idx = blockIdx.x / p.splits;
    int const kv_head = cluster_idx / row_blocks;
    int const row_begin = cluster_idx % row_blocks * kRows;
    int const rows = min(kRows, tokens * p.group - row_begin);
    auto const token_of = [&](int row) { return kOneToken ? 0 : (row_begin + row) / p.group; };
    // Where a row begins in q and y.
    auto const offset_of = [&](int row) {
        int const token = token_of(row);
        int64_t const heads = (int64_t{blockIdx.y} * tokens + token) * p.kv_heads + kv_head;
        return (heads * p.group + row_begin + row - token * p.group) * WIDTH;
    };
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
            prefetch_bytes(p.keys + offset, places * WIDTH * static_cast<int>(sizeof(Stored)));
            prefetch_bytes(p.values + offset, places * WIDTH * static_cast<int>(sizeof(Stored)));
        }
    }
    int const stride = p.splits * kCtaTile;
    int begin = rank * kCtaTile + warp * kTile;  // of this warp's tile
    // Where this lane's parts of it begin.
    Stored const* keys = p.keys + cache_begin + int64_t{begin + g} * WIDTH + Parts::column(0, t);
    Stored const* values = p.values + cache_begin + int64_t{begin + 2 * t} * WIDTH + 8 * g;
    wait_for_previous_launch();
    int const known = min(__ldcg(p.key_counts + blockIdx.y), p.length);
    int const queries = kOneToken ? 1 : __ldcg(p.query_counts + blockIdx.y);
    // How many keys a row sees; none behind the last query.
    auto const seen_by = [&](int row) {
        int const token = token_of(row);
        return token < queries ? known - queries + token + 1 : 0;
    };
    // As many as any row of this cluster.
    int const count = kOneToken               ? known
                      : token_of(0) < queries ? known - queries + min(token_of(rows - 1), queries - 1) + 1
                                              : 0;

    uint4 q[kPieces];
    uint4 k[kHalves<WIDTH>][Parts::kVectors];
    Vector<Stored> v[2 * kHalves<WIDTH>][kValuePieces];
    auto const in_width = [](int column) { return WIDTH % 64 == 0 || column < WIDTH; };
    auto const load_keys = [&] {
#pragma unroll
        for (int half = 0; half < kHalves<WIDTH>; ++half) {
            bool const is_there = begin + 8 * half + g < count;
#pragma unroll
            for (int i = 0; i < Parts::kVectors; ++i) {
                Stored const* const pointer = keys + 8 * half * WIDTH + Parts::kColumns * i;
                k[half][i] = load_from_l2_if(reinterpret_cast<uint16_t const*>(pointer),
                                             is_there && in_width(Parts::column(i, t)));
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
                v[j][i] = load_value_if(values + place * WIDTH + 64 * i, is_there && in_width(64 * i + 8 * g));
            }
        }
    };
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        int const column = Parts::column_of_piece(i, t);
        q[i] = load_from_l2_if(p.q + offset_of(g) + column, g < rows && in_width(column));
    }
    load_keys();
    load_values();
    if (p.cosines != nullptr) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            int const column = Parts::column_of_piece(i, t);
            bool const is_first = column < WIDTH / 2;
            int const partner = is_first ? column + WIDTH / 2 : column - WIDTH / 2;
            bool const is_there = g < rows && in_width(column);
            int64_t const angle = (int64_t{blockIdx.y} * tokens + token_of(g)) * WIDTH + column;
            q[i] = rotate<Element>(q[i], load_from_l2_if(p.q + offset_of(g) + partner, is_there),
                                   load_from_l2_if(p.cosines + angle, is_there),
                                   load_from_l2_if(p.sines + angle, is_there), is_first);
        }
    }

    // Of this lane's two queries: the largest score as far as it is known, and the sum over this lane's keys.
    float largest[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};
    float o[kValuePieces][4][4] = {};
    int const seen[2] = {kOneToken ? count : seen_by(2 * t), kOneToken ? count : seen_by(2 * t + 1)};
    while (begin < count) {
        float s[2][4] = {};  // halves of the sums
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            uint4 const upper = Parts::template piece<Element>(k[0], i);
            uint4 const lower =
                kHalves<WIDTH> == 2 ? Parts::template piece<Element>(k[kHalves<WIDTH> - 1], i) : uint4{};
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
                bool const is_there = half < kHalves<WIDTH> && place + 8 * half < seen[c];
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
            auto const pairs_of = [&](int j, int which) {
                return j < 2 * kHalves<WIDTH> ? side_by_side<Element>(v[j][i], v[j + 1][i], which) : uint2{};
            };
#pragma unroll
            for (int w = 0; w < 4; ++w) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    o[i][w][c] *= shrinks[c % 2];
                }
                uint2 const first = pairs_of(0, w);
                uint2 const second = pairs_of(2, w);
                Element::mma(o[i][w], {first.x, first.y, second.x, second.y}, upper, lower);
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
        bool const is_padding = !kOneToken && token_of(row) >= queries;
        p.y[offset_of(row) + element - row * WIDTH] =
            Element::from_float(is_padding ? 0.0f : part / total * p.value_scale);
    }
#endif
}

// Returns use(kernel, bytes of shared memory, threads) for the kernel of a width, an error if there is none.
template <class Element, class Stored, class Use>
cudaError_t with_width(int32_t width, Use const& use) {
    switch (width) {
#define TWELL_WIDTH(W) \
    case W:            \
        return use(over_caches_kernel<Element, Stored, W>, static_cast<int>(sizeof(Shared<W>)), kWarps * kWarpSize)
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

// Clusters of a sequence.
int64_t clusters_of(twell_attention_problem const& problem) {
    int64_t const rows = problem.tokens * (problem.heads / problem.kv_heads);
    return problem.kv_heads * ((rows + kRows - 1) / kRows);
}

template <class Element, class Stored>
cudaError_t launch(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                   cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(query_device(device));
    int64_t const clusters = clusters_of(problem);
    int splits = 1;
    while (splits < kSplits && problem.batch * clusters * splits * 2 <= (splits == 1 ? kMostCtas : kMostCtasOfLarge)) {
        splits *= 2;
    }
    Params<Stored> params = {};
    params.q = static_cast<uint16_t const*>(tensors.q);
    params.keys = static_cast<Stored const*>(tensors.k);
    params.values = static_cast<Stored const*>(tensors.v);
    params.query_counts = tensors.query_lengths;
    params.key_counts = tensors.lengths;
    if (problem.rotated == 1) {
        params.cosines = static_cast<uint16_t const*>(tensors.cosines);
        params.sines = static_cast<uint16_t const*>(tensors.sines);
    }
    params.y = static_cast<uint16_t*>(tensors.y);
    params.tokens = static_cast<int32_t>(problem.tokens);
    params.length = static_cast<int32_t>(problem.keys);
    params.kv_heads = problem.kv_heads;
    params.group = problem.heads / problem.kv_heads;
    params.splits = splits;
    params.scale = problem.scale * kLog2E * (kIsFp8<Stored> ? problem.key_scale : 1.0f);
    params.value_scale = kIsFp8<Stored> ? problem.value_scale : 1.0f;
    dim3 const grid(static_cast<unsigned>(clusters * splits), static_cast<unsigned>(problem.batch));
    return with_width<Element, Stored>(problem.width, [&](auto kernel, int shared_bytes, int threads) {
        return launch_dependent({"over_caches"}, kernel, params, grid, threads, shared_bytes, device, stream, {}, 0,
                                static_cast<unsigned>(splits));
    });
}

template <class Element>
cudaError_t launch_stored(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                          cudaStream_t stream) {
    return problem.fp8 == 1 ? launch<Element, E4m3>(problem, tensors, stream)
                            : launch<Element, uint16_t>(problem, tensors, stream);
}

}  // namespace

bool knows_width(int32_t width) {
    return with_width<Bf16, E4m3>(width, [](auto...) { return cudaSuccess; }) == cudaSuccess;
}

bool takes_caches(twell_attention_problem const& problem) {
    constexpr int64_t kMostSequences = 65535;        // in a grid
    constexpr int64_t kMostRows = int64_t{1} << 30;  // a token and a head each
    if (problem.cached == 0 || !knows_width(problem.width)) {
        return false;
    }
    bool const fits = problem.fp8 == 1 ? problem.batch <= kMostSequences && problem.tokens * problem.heads <= kMostRows
                                       : problem.tokens == 1 && problem.batch * clusters_of(problem) <= kMostCaches;
    Device device = {};
    return fits && query_device(device) == cudaSuccess && knows_dependent_launch(device);
}

cudaError_t attend_over_caches(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                               cudaStream_t stream) {
    return problem.dtype == TWELL_FP16 ? launch_stored<Fp16>(problem, tensors, stream)
                                       : launch_stored<Bf16>(problem, tensors, stream);
}

}  // namespace twell

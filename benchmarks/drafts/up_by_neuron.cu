#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <vector>
#include "sparse_down.cuh"
#include "sparse_up.cuh"
using namespace twell;
#define CK(x) do{cudaError_t e=(x);if(e!=cudaSuccess){printf("CUDA %s at %d\n",cudaGetErrorString(e),__LINE__);exit(1);}}while(0)

struct DP {
    uint16_t const* w_down; uint16_t* y; RowWork const* order; unsigned char* lists; int64_t stride; int d_out; uint32_t tokens; int slabs;
};
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t s) { return __byte_perm(a, b, s); }
__device__ __forceinline__ uint4 ldw(uint16_t const* p) { return load_vector(p); }
__device__ __forceinline__ uint4 ldcg4(void const* p) { return __ldcg(reinterpret_cast<uint4 const*>(p)); }

// kGroups groups of 16 entries in flight
template <int kWarps, int kGroups, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) down64(DP const p) {
    __shared__ uint32_t next_place;
    int const lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
    if (threadIdx.x == 0) next_place = 0;
    __syncthreads();
    uint32_t const slab = blockIdx.x % p.slabs, part = blockIdx.x / p.slabs, parts = gridDim.x / p.slabs;
    if (part >= parts) return;
    uint16_t const* const w = p.w_down + slab * 64 + g * 8;
    uint32_t const sel = g == 1 ? 0x5410 : 0x7632;
    auto take = [&]() {
        uint32_t i = 0;
        if (lane == 0) i = atomicAdd(&next_place, 1u);
        i = __shfl_sync(~0u, i, 0);
        return i * parts + part;
    };
    auto fetch = [&](uint32_t place) {
        RowWork r{0, 0};
        if (place < p.tokens) { uint2 v = __ldcg(reinterpret_cast<uint2 const*>(p.order + place)); r.row = v.x; r.count = v.y; }
        return r;
    };
    uint4 e[kGroups][2];
    auto entries = [&](RowWork r, int base) {
        unsigned char const* l = p.lists + static_cast<int64_t>(r.row) * p.stride;
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
            if (base + 16 * k < static_cast<int>(r.count)) {
                e[k][0] = ldcg4(l + (base + 16 * k + 4 * q) * 8);
                e[k][1] = ldcg4(l + (base + 16 * k + 4 * q) * 8 + 16);
            }
        }
    };
    uint32_t place = take();
    RowWork work = fetch(place);
    entries(work, 0);
    uint32_t place1 = take();
    RowWork work1 = fetch(place1);
    while (place < p.tokens) {
        uint32_t const place2 = take();
        RowWork const work2 = fetch(place2);
        float acc[4][4] = {};
        int const count = work.count;
        for (int base = 0; base < count; base += 16 * kGroups) {
            uint4 v[kGroups][4];
            uint32_t b[kGroups][2];
#pragma unroll
            for (int k = 0; k < kGroups; ++k) {
                if (base + 16 * k < count) {
                    v[k][0] = ldw(w + static_cast<int64_t>(e[k][0].x & 0xffffu) * p.d_out);
                    v[k][1] = ldw(w + static_cast<int64_t>(e[k][0].z & 0xffffu) * p.d_out);
                    v[k][2] = ldw(w + static_cast<int64_t>(e[k][1].x & 0xffffu) * p.d_out);
                    v[k][3] = ldw(w + static_cast<int64_t>(e[k][1].z & 0xffffu) * p.d_out);
                    b[k][0] = prmt(g == 0 ? e[k][0].x : e[k][0].y, g == 0 ? e[k][0].z : e[k][0].w, sel);
                    b[k][1] = prmt(g == 0 ? e[k][1].x : e[k][1].y, g == 0 ? e[k][1].z : e[k][1].w, sel);
                }
            }
            bool const last = base + 16 * kGroups >= count;
            entries(last ? work1 : work, last ? 0 : base + 16 * kGroups);
#pragma unroll
            for (int k = 0; k < kGroups; ++k) {
                if (base + 16 * k < count) {
                    uint32_t const m[4][4] = {{v[k][0].x, v[k][0].y, v[k][0].z, v[k][0].w}, {v[k][1].x, v[k][1].y, v[k][1].z, v[k][1].w},
                                              {v[k][2].x, v[k][2].y, v[k][2].z, v[k][2].w}, {v[k][3].x, v[k][3].y, v[k][3].z, v[k][3].w}};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        uint32_t const a[4] = {prmt(m[0][j], m[1][j], 0x5410), prmt(m[0][j], m[1][j], 0x7632),
                                               prmt(m[2][j], m[3][j], 0x5410), prmt(m[2][j], m[3][j], 0x7632)};
                        Bf16::mma(acc[j], a, b[k][0], b[k][1]);
                    }
                }
            }
        }
        if (count == 0) entries(work1, 0);
        uint32_t out[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float const t0 = __shfl_down_sync(~0u, acc[j][0], 1), t1 = __shfl_down_sync(~0u, acc[j][2], 1);
            out[j] = Bf16::from_float2(acc[j][0] + acc[j][1] + t0, acc[j][2] + acc[j][3] + t1);
        }
        if (q == 0) {
            *reinterpret_cast<uint4*>(p.y + static_cast<int64_t>(work.row) * p.d_out + slab * 64 + g * 8) = make_uint4(out[0], out[1], out[2], out[3]);
        }
        place = place1; work = work1; place1 = place2; work1 = work2;
    }
}



__device__ __forceinline__ uint4 ldp(char const* p) { return load_vector(reinterpret_cast<uint16_t const*>(p)); }
__device__ __forceinline__ uint4 ldp_if(char const* p, bool wanted) {
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((int)wanted));
    return v;
}
__device__ __forceinline__ void fma8(float (&acc)[8], float h, uint4 v) {
    float f[8];
    unpack<Bf16>(f, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = fmaf(h, f[i], acc[i]);
}
template <int kLanes, int kWarps, int kSub, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) downg(DP const p) {
    constexpr int kRows = 32 / kLanes, kPiece = 2 * kRows, kBatch = kPiece * kSub;
    int const lane = threadIdx.x % 32, o = lane % kLanes, r = lane / kLanes;
    uint32_t const slab = blockIdx.x % p.slabs, part = blockIdx.x / p.slabs, parts = gridDim.x / p.slabs;
    if (part >= parts) return;
    uint32_t const row_bytes = p.d_out * 2, list_bytes = p.stride;
    char const* const w = reinterpret_cast<char const*>(p.w_down) + (slab * (kLanes * 8) + o * 8) * 2;
    char const* const lists = reinterpret_cast<char const*>(p.lists) + r * 16;
    uint32_t const step = parts * kWarps;
    uint32_t place = part + parts * (threadIdx.x / 32);
    auto fetch = [&](uint32_t at) { return at < p.tokens ? __ldcg(reinterpret_cast<uint2 const*>(p.order + at)) : make_uint2(0, 0); };
    uint4 e[kSub];
    auto entries = [&](char const* list, int count) {
#pragma unroll
        for (int t = 0; t < kSub; ++t) if (kPiece * t < count) e[t] = ldcg4(list + kPiece * t * 8);
    };
    uint2 work = fetch(place), work1 = fetch(place + step);
    char const* list = lists + static_cast<uint64_t>(work.x) * list_bytes;
    entries(list, work.y);
    while (place < p.tokens) {
        uint2 const work2 = fetch(place + 2 * step);
        char const* const list1 = lists + static_cast<uint64_t>(work1.x) * list_bytes;
        float acc[8] = {};
        int left = work.y;
        for (; left > kBatch; left -= kBatch) {
            uint4 v[kSub][2];
            float h[kSub][2];
#pragma unroll
            for (int t = 0; t < kSub; ++t) {
                v[t][0] = ldp(w + static_cast<uint64_t>(e[t].x) * row_bytes);
                v[t][1] = ldp(w + static_cast<uint64_t>(e[t].z) * row_bytes);
                h[t][0] = __uint_as_float(e[t].y); h[t][1] = __uint_as_float(e[t].w);
            }
            list += kBatch * 8;
            entries(list, left - kBatch);
#pragma unroll
            for (int t = 0; t < kSub; ++t) { fma8(acc, h[t][0], v[t][0]); fma8(acc, h[t][1], v[t][1]); }
        }
        {
            uint4 v[kSub][2];
            float h[kSub][2];
#pragma unroll
            for (int t = 0; t < kSub; ++t) {
                if (kPiece * t < left) {
                    bool const p0 = kPiece * t + 2 * r < left, p1 = kPiece * t + 2 * r + 1 < left;
                    v[t][0] = ldp_if(w + static_cast<uint64_t>(e[t].x) * row_bytes, p0);
                    v[t][1] = ldp_if(w + static_cast<uint64_t>(e[t].z) * row_bytes, p1);
                    h[t][0] = __uint_as_float(e[t].y); h[t][1] = __uint_as_float(e[t].w);
                }
            }
            list = list1;
            entries(list, work1.y);
#pragma unroll
            for (int t = 0; t < kSub; ++t) if (kPiece * t < left) { fma8(acc, h[t][0], v[t][0]); fma8(acc, h[t][1], v[t][1]); }
        }
        char* const at = reinterpret_cast<char*>(p.y) + static_cast<uint64_t>(work.x) * row_bytes + (slab * (kLanes * 8) + o * 8) * 2;
        bool const up1 = lane & 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = (up1 ? acc[i + 4] : acc[i]) + __shfl_xor_sync(~0u, up1 ? acc[i] : acc[i + 4], 16);
        if (kLanes == 16) {
            *reinterpret_cast<uint2*>(at + (up1 ? 8 : 0)) = make_uint2(Bf16::from_float2(acc[0], acc[1]), Bf16::from_float2(acc[2], acc[3]));
        } else {
            bool const up2 = lane & 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) acc[i] = (up2 ? acc[i + 2] : acc[i]) + __shfl_xor_sync(~0u, up2 ? acc[i] : acc[i + 2], 8);
            *reinterpret_cast<uint32_t*>(at + (up1 ? 8 : 0) + (up2 ? 4 : 0)) = Bf16::from_float2(acc[0], acc[1]);
        }
        place += step; work = work1; work1 = work2;
    }
}

struct U7 { uint16_t const* x; uint16_t const* w_up; RowWork const* order; uint32_t const* words; int max_listed; unsigned char* lists; uint32_t list_bytes; uint32_t row_bytes; uint32_t first, places, groups, kparts; int max_rows, cap, buckets; };
constexpr int kBucketShift = 4;
__device__ __forceinline__ void cp16(uint32_t dst, void const* src) { asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src)); }
template <int kWarps, int kSets>
__global__ void __launch_bounds__(kWarps * 32, 1) up7(U7 const p) {
    extern __shared__ __align__(128) unsigned char smem[];
    constexpr int kThreads = kWarps * 32;
    unsigned char* const x_s = smem;                                             // [max_rows][512]
    uint32_t* const pairs = reinterpret_cast<uint32_t*>(x_s + p.max_rows * 512);  // [cap]
    uint2* const rows = reinterpret_cast<uint2*>(pairs + p.cap);                  // [max_rows]
    uint32_t* const hist = reinterpret_cast<uint32_t*>(rows + p.max_rows);        // [buckets]
    __shared__ uint32_t warp_sums[32];
    __shared__ uint32_t total_s;
    int const tid = threadIdx.x, lane = tid % 32, warp = tid / 32, q = lane % 4, g = lane / 4;
    for (uint32_t task = blockIdx.x; task < p.groups * p.kparts; task += gridDim.x) {
        uint32_t const kp = task / p.groups, group = task % p.groups;
        int const n_rows = (p.places - group + p.groups - 1) / p.groups;
        __syncthreads();
        for (int i = tid; i < n_rows; i += kThreads) rows[i] = __ldcg(reinterpret_cast<uint2 const*>(p.order + p.first + group + i * p.groups));
        for (int i = tid; i < p.buckets; i += kThreads) hist[i] = 0;
        __syncthreads();
        char const* const x = reinterpret_cast<char const*>(p.x) + kp * 512 + lane * 16;
        for (int i = warp; i < n_rows; i += kWarps) {
            cp16(__cvta_generic_to_shared(x_s + i * 512 + lane * 16), x + static_cast<uint64_t>(rows[i].x) * p.row_bytes);
        }
        asm volatile("cp.async.commit_group;");
        constexpr int kR = 4;
        for (int i0 = warp; i0 < n_rows; i0 += kWarps * kR) {
            uint32_t word[kR];
            uint2 r[kR];
#pragma unroll
            for (int k = 0; k < kR; ++k) {
                int const i = i0 + k * kWarps;
                r[k] = i < n_rows ? rows[i] : make_uint2(0, 0);
                word[k] = lane < r[k].y ? __ldg(p.words + static_cast<int64_t>(r[k].x) * p.max_listed + lane) : 0;
            }
#pragma unroll
            for (int k = 0; k < kR; ++k) {
                if (lane < r[k].y) atomicAdd(hist + ((word[k] & 0xffffu) >> kBucketShift), 1u);
                for (uint32_t e = lane + 32; e < r[k].y; e += 32) {
                    uint32_t const w = __ldg(p.words + static_cast<int64_t>(r[k].x) * p.max_listed + e);
                    atomicAdd(hist + ((w & 0xffffu) >> kBucketShift), 1u);
                }
            }
        }
        __syncthreads();
        {   // exclusive scan of <= 4 * kThreads buckets
            uint32_t v[4], own = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) { int const b = tid * 4 + i; v[i] = own; own += b < p.buckets ? hist[b] : 0; }
            uint32_t sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) { uint32_t const t = __shfl_up_sync(~0u, sum, d); sum += lane >= d ? t : 0; }
            if (lane == 31) warp_sums[warp] = sum;
            __syncthreads();
            uint32_t const ws = lane < kWarps ? warp_sums[lane] : 0;
            uint32_t const before = __reduce_add_sync(~0u, lane < warp ? ws : 0);
            if (warp == 0) { uint32_t const all = __reduce_add_sync(~0u, ws); if (lane == 0) total_s = all; }
#pragma unroll
            for (int i = 0; i < 4; ++i) { int const b = tid * 4 + i; if (b < p.buckets) hist[b] = before + sum - own + v[i]; }
        }
        __syncthreads();
        for (int i0 = warp; i0 < n_rows; i0 += kWarps * kR) {
            uint32_t word[kR];
            uint2 r[kR];
#pragma unroll
            for (int k = 0; k < kR; ++k) {
                int const i = i0 + k * kWarps;
                r[k] = i < n_rows ? rows[i] : make_uint2(0, 0);
                word[k] = lane < r[k].y ? __ldg(p.words + static_cast<int64_t>(r[k].x) * p.max_listed + lane) : 0;
            }
#pragma unroll
            for (int k = 0; k < kR; ++k) {
                uint32_t const i = i0 + k * kWarps;
                if (lane < r[k].y) pairs[atomicAdd(hist + ((word[k] & 0xffffu) >> kBucketShift), 1u)] = (word[k] & 0xffffu) | i << 16 | lane << 24;
                for (uint32_t e = lane + 32; e < r[k].y; e += 32) {
                    uint32_t const w = __ldg(p.words + static_cast<int64_t>(r[k].x) * p.max_listed + e);
                    pairs[atomicAdd(hist + ((w & 0xffffu) >> kBucketShift), 1u)] = (w & 0xffffu) | i << 16 | e << 24;
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();
        int const total = total_s;
        int const half = (g & 1) * 64 + q * 16;
        char const* const w = reinterpret_cast<char const*>(p.w_up) + kp * 512 + half;
        for (int base = warp * 4 * kSets; base < total; base += kWarps * 4 * kSets) {
            uint32_t pair[kSets];
            uint4 v[kSets][4];
#pragma unroll
            for (int s = 0; s < kSets; ++s) {
                pair[s] = pairs[min(base + 4 * s + (g >> 1), total - 1)];
                char const* const row = w + static_cast<uint64_t>(pair[s] & 0xffffu) * p.row_bytes;
#pragma unroll
                for (int k = 0; k < 4; ++k) v[s][k] = ldp(row + k * 128);
            }
#pragma unroll
            for (int s = 0; s < kSets; ++s) {
                float d[4] = {};
                uint32_t const token = pair[s] >> 16 & 0xff;
                uint4 const* const xs = reinterpret_cast<uint4 const*>(x_s + token * 512 + half);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    uint4 const xv = xs[k * 8];
                    uint32_t const a0[4] = {v[s][k].x, 0, v[s][k].y, 0}, a1[4] = {v[s][k].z, 0, v[s][k].w, 0};
                    Bf16::mma(d, a0, xv.x, xv.y);
                    Bf16::mma(d, a1, xv.z, xv.w);
                }
                float sum = g & 1 ? d[1] : d[0];
                sum += __shfl_xor_sync(~0u, sum, 4);
                if (2 * q == g && base + 4 * s + (g >> 1) < total) {
                    uint2 const r = rows[token];
                    reinterpret_cast<float*>(p.lists + static_cast<uint64_t>(r.x) * p.list_bytes + r.y * 8)[kp * r.y + (pair[s] >> 24)] = sum;
                }
            }
        }
    }
}
struct R7 { RowWork const* order; uint32_t const* words; int max_listed; unsigned char* lists; uint32_t list_bytes; uint32_t first, places, kparts; };
__global__ void __launch_bounds__(256) reduce7(R7 const p) {
    uint32_t const i = blockIdx.x * 8 + threadIdx.x / 32; int const lane = threadIdx.x % 32;
    if (i >= p.places) return;
    RowWork const r = p.order[p.first + i];
    unsigned char* const list = p.lists + static_cast<uint64_t>(r.row) * p.list_bytes;
    float const* const partial = reinterpret_cast<float const*>(list + r.count * 8);
    for (uint32_t e = lane; e < r.count; e += 32) {
        uint32_t const word = p.words[static_cast<int64_t>(r.row) * p.max_listed + e];
        float s = 0;
        for (uint32_t k = 0; k < p.kparts; ++k) s += __ldcg(partial + k * r.count + e);
        reinterpret_cast<uint2*>(list)[e] = make_uint2(word & 0xffffu, __float_as_uint(s * Bf16::to_float(word >> 16)));
    }
}
static uint16_t bf(float f) { uint32_t u; memcpy(&u, &f, 4); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
static float fb(uint16_t b) { uint32_t u = uint32_t(b) << 16; float f; memcpy(&f, &u, 4); return f; }

int main(int argc, char** argv) {
    int const tokens = atoi(argv[1]); int const d_model = argc > 2 ? atoi(argv[2]) : 2048, d_ff = argc > 3 ? atoi(argv[3]) : 5632; bool zipf = argc > 4 && atoi(argv[4]);
    int const tiles = (d_ff + 255) / 256; int const ml = max_listed(tiles);
    std::mt19937 rng(1); std::normal_distribution<double> nd; std::uniform_real_distribution<double> ud;
    std::vector<double> act(tokens); double m = 0; for (auto& a : act) m += a = exp(0.8 * nd(rng)); m /= tokens;
    std::vector<double> share(d_ff, 1.0); if (zipf) { double t = 0; for (int i = 0; i < d_ff; i++) t += share[i] = 1.0 / (i + 1); for (auto& s : share) s = s / t * d_ff; std::shuffle(share.begin(), share.end(), rng); }
    std::vector<std::vector<uint16_t>> rows(tokens); size_t nnz = 0;
    std::vector<double> cum(d_ff); double c = 0; for (int i = 0; i < d_ff; i++) cum[i] = c += share[i];
    for (int t = 0; t < tokens; t++) {
        int n = std::min<double>(1.2 * 64, 1e9); n = std::min<int>(llround(0.005 * d_ff * act[t] / m), ml);
        std::vector<char> used(d_ff); int tries = 0;
        while ((int)rows[t].size() < n && tries++ < 20 * n) { int i = zipf ? std::lower_bound(cum.begin(), cum.end(), ud(rng) * c) - cum.begin() : rng() % d_ff; if (i >= d_ff) continue; if (!used[i]) used[i] = 1, rows[t].push_back(i); }
        std::sort(rows[t].begin(), rows[t].end()); nnz += n;
    }
    std::vector<int> order(tokens); for (int i = 0; i < tokens; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return rows[a].size() > rows[b].size(); });
    std::vector<RowWork> ro(tokens); std::vector<Unit> units; uint32_t split = 0;
    std::vector<uint32_t> words((size_t)tokens * ml, 0);
    int64_t const stride = (int64_t)tiles * 512;
    std::vector<unsigned char> l0((size_t)tokens * stride), l1((size_t)tokens * stride);
    for (int i = 0; i < tokens; i++) {
        int t = order[i]; uint32_t n = rows[t].size(); ro[i] = {(uint32_t)t, n}; if (n >= 64) split = i + 1;
        for (uint32_t b = 0; b < n; b += 32) units.push_back({(uint32_t)t, b + std::min(n - b, 32u) - 1});
        for (uint32_t e = 0; e < (n + 15) / 16 * 16; e++) {
            uint32_t nn = rows[t][std::min(e, n - 1)]; float h = e < n ? (float)nd(rng) : 0.f; uint32_t hb; memcpy(&hb, &h, 4);
            uint32_t p0 = hb >> 16; float f0 = fb(p0), r = h - f0; uint32_t rb; memcpy(&rb, &r, 4); uint32_t p1 = rb >> 16; float r2 = r - fb(p1); uint32_t r2b; memcpy(&r2b, &r2, 4); uint32_t p2 = r2b >> 16;
            ((uint2*)(l1.data() + (size_t)t * stride))[e] = make_uint2(nn | p0 << 16, p1 | p2 << 16);
            if (e < n) { ((SparseEntry*)(l0.data() + (size_t)t * stride))[e] = {nn, h}; words[(size_t)t * ml + e] = nn | (uint32_t)bf(fabs(nd(rng))) << 16; }
        }
    }
    printf("tokens %d nnz/row %.1f max %zu units %zu\n", tokens, (double)nnz / tokens, rows[order[0]].size(), units.size());
    ScheduleHeader hd{0, split, (uint32_t)units.size(), 0};
    auto up = [&](void const* h, size_t b) { void* d; CK(cudaMalloc(&d, b)); CK(cudaMemcpy(d, h, b, cudaMemcpyHostToDevice)); return d; };
    int const kSets = 4; std::vector<uint16_t*> W(kSets);
    std::vector<uint16_t> wh((size_t)d_model * d_ff);
    for (auto& w : wh) w = bf(((int)(rng() >> 8) % 2001 - 1000) / 1000.f);
    for (auto& d : W) d = (uint16_t*)up(wh.data(), wh.size() * 2);
    std::vector<uint16_t> xh((size_t)tokens * d_model); for (auto& w : xh) w = bf(((int)(rng() >> 8) % 2001 - 1000) / 1000.f);
    uint16_t* x = (uint16_t*)up(xh.data(), xh.size() * 2);
    uint16_t *y0, *y1; CK(cudaMalloc(&y0, xh.size() * 2)); CK(cudaMalloc(&y1, xh.size() * 2));
    Schedule s{}; s.header = (ScheduleHeader*)up(&hd, sizeof hd); s.row_order = (RowWork*)up(ro.data(), ro.size() * 8); s.words = (uint32_t*)up(words.data(), words.size() * 4); s.units = (Unit*)up(units.data(), units.size() * 8);
    unsigned char* L0 = (unsigned char*)up(l0.data(), l0.size()); unsigned char* L1 = (unsigned char*)up(l1.data(), l1.size());
    unsigned char *H0, *H1; CK(cudaMalloc(&H0, l0.size())); CK(cudaMalloc(&H1, l1.size()));
    float* partial; CK(cudaMalloc(&partial, units.size() * 32 * 4 * 32));
    cudaStream_t st; CK(cudaStreamCreate(&st)); cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
    auto time = [&](char const* name, std::function<void(int)> f) {
        for (int i = 0; i < 4; i++) f(i);
        CK(cudaStreamSynchronize(st)); std::vector<float> ts;
        for (int r = 0; r < 7; r++) { cudaEventRecord(a, st); for (int i = 0; i < 20; i++) f(i % kSets); cudaEventRecord(b, st); CK(cudaStreamSynchronize(st)); float ms; cudaEventElapsedTime(&ms, a, b); ts.push_back(ms * 50); }
        std::sort(ts.begin(), ts.end()); printf("  %-28s %8.2f us  (%.2f TB/s)\n", name, ts[3], nnz * 2.0 * d_model / ts[3] / 1e6); fflush(stdout);
    };
    Device dev{}; CK(query_device(dev));
    // ---- down
    sparse_down::Params dp{}; dp.w_down = W[0]; dp.y = y0; dp.schedule = s; dp.rows = {L0, stride}; dp.d_out = d_model; dp.tokens = tokens;
    dp.warps_per_row = (d_model + 255) / 256; uint32_t warps = std::min(dp.warps_per_row, (uint32_t)((int64_t)d_ff * 512 * 4 * 4 <= dev.l2_bytes ? 4 : (int64_t)d_ff * 512 * 2 * 4 <= dev.l2_bytes ? 2 : 1)); dp.ctas_per_row = (dp.warps_per_row + warps - 1) / warps;
    uint32_t dgrid = (tokens + 1) / 2 * dp.ctas_per_row;
    time("down D0 (now)", [&](int i) { dp.w_down = W[i]; sparse_down::down_kernel<Bf16><<<dgrid, warps * 32, 0, st>>>(dp); });
    std::vector<uint16_t> r0(xh.size()), r1(xh.size()); CK(cudaMemcpy(r0.data(), y0, r0.size() * 2, cudaMemcpyDeviceToHost));
    auto cmp = [&](char const* n) { CK(cudaMemcpy(r1.data(), y1, r1.size() * 2, cudaMemcpyDeviceToHost)); double e = 0, t = 0; size_t diff = 0; for (size_t i = 0; i < r0.size(); i++) { double d = fb(r0[i]) - fb(r1[i]); if (!(d == d)) d = 1e9; e += d * d; t += fb(r0[i]) * (double)fb(r0[i]); diff += r0[i] != r1[i]; } double rel = sqrt(e / t); if (!(rel < 1e-4)) printf("  WRONG %s rel %.3e differing %zu\n", n, rel, diff); };
    DP d1{W[0], y1, s.row_order, L1, stride, d_model, (uint32_t)tokens, d_model / 64};
#define DOWN(WARPS, GROUPS, BLOCKS) { char const* n = "down64 w" #WARPS " g" #GROUPS " b" #BLOCKS; CK(cudaMemset(y1, 0xff, xh.size() * 2)); \
    int grid = 132 * BLOCKS; DP dd = d1; if (grid < dd.slabs) grid = dd.slabs; \
    cudaFuncSetAttribute(down64<WARPS, GROUPS, BLOCKS>, cudaFuncAttributePreferredSharedMemoryCarveout, 0); \
    time(n, [&](int i) { dd.w_down = W[i]; down64<WARPS, GROUPS, BLOCKS><<<grid, WARPS * 32, 0, st>>>(dd); }); cmp(n); }
#define DF(LANES, WARPS, SUB, BLOCKS) { char const* n = "downg l" #LANES " w" #WARPS " s" #SUB " b" #BLOCKS; CK(cudaMemset(y1, 0xff, xh.size() * 2)); \
    DP dd = d1; dd.lists = L0; dd.slabs = d_model / (LANES * 8); int grid = std::max(132 * BLOCKS, dd.slabs); \
    cudaFuncSetAttribute(downg<LANES, WARPS, SUB, BLOCKS>, cudaFuncAttributePreferredSharedMemoryCarveout, 0); \
    time(n, [&](int i) { dd.w_down = W[i]; downg<LANES, WARPS, SUB, BLOCKS><<<grid, WARPS * 32, 0, st>>>(dd); }); cmp(n); }

    // ---- up
    sparse_up::Params upp{}; upp.x = x; upp.w_up = W[0]; upp.schedule = s; upp.rows = {H0, stride}; upp.d_model = d_model; upp.num_tiles = tiles; upp.column_begin = 0; upp.column_end = d_model;
    int64_t sl = ((int64_t)d_ff * d_model * 2 + dev.l2_bytes - 1) / dev.l2_bytes; int cols = ((d_model + sl - 1) / sl + 511) / 512 * 512;
    time("up U0 (now)", [&](int i) { upp.w_up = W[i]; for (int c = 0; c < d_model; c += cols) { upp.column_begin = c; upp.column_end = std::min(c + cols, d_model); sparse_up::up_kernel<Bf16><<<tokens, 128, 0, st>>>(upp); } });
    std::vector<unsigned char> h0(l0.size()), h1(l0.size()); CK(cudaMemcpy(h0.data(), H0, h0.size(), cudaMemcpyDeviceToHost));
    uint32_t kp = d_model / 256; size_t const most = std::min<size_t>(255, stride / (8 + 4 * kp));
    uint32_t first = 0, hu = 0; while (first < (uint32_t)tokens && rows[order[first]].size() > most) { hu += (rows[order[first]].size() + 31) / 32; first++; }
    ScheduleHeader hd2{0, split, hu, 0}; sparse_up::Params uph = upp; uph.schedule.header = (ScheduleHeader*)up(&hd2, sizeof hd2); uph.rows = {H1, stride};
    printf("  heavy rows %u units %u\n", first, hu);
    auto ucmp = [&](char const* n) { CK(cudaMemcpy(h1.data(), H1, h1.size(), cudaMemcpyDeviceToHost)); double e = 0, t = 0; size_t badn = 0;
        for (int r = 0; r < tokens; r++) for (size_t k = 0; k < rows[r].size(); k++) { SparseEntry z = ((SparseEntry*)(h0.data() + r * stride))[k]; SparseEntry o = ((SparseEntry*)(h1.data() + r * stride))[k]; badn += o.neuron != z.neuron; double d = o.h - z.h; if (!(d == d)) d = 1e9; e += d * d; t += z.h * (double)z.h; }
        double rel = sqrt(e / t); if (!(rel < 1e-5) || badn) printf("  WRONG %s rel %.3e bad %zu\n", n, rel, badn); };
    auto run7 = [&](auto kernel, int nwarps, int tmax, char const* name) {
        uint32_t places = tokens - first; uint32_t rounds = (places * (uint64_t)kp + 132 * tmax - 1) / (132 * tmax); uint32_t groups = 132 * rounds / kp; uint32_t T = (places + groups - 1) / groups;
        while (T > (uint32_t)tmax) { groups++; T = (places + groups - 1) / groups; }
        size_t mx = 0; for (uint32_t g = 0; g < groups; g++) { size_t n = 0; for (uint32_t i = g; i < places; i += groups) n += rows[order[first + i]].size(); mx = std::max(mx, n); }
        int buckets = (d_ff >> kBucketShift) + 1; int cap = (mx + 3) / 4 * 4;
        int sm = T * 512 + cap * 4 + T * 8 + buckets * 4;
        U7 u{x, W[0], s.row_order, s.words, ml, H1, (uint32_t)stride, (uint32_t)d_model * 2, first, places, groups, kp, (int)T, cap, buckets};
        R7 r7{s.row_order, s.words, ml, H1, (uint32_t)stride, first, places, kp};
        if (sm > 227 * 1024) { printf("  %s smem %d too large\n", name, sm); return; }
        CK(cudaMemset(H1, 0xff, l0.size())); CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sm));
        int grid = std::min<uint32_t>(132, groups * kp);
        char n2[100]; snprintf(n2, 100, "%s T%u x%u smem%dK", name, T, groups, sm / 1024);
        time(n2, [&](int i) { u.w_up = W[i]; uph.w_up = W[i]; kernel<<<grid, nwarps * 32, sm, st>>>(u); if (hu) sparse_up::up_kernel<Bf16><<<std::min(hu, 1024u), 128, 0, st>>>(uph); reduce7<<<(places + 7) / 8, 256, 0, st>>>(r7); });
        ucmp(n2);
        time("   of this reduce", [&](int i) { reduce7<<<(places + 7) / 8, 256, 0, st>>>(r7); });
        u.words = s.words; 
    };
    for (int tmax : {256, 128}) { run7(up7<32, 2>, 32, tmax, "up7 w32 s2"); run7(up7<24, 2>, 24, tmax, "up7 w24 s2"); run7(up7<16, 2>, 16, tmax, "up7 w16 s2"); run7(up7<16, 3>, 16, tmax, "up7 w16 s3"); run7(up7<32, 1>, 32, tmax, "up7 w32 s1");}
    return 0;
}

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
    uint16_t const* w_down; uint16_t* y; RowWork const* order; unsigned char* lists; int64_t stride; int d_out; uint32_t tokens; int slabs; uint32_t one = 1;
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

__device__ __forceinline__ uint4 ldp_keep(char const* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::evict_last.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}


__device__ __forceinline__ void ld_if(uint4& v, char const* p, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "r"((int)wanted));
}
__device__ __forceinline__ void lde_if(uint4& v, char const* p, bool wanted) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(p), "r"((int)wanted));
}
__device__ __forceinline__ void mma8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(b));
}
// Entries {neuron, p0 | p1 << 16}. kLanes 32: pairs of entries share a product; 16: a load is two entries.
// kLoads loads in flight.
template <int kLanes, int kWarps, int kLoads, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) downm(DP const p) {
    __shared__ uint32_t next_place;
    constexpr int kPerLoad = 32 / kLanes, kBatch = kPerLoad * kLoads, kWords = kBatch / 2;
    int const lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
    if (threadIdx.x == 0) next_place = 0;
    uint32_t const slab = blockIdx.x % p.slabs, part = blockIdx.x / p.slabs, parts = gridDim.x / p.slabs;
    if (part >= parts) return;
    __syncthreads();
    uint32_t const row_bytes = p.d_out * 2, list_bytes = p.stride;
    char const* w = reinterpret_cast<char const*>(p.w_down) + (slab * kLanes + lane % kLanes) * 16;
    asm volatile("" : "+l"(w));
    __shared__ volatile uint32_t zeros[kWarps * 32];
    zeros[threadIdx.x] = 0;
    char const* const lists = reinterpret_cast<char const*>(p.lists) + zeros[threadIdx.x];
    auto take = [&]() {
        uint2 raw = make_uint2(~0u, 0);
        if (lane == 0) {
            uint32_t const i = atomicAdd(&next_place, 1u) * parts + part;
            if (i < p.tokens) raw = __ldcg(reinterpret_cast<uint2 const*>(p.order + i));
        }
        return raw;
    };
    // where h stands in the fragment of h * I
    uint32_t const s0 = g >> 1 == q ? (g & 1 ? 0x1044 : 0x4410) : 0x4444, s1 = g >> 1 == q ? (g & 1 ? 0x3244 : 0x4432) : 0x4444;
    // lane's entries: kLanes 32: all lanes all; 16: of half
    uint4 e[kWords] = {};  // two entries each
    auto entries = [&](char const* list, int count) {
#pragma unroll
        for (int t = 0; t < kWords; ++t) {
            lde_if(e[t], list + t * 16, 2 * t < count);
        }
    };
    uint2 raw = take();
    uint32_t row = __shfl_sync(~0u, raw.x, 0);
    int count = __shfl_sync(~0u, raw.y, 0);
    raw = take();
    char const* list = lists + static_cast<uint64_t>(row) * list_bytes;
    entries(list, count);
    while (row != ~0u) {
        uint32_t const row1 = __shfl_sync(~0u, raw.x, 0);
        int const count1 = __shfl_sync(~0u, raw.y, 0);
        raw = take();
        float acc[4][4] = {};
        bool last;
        do {
            uint4 v[kLoads];
            uint32_t h[kBatch];
#pragma unroll
            for (int t = 0; t < kLoads; ++t) {
                if (kLanes == 32) {
                    ld_if(v[t], w + static_cast<uint64_t>(t % 2 ? e[t / 2].z : e[t / 2].x) * row_bytes, t / 2 * 2 < count);
                } else {
                    ld_if(v[t], w + static_cast<uint64_t>(lane & 16 ? e[t].z : e[t].x) * row_bytes, 2 * t < count);
                }
            }
#pragma unroll
            for (int t = 0; t < kWords; ++t) { h[2 * t] = e[t].y; h[2 * t + 1] = e[t].w; }
            int const here = count;
            count -= kBatch;
            last = count <= 0;
            list = last ? lists + static_cast<uint64_t>(row1) * list_bytes : list + kBatch * 8;
            entries(list, last ? count1 : count);
#pragma unroll
            for (int t = 0; t < kLoads; ++t) {
                if ((kLanes == 32 ? t / 2 * 2 : 2 * t) < here) {
                    uint32_t const words[4] = {v[t].x, v[t].y, v[t].z, v[t].w};
                    if (kLanes == 32) {
                        uint32_t const a0 = prmt(h[t], 0, s0), a1 = prmt(h[t], 0, s1);
#pragma unroll
                        for (int i = 0; i < 4; ++i) mma8(acc[i], a0, a1, words[i]);
                    } else {
                        uint32_t const a0 = prmt(h[2 * t], 0, s0), a1 = prmt(h[2 * t + 1], 0, s0), a2 = prmt(h[2 * t], 0, s1), a3 = prmt(h[2 * t + 1], 0, s1);
#pragma unroll
                        for (int i = 0; i < 4; ++i) { mma8(acc[i], a0, a1, words[i]); mma8(acc[i], a2, a3, words[i]); }
                    }
                }
            }
        } while (!last);
        char* const at = reinterpret_cast<char*>(p.y) + static_cast<uint64_t>(row) * row_bytes + slab * (kLanes * 16);
        bool const odd = g & 1;
        if (kLanes == 32) {
            float other[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float const n0 = acc[i][0] + acc[i][2], n1 = acc[i][1] + acc[i][3];
                other[i] = __shfl_xor_sync(~0u, odd ? n0 : n1, 4);
                acc[i][0] = odd ? n1 : n0;
            }
            uint32_t out[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i] = Bf16::from_float2(odd ? other[i] : acc[i][0], odd ? acc[i][0] : other[i]);
            *reinterpret_cast<uint4*>(at + (8 * q + (odd ? 4 : 0) + (g >> 1)) * 16) = make_uint4(out[0], out[1], out[2], out[3]);
        } else {
            // q < 2: c0 (n = 2q), c1; else c2 (n = 2q - 4 of the other entry), c3
            bool const upper = q & 2;
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float const n0 = upper ? acc[i][2] : acc[i][0], n1 = upper ? acc[i][3] : acc[i][1];
                sum[i] = (upper ? n1 : n0) + __shfl_xor_sync(~0u, upper ? n0 : n1, 2);
            }
            // now n = 2 (q % 2) + upper; octet 4n + (g >> 1); columns 2i + odd
            float const a0 = odd ? sum[2] : sum[0], a1 = odd ? sum[3] : sum[1];
            float const b0 = __shfl_xor_sync(~0u, odd ? sum[0] : sum[2], 4), b1 = __shfl_xor_sync(~0u, odd ? sum[1] : sum[3], 4);
            uint2 const out = make_uint2(Bf16::from_float2(odd ? b0 : a0, odd ? a0 : b0), Bf16::from_float2(odd ? b1 : a1, odd ? a1 : b1));
            *reinterpret_cast<uint2*>(at + (4 * (2 * (q & 1) + (upper ? 1 : 0)) + (g >> 1)) * 16 + (odd ? 8 : 0)) = out;
        }
        row = row1; count = count1;
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
            (void)p2; uint32_t q0 = bf(h), q1 = bf(h - fb(q0)); ((uint2*)(l1.data() + (size_t)t * stride))[e] = make_uint2(nn, q0 | q1 << 16);
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
#define DH(LANES, WARPS, SUB, BLOCKS) { char const* n = "downm l" #LANES " w" #WARPS " s" #SUB " b" #BLOCKS; CK(cudaMemset(y1, 0xff, xh.size() * 2)); \
    DP dd = d1; dd.slabs = d_model / (LANES * 8); int grid = std::max(132 * BLOCKS, dd.slabs); auto kern = downm<LANES, WARPS, SUB, BLOCKS>; \
    cudaFuncSetAttribute(kern, cudaFuncAttributePreferredSharedMemoryCarveout, 0); \
    time(n, [&](int i) { dd.w_down = W[i]; kern<<<grid, WARPS * 32, 0, st>>>(dd); }); cmp(n); }
    DH(16, 32, 4, 1) DH(16, 24, 4, 1) DH(16, 24, 6, 1) DH(16, 24, 8, 1) DH(16, 20, 8, 1) DH(16, 16, 8, 1) DH(16, 16, 4, 2) DH(16, 12, 4, 2) DH(16, 8, 4, 3)
    DH(32, 32, 4, 1) DH(32, 24, 4, 1) DH(32, 24, 6, 1) DH(32, 24, 8, 1) DH(32, 20, 8, 1) DH(32, 16, 8, 1) DH(32, 28, 4, 1) DH(32, 16, 4, 2)
    return 0;
}

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


// kLanes lanes a neuron (8 columns each), kSub sub-batches of 2 * 32 / kLanes entries in flight
__device__ __forceinline__ uint4 ldw_if(uint16_t const* p, bool wanted) {
    uint4 v;
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; mov.u32 %0, 0; mov.u32 %1, 0; mov.u32 %2, 0; mov.u32 %3, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w) : "l"(p), "r"((int)wanted));
    return v;
}
template <int kLanes, int kWarps, int kSub, int kBlocks>
__global__ void __launch_bounds__(kWarps * 32, kBlocks) downf(DP const p) {
    __shared__ uint32_t next_place;
    constexpr int kRows = 32 / kLanes, kBatch = 2 * kRows * kSub;
    int const lane = threadIdx.x % 32, o = lane % kLanes, r = lane / kLanes;
    if (threadIdx.x == 0) next_place = 0;
    __syncthreads();
    uint32_t const slab = blockIdx.x % p.slabs, part = blockIdx.x / p.slabs, parts = gridDim.x / p.slabs;
    if (part >= parts) return;
    uint16_t const* const w = p.w_down + slab * (kLanes * 8) + o * 8;
    auto take = [&]() {
        uint32_t i = 0;
        if (lane == 0) i = atomicAdd(&next_place, 1u);
        return __shfl_sync(~0u, i, 0) * parts + part;
    };
    auto fetch = [&](uint32_t place) {
        RowWork k{0, 0};
        if (place < p.tokens) { uint2 v = __ldcg(reinterpret_cast<uint2 const*>(p.order + place)); k.row = v.x; k.count = v.y; }
        return k;
    };
    uint4 e[kSub];
    auto entries = [&](RowWork k, int base) {
        unsigned char const* l = p.lists + static_cast<int64_t>(k.row) * p.stride + (base + 2 * r) * 8;
#pragma unroll
        for (int t = 0; t < kSub; ++t) {
            if (base + 2 * kRows * t < static_cast<int>(k.count)) e[t] = ldcg4(l + 2 * kRows * t * 8);
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
        float acc[8] = {};
        int const count = work.count;
        for (int base = 0; base < count; base += kBatch) {
            uint4 v[kSub][2];
            float h[kSub][2];
#pragma unroll
            for (int t = 0; t < kSub; ++t) {
                int const at = base + 2 * kRows * t;
                if (at + 2 * kRows <= count) {
                    v[t][0] = ldw(w + static_cast<int64_t>(e[t].x) * p.d_out);
                    v[t][1] = ldw(w + static_cast<int64_t>(e[t].z) * p.d_out);
                    h[t][0] = __uint_as_float(e[t].y); h[t][1] = __uint_as_float(e[t].w);
                } else if (at < count) {
                    bool const p0 = at + 2 * r < count, p1 = at + 2 * r + 1 < count;
                    v[t][0] = ldw_if(w + static_cast<int64_t>(e[t].x) * p.d_out, p0);
                    v[t][1] = ldw_if(w + static_cast<int64_t>(e[t].z) * p.d_out, p1);
                    h[t][0] = p0 ? __uint_as_float(e[t].y) : 0.f; h[t][1] = p1 ? __uint_as_float(e[t].w) : 0.f;
                }
            }
            bool const last = base + kBatch >= count;
            entries(last ? work1 : work, last ? 0 : base + kBatch);
#pragma unroll
            for (int t = 0; t < kSub; ++t) {
                if (base + 2 * kRows * t < count) {
#pragma unroll
                    for (int z = 0; z < 2; ++z) {
                        float f[8];
                        unpack<Bf16>(f, v[t][z]);
#pragma unroll
                        for (int i = 0; i < 8; ++i) acc[i] = fmaf(h[t][z], f[i], acc[i]);
                    }
                }
            }
        }
        if (count == 0) entries(work1, 0);
        int64_t const at = static_cast<int64_t>(work.row) * p.d_out + slab * (kLanes * 8) + o * 8;
        bool const up1 = lane & 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[i] = (up1 ? acc[i + 4] : acc[i]) + __shfl_xor_sync(~0u, up1 ? acc[i] : acc[i + 4], 16);
        if (kLanes == 16) {
            *reinterpret_cast<uint2*>(p.y + at + (up1 ? 4 : 0)) = make_uint2(Bf16::from_float2(acc[0], acc[1]), Bf16::from_float2(acc[2], acc[3]));
        } else {
            bool const up2 = lane & 8;
#pragma unroll
            for (int i = 0; i < 2; ++i) acc[i] = (up2 ? acc[i + 2] : acc[i]) + __shfl_xor_sync(~0u, up2 ? acc[i] : acc[i + 2], 8);
            *reinterpret_cast<uint32_t*>(p.y + at + (up1 ? 4 : 0) + (up2 ? 2 : 0)) = Bf16::from_float2(acc[0], acc[1]);
        }
        place = place1; work = work1; place1 = place2; work1 = work2;
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
    DOWN(24, 2, 1)
#define DF(LANES, WARPS, SUB, BLOCKS) { char const* n = "downf l" #LANES " w" #WARPS " s" #SUB " b" #BLOCKS; CK(cudaMemset(y1, 0xff, xh.size() * 2)); \
    DP dd = d1; dd.lists = L0; dd.slabs = d_model / (LANES * 8); int grid = std::max(132 * BLOCKS, dd.slabs); \
    cudaFuncSetAttribute(downf<LANES, WARPS, SUB, BLOCKS>, cudaFuncAttributePreferredSharedMemoryCarveout, 0); \
    time(n, [&](int i) { dd.w_down = W[i]; downf<LANES, WARPS, SUB, BLOCKS><<<grid, WARPS * 32, 0, st>>>(dd); }); cmp(n); }
    DF(8, 16, 4, 1) DF(8, 20, 4, 1) DF(8, 24, 4, 1) DF(8, 28, 2, 1) DF(8, 32, 2, 1) DF(8, 12, 4, 2) DF(8, 16, 2, 2) DF(8, 8, 4, 3)
    DF(16, 16, 4, 1) DF(16, 20, 4, 1) DF(16, 24, 4, 1) DF(16, 28, 4, 1) DF(16, 32, 2, 1) DF(16, 12, 8, 1) DF(16, 16, 8, 1) DF(16, 12, 4, 2) DF(16, 8, 4, 3)
    return 0;
}

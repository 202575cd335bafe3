// twell_append_caches of include/twell/attention.h.
#include <cuda_runtime_api.h>
#include <twell/attention.h>

#include <algorithm>
#include <limits>

#include "device/dependent_launch.cuh"

namespace twell {
namespace {

constexpr int32_t kThreads = 256;

// What is copied of one cache: rows of `units` units, of whatever type.
template <typename Unit>
struct Part {
    Unit* cache;       // [batch, kv_heads, length, units]
    Unit const* rows;  // [batch, tokens, kv_heads, units]
    int32_t units;
};

// blockIdx.x: units of a sequence's new rows, [tokens, kv_heads, units]; blockIdx.y: keys or values; blockIdx.z:
// sequences.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    append_kernel(Part<Unit> keys, Part<Unit> values, int32_t const* __restrict__ starts,
                  int32_t const* __restrict__ counts, int32_t batch, int32_t tokens, int32_t kv_heads, int64_t length) {
    allow_dependent_launch();
    Part<Unit> const part = blockIdx.y == 0 ? keys : values;
    int64_t const size = static_cast<int64_t>(kv_heads) * part.units;  // of a token
    for (int32_t seq_idx = blockIdx.z; seq_idx < batch; seq_idx += gridDim.z) {
        int64_t const start = starts[seq_idx];
        int64_t const count = min(counts[seq_idx], tokens);
        int64_t const all = count * size;
        Unit const* const rows = part.rows + seq_idx * tokens * size;
        Unit* const cache = part.cache + seq_idx * length * size;
        for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
            int64_t const token_idx = i / size;
            int32_t const within = static_cast<int32_t>(i - token_idx * size);
            int32_t const head_idx = within / part.units;
            int64_t const place = start + token_idx;
            if (place >= 0 && place < length) {
                cache[(head_idx * length + place) * part.units + (within - head_idx * part.units)] = rows[i];
            }
        }
    }
}

template <typename Unit>
cudaError_t launch(twell_append_problem const& p, twell_append_tensors const& t, cudaStream_t stream) {
    auto const part = [](void* cache, void const* rows, int32_t bytes) {
        return Part<Unit>{static_cast<Unit*>(cache), static_cast<Unit const*>(rows),
                          bytes / static_cast<int32_t>(sizeof(Unit))};
    };
    Part<Unit> const keys = part(t.keys, t.new_keys, p.key_bytes);
    Part<Unit> const values = part(t.values, t.new_values, p.value_bytes);
    int64_t const units = p.tokens * p.kv_heads * std::max(keys.units, values.units);
    // Enough blocks to fill any GPU; more only wait.
    int64_t const blocks = std::min<int64_t>((units + kThreads - 1) / kThreads, 1024);
    dim3 const grid(static_cast<uint32_t>(blocks), 2, static_cast<uint32_t>(std::min<int64_t>(p.batch, 65535)));
    append_kernel<Unit><<<grid, kThreads, 0, stream>>>(keys, values, t.starts, t.counts, static_cast<int32_t>(p.batch),
                                                       static_cast<int32_t>(p.tokens), p.kv_heads, p.length);
    return cudaGetLastError();
}

bool is_multiple(int64_t value, int64_t of) { return value % of == 0; }

// Whether all rows start at multiples of 16 bytes.
bool takes_vectors(twell_append_problem const& p, twell_append_tensors const& t) {
    bool aligned = is_multiple(p.key_bytes, sizeof(uint4)) && is_multiple(p.value_bytes, sizeof(uint4));
    for (void const* pointer :
         {static_cast<void const*>(t.keys), static_cast<void const*>(t.values), t.new_keys, t.new_values}) {
        aligned = aligned && is_multiple(static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)), sizeof(uint4));
    }
    return aligned;
}

}  // namespace
}  // namespace twell

extern "C" TWELL_API int32_t twell_append_caches(twell_append_problem const* problem,
                                                 twell_append_tensors const* tensors, cudaStream_t stream) {
    constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();
    twell_append_problem const& p = *problem;
    auto const in_range = [](int64_t value, int64_t least) { return value >= least && value <= kLargest; };
    bool const good = in_range(p.batch, 0) && in_range(p.tokens, 0) && in_range(p.length, 1) &&
                      in_range(p.kv_heads, 1) && in_range(p.key_bytes, 2) && in_range(p.value_bytes, 2) &&
                      twell::is_multiple(p.key_bytes, 2) && twell::is_multiple(p.value_bytes, 2) &&
                      in_range(int64_t{p.kv_heads} * std::max(p.key_bytes, p.value_bytes), 2);
    if (!good) {
        return cudaErrorInvalidValue;
    }
    if (p.batch == 0 || p.tokens == 0) {
        return cudaSuccess;
    }
    return twell::takes_vectors(p, *tensors) ? twell::launch<uint4>(p, *tensors, stream)
                                             : twell::launch<uint16_t>(p, *tensors, stream);
}

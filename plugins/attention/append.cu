// twell_append_caches of include/twell/attention.h, and queries in the same form.
#include <algorithm>
#include <limits>
#include <type_traits>

#include "append.h"
#include "device/dependent_launch.cuh"
#include "device/vector.cuh"
#include "host/launch.h"
#include "rotate.cuh"

namespace twell {
namespace {

constexpr int32_t kThreads = 256;

// The copied rows of one cache, of `units` units each, of any type. Kept: a unit in the cache, which is Unit, or uint2
// for eight elements in FP8.
template <typename Unit, typename Kept>
struct Part {
    Kept* cache;       // [batch, heads, length, units]
    Unit const* rows;  // [batch, tokens, heads, units]
    int32_t units;
    bool is_rotated;
    float scale;  // in FP8
};

template <typename Unit, typename Kept>
struct AppendParams {
    Part<Unit, Kept> parts[2];
    Unit const* cosines;    // [batch, tokens, units], of rotated rows
    Unit const* sines;      // likewise
    int32_t const* starts;  // [batch]; or null, where all tokens go to the first places
    int32_t const* counts;  // likewise
    int32_t batch;
    int32_t tokens;
    int32_t heads;
    int64_t length;
};

// Eight elements divided by a scale, in FP8.
template <class Element>
__device__ __forceinline__ uint2 to_fp8(uint4 vector, float scale) {
    float values[kVector];
    unpack<Element>(values, vector);
#pragma unroll
    for (float& value : values) {
        value /= scale;
    }
    return make_uint2(to_e4m3(values[0], values[1], values[2], values[3]),
                      to_e4m3(values[4], values[5], values[6], values[7]));
}

// blockIdx.x: units of a sequence's new rows, [tokens, heads, units]; blockIdx.y: keys or values; blockIdx.z:
// sequences. Element is void where units are copied as they are.
template <typename Unit, class Element, typename Kept>
__global__ void __launch_bounds__(kThreads) append_kernel(AppendParams<Unit, Kept> const p) {
    allow_dependent_launch();
    wait_for_previous_launch();
    Part<Unit, Kept> const part = blockIdx.y == 0 ? p.parts[0] : p.parts[1];  // an index would need a copy in memory
    int64_t const size = static_cast<int64_t>(p.heads) * part.units;          // of a token
    for (int32_t seq_idx = blockIdx.z; seq_idx < p.batch; seq_idx += gridDim.z) {
        int64_t const start = p.starts == nullptr ? 0 : p.starts[seq_idx];
        int64_t const count = p.counts == nullptr ? p.tokens : min(p.counts[seq_idx], p.tokens);
        int64_t const all = count * size;
        Unit const* const rows = part.rows + seq_idx * p.tokens * size;
        Kept* const cache = part.cache + seq_idx * p.length * size;
        for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
            int64_t const token_idx = i / size;
            int32_t const within = static_cast<int32_t>(i - token_idx * size);
            int32_t const head_idx = within / part.units;
            int32_t const column = within - head_idx * part.units;
            int64_t const place = start + token_idx;
            if (place < 0 || place >= p.length) {
                continue;
            }
            Unit unit = rows[i];
            if constexpr (!std::is_void_v<Element>) {
                if (part.is_rotated) {
                    int32_t const half = part.units / 2;
                    bool const is_first = column < half;
                    int64_t const angle = (int64_t{seq_idx} * p.tokens + token_idx) * part.units + column;
                    unit = rotate<Element>(unit, rows[is_first ? i + half : i - half], p.cosines[angle], p.sines[angle],
                                           is_first);
                }
            }
            Kept& kept = cache[(head_idx * p.length + place) * part.units + column];
            if constexpr (std::is_same_v<Kept, Unit>) {
                kept = unit;
            } else {
                kept = to_fp8<Element>(unit, part.scale);
            }
        }
    }
}

template <class Element, typename Unit, typename Kept>
cudaError_t launch(AppendParams<Unit, Kept> const& params, uint32_t num_parts, cudaStream_t stream) {
    Device device = {};
    TWELL_TRY(query_device(device));
    int64_t const units =
        int64_t{params.tokens} * params.heads * std::max(params.parts[0].units, params.parts[1].units);
    // Enough blocks to fill any GPU; more only wait.
    int64_t const blocks = std::min<int64_t>((units + kThreads - 1) / kThreads, 1024);
    dim3 const grid(static_cast<uint32_t>(blocks), num_parts, static_cast<uint32_t>(std::min(params.batch, 65535)));
    return launch_dependent({"append"}, append_kernel<Unit, Element, Kept>, params, grid, kThreads, 0, device, stream);
}

// Of rows whose elements are read, to be rotated or rounded.
template <typename Kept>
cudaError_t launch_elements(AppendParams<uint4, Kept> const& params, uint32_t num_parts, int32_t dtype,
                            cudaStream_t stream) {
    return dtype == TWELL_FP16 ? launch<Fp16>(params, num_parts, stream) : launch<Bf16>(params, num_parts, stream);
}

template <typename Unit, typename Kept>
AppendParams<Unit, Kept> params_of(twell_append_problem const& p, twell_append_tensors const& t) {
    auto const units = [](void const* pointer) { return static_cast<Unit const*>(pointer); };
    auto const part = [&](void* cache, void const* rows, int32_t bytes, bool is_rotated, float scale) {
        return Part<Unit, Kept>{static_cast<Kept*>(cache), units(rows), bytes / static_cast<int32_t>(sizeof(Unit)),
                                is_rotated, scale};
    };
    AppendParams<Unit, Kept> params = {};
    params.parts[0] = part(t.keys, t.new_keys, p.key_bytes, p.rotated == 1, p.key_scale);
    params.parts[1] = part(t.values, t.new_values, p.value_bytes, false, p.value_scale);
    params.cosines = units(t.cosines);
    params.sines = units(t.sines);
    params.starts = t.starts;
    params.counts = t.counts;
    params.batch = static_cast<int32_t>(p.batch);
    params.tokens = static_cast<int32_t>(p.tokens);
    params.heads = p.kv_heads;
    params.length = p.length;
    return params;
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

cudaError_t rotate_queries(twell_attention_problem const& problem, twell_attention_tensors const& tensors,
                           void* rotated, cudaStream_t stream) {
    auto const vectors = [](void const* pointer) { return static_cast<uint4 const*>(pointer); };
    AppendParams<uint4, uint4> params = {};
    params.parts[0] = {static_cast<uint4*>(rotated), vectors(tensors.q), problem.width / kVector, true, 1.0f};
    params.cosines = vectors(tensors.cosines);
    params.sines = vectors(tensors.sines);
    params.batch = static_cast<int32_t>(problem.batch);
    params.tokens = static_cast<int32_t>(problem.tokens);
    params.heads = problem.heads;
    params.length = problem.tokens;
    return launch_elements(params, 1, problem.dtype, stream);
}

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
    bool const rotates = p.rotated == 1;
    bool const fp8 = p.fp8 == 1;
    bool const takes_vectors = twell::takes_vectors(p, *tensors);
    bool const halves = twell::is_multiple(p.key_bytes, 2 * sizeof(uint4));  // of a key are whole vectors
    bool const scaled = p.key_scale > 0.0f && p.value_scale > 0.0f;
    if (!good || ((rotates || fp8) && !takes_vectors) || (rotates && !halves) || (fp8 && !scaled)) {
        return cudaErrorInvalidValue;
    }
    if (p.batch == 0 || p.tokens == 0) {
        return cudaSuccess;
    }
    if (fp8) {
        return twell::launch_elements(twell::params_of<uint4, uint2>(p, *tensors), 2, p.dtype, stream);
    }
    if (rotates) {
        return twell::launch_elements(twell::params_of<uint4, uint4>(p, *tensors), 2, p.dtype, stream);
    }
    return takes_vectors ? twell::launch<void>(twell::params_of<uint4, uint4>(p, *tensors), 2, stream)
                         : twell::launch<void>(twell::params_of<uint16_t, uint16_t>(p, *tensors), 2, stream);
}

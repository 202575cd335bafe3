// The two element types, bf16 and fp16, and FP8 (E4M3) of weights: conversions, arithmetic, the tensor-core
// instruction, the activation, and the search for its non-zeros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

namespace twell {

// Elements in one 16-byte access. d_model and d_out are multiples of it, so rows start on 16-byte boundaries.
constexpr int kVector = 8;

// The shape of the tensor-core instruction.
constexpr int MMA_M = 16;
constexpr int MMA_N = 8;
constexpr int MMA_K = 16;

// A pair of either type: as cuts, these keep every z.
constexpr uint32_t kNaNs = 0x7fff7fffu;

// Arithmetic of two neighbours at once, each rounded once. A question is answered by a mask: for each neighbour all
// bits if it is true, else none.
template <class Pair>
struct PairArithmetic {
    static __device__ __forceinline__ uint32_t multiply2(uint32_t a, uint32_t b) {
        Pair const product = __hmul2(as_pair(a), as_pair(b));
        return *reinterpret_cast<uint32_t const*>(&product);
    }
    // Not a <= b: true of NaNs, too.
    static __device__ __forceinline__ uint32_t not_at_most2(uint32_t a, uint32_t b) {
        return __hgtu2_mask(as_pair(a), as_pair(b));
    }
    static __device__ __forceinline__ uint32_t is_not_zero2(uint32_t a) { return __hneu2_mask(as_pair(a), as_pair(0)); }
    // Of a number and a NaN the number.
    static __device__ __forceinline__ uint32_t larger2(uint32_t a, uint32_t b) {
        Pair const larger = __hmax2(as_pair(a), as_pair(b));
        return *reinterpret_cast<uint32_t const*>(&larger);
    }
    // Infinite or NaN.
    static __device__ __forceinline__ uint32_t is_not_finite2(uint32_t a) {
        return __hneu2_mask(__hsub2(as_pair(a), as_pair(a)), as_pair(0));
    }

  private:
    static __device__ __forceinline__ Pair as_pair(uint32_t bits) { return *reinterpret_cast<Pair*>(&bits); }
};

struct Bf16 : PairArithmetic<__nv_bfloat162> {
    static __device__ __forceinline__ float to_float(uint16_t bits) {
        return __uint_as_float(static_cast<uint32_t>(bits) << 16);
    }
    // Two neighbouring elements; the one with the lower index is in the low half.
    static __device__ __forceinline__ float2 to_float2(uint32_t pair) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    static __device__ __forceinline__ uint16_t from_float(float value) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(value));
    }
    // The largest element that is at most `value`.
    static __host__ __device__ uint16_t round_down(float value) {
        return __bfloat16_as_ushort(__float2bfloat16_rd(value));
    }
    static __device__ __forceinline__ uint32_t from_float2(float low, float high) {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
        return *reinterpret_cast<uint32_t const*>(&pair);
    }
    static constexpr uint32_t kOnes = 0x3f803f80u;
    // d[MMA_M, MMA_N] += a[MMA_M, MMA_K] b[MMA_K, MMA_N], fp32 accumulation.
    static __device__ __forceinline__ void mma(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

struct Fp16 : PairArithmetic<__half2> {
    static __device__ __forceinline__ float to_float(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static __device__ __forceinline__ float2 to_float2(uint32_t pair) {
        return make_float2(to_float(static_cast<uint16_t>(pair)), to_float(static_cast<uint16_t>(pair >> 16)));
    }
    static __device__ __forceinline__ uint16_t from_float(float value) {
        return __half_as_ushort(__float2half_rn(value));
    }
    static __host__ __device__ uint16_t round_down(float value) { return __half_as_ushort(__float2half_rd(value)); }
    static __device__ __forceinline__ uint32_t from_float2(float low, float high) {
        __half2 const pair = __floats2half2_rn(low, high);
        return *reinterpret_cast<uint32_t const*>(&pair);
    }
    static constexpr uint32_t kOnes = 0x3c003c00u;
    static __device__ __forceinline__ void mma(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// An element in FP8, E4M3: of weights, whose element type is then that of x for all else, and of rounded x.
struct E4m3 {
    uint8_t bits;
};

// use(Bf16()) or use(Fp16()). Some kernels of FP8 learn the type of all else at run time: that is a small part of them,
// and they take half of the time to compile.
template <class Use>
__device__ __forceinline__ auto with_element(bool is_bf16, Use use) {
    return is_bf16 ? use(Bf16()) : use(Fp16());
}

// Two neighbours as fp16, which holds all numbers of E4M3, as does bf16.
__device__ __forceinline__ uint32_t e4m3_to_fp16_pair(uint32_t two) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
    // No instruction does it: exponent and mantissa move to their places, and the exponents' biases differ by 8.
    uint32_t const bits = __byte_perm(two, 0, 0x1404);
    uint32_t const magnitudes = bits & 0x7f007f00u;
    uint32_t const nans = __vcmpeq2(magnitudes, 0x7f007f00u) & 0x7fff7fffu;
    uint32_t const scaled = (bits & 0x80008000u) | magnitudes >> 1;
    __half2 const values =
        __hmul2(*reinterpret_cast<__half2 const*>(&scaled), __half2half2(__ushort_as_half(0x5c00)));  // 2^8
    return *reinterpret_cast<uint32_t const*>(&values) | nans;
#else
    __half2_raw const values = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
    return values.x | static_cast<uint32_t>(values.y) << 16;
#endif
}

// Four neighbours.
__device__ __forceinline__ uint2 e4m3_to_fp16(uint32_t four) {
    return make_uint2(e4m3_to_fp16_pair(four), e4m3_to_fp16_pair(four >> 16));
}

// Four neighbours rounded; values above 448 become 448.
__device__ __forceinline__ uint32_t to_e4m3(float a, float b, float c, float d) {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3) |
           static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3)) << 16;
}

// h times `inverse`, to be rounded to FP8. A value that would round to 0 becomes -0, so that +0 says that a neuron is
// inactive.
__device__ __forceinline__ float to_be_rounded(float h, float inverse) {
    constexpr float kMostZero = 0x1p-10f;
    float const scaled = h * inverse;
    float const zero = __float_as_uint(h) != 0 ? -0.0f : 0.0f;
    return fabsf(scaled) <= kMostZero ? zero : scaled;
}

// Every activation is: 0 where z <= cut, else z or z^2. NaN compares false, so it is kept. The cut is the threshold of
// a FATReLU, else 0.
struct Activation {
    uint32_t cut;  // rounded down to the element type; twice, as a pair
    bool square;
    float const* cuts;  // [neurons]: one for each, in the place of `cut`; or null
};

template <class Element>
__device__ __forceinline__ uint32_t round_cut(float cut) {
    return Element::round_down(fmaxf(cut, 0.0f));
}

// The cut of a neuron, twice.
template <class Element>
__device__ __forceinline__ uint32_t cut_of(uint32_t of_all, float const* cuts, int neuron, int num_neurons) {
    if (cuts == nullptr) {
        return of_all;
    }
    uint32_t const cut = round_cut<Element>(cuts[min(neuron, num_neurons - 1)]);
    return cut << 16 | cut;
}

// The cuts of a neuron and the next one.
template <class Element>
__device__ __forceinline__ uint32_t cuts_of_pair(uint32_t of_all, float const* cuts, int neuron, int num_neurons) {
    if (cuts == nullptr) {
        return of_all;
    }
    return round_cut<Element>(cuts[min(neuron + 1, num_neurons - 1)]) << 16 |
           round_cut<Element>(cuts[min(neuron, num_neurons - 1)]);
}

// Bits of act(z) for two elements with these cuts.
template <class Element>
__device__ __forceinline__ uint32_t activate_pair(uint32_t z, bool square, uint32_t cuts) {
    return (square ? Element::multiply2(z, z) : z) & Element::not_at_most2(z, cuts);
}

// The same for z in fp32, which is first rounded to the element type: what a dense block would have stored.
template <class Element>
__device__ __forceinline__ uint32_t activate2(float low, float high, bool square, uint32_t cuts) {
    return activate_pair<Element>(Element::from_float2(low, high), square, cuts);
}

template <class Element>
__device__ __forceinline__ uint16_t activate(float pre_activation, bool square, uint32_t cut) {
    return static_cast<uint16_t>(activate2<Element>(pre_activation, 0.0f, square, cut));
}

constexpr uint32_t kSigns = 0x80008000u;  // of a pair

// The sign bits of a pair, of those elements that are not +0.
__device__ __forceinline__ uint32_t signs_of_nonzeros(uint32_t pair) {
    return (((pair & ~kSigns) + ~kSigns) | pair) & kSigns;
}

// Bit i: element i is not +0.
__device__ __forceinline__ uint32_t find_nonzeros(uint2 values) {
    uint32_t const bits = signs_of_nonzeros(values.x) >> 15 | signs_of_nonzeros(values.y) >> 13;
    return (bits | bits >> 15) & 0xfu;
}

__device__ __forceinline__ uint32_t find_nonzeros(uint4 values) {
    uint32_t const bits = signs_of_nonzeros(values.x) >> 15 | signs_of_nonzeros(values.y) >> 13 |
                          signs_of_nonzeros(values.z) >> 11 | signs_of_nonzeros(values.w) >> 9;
    return (bits | bits >> 15) & 0xffu;
}

// A squared value can round to zero and is then no non-zero; -0 cannot come out of activate().
__device__ __forceinline__ bool is_nonzero(uint16_t bits) { return bits != 0; }

}  // namespace twell

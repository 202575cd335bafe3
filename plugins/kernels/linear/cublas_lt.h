// Products by cuBLASLt, which is opened at run time: the one of this process, else the one that the dynamic linker
// finds. No header of it is needed, and nothing fails without it.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

namespace twell::cublas_lt {

// Bytes of workspace that a product may take.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

// Of the library, as it counts them; 0: there is none.
size_t version();

// The first one with a scale for each row of both operands, or for blocks, on compute capability 9.0.
constexpr size_t kFirstWithScales = 120900;

// Scales of blocks: tokens, and the places of a row of the weights' scales, are a multiple of so many. Of other tokens
// cuBLASLt 13.0 has no product.
constexpr int kBlocksMultiple = 4;

// y = x W^T + bias + residual, rounded once. All tensors are bf16 or fp16, aligned to 16 bytes. With scales x and W are
// E4M3, and in and out multiples of 16; if by_block, W has one for each 128 x 128, and x for each row and 128 inputs.
struct Product {
    void const* x;              // [tokens, in]
    void const* weight;         // [out, in]
    float const* x_scale;       // [tokens], by_block [in / 128, tokens]; or null
    float const* weight_scale;  // [out], by_block [out / 128, in / 128], both rounded up, and padded; or null
    void const* bias;           // [out] or null
    void const* residual;       // [tokens, out] or null, rows as y's
    void* y;                    // [tokens, out], rows `stride` elements apart
    int64_t tokens;
    int64_t in;
    int64_t out;
    int64_t stride;
    bool is_bf16;
    bool by_block;
};

// Enqueues a product. cudaErrorNotSupported: cuBLASLt is missing, or has no algorithm; then nothing was enqueued.
cudaError_t multiply(Product const& product, void* workspace, cudaStream_t stream);

}  // namespace twell::cublas_lt

// Hot neurons: where a few neurons are active in so many rows that u of all rows and all of them, a matrix product,
// takes less time than u of those pairs that are wanted. Beside chunks only.
#ifndef TWELL_KERNELS_MANY_TOKENS_CHUNKS_HOT_H_
#define TWELL_KERNELS_MANY_TOKENS_CHUNKS_HOT_H_

#include <stdint.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

struct Schedule;

// At most so many neurons are hot: what one CTA of the product takes.
constexpr int kMostHot = 128;

// Which of 32 neighbouring neurons are hot, and how many hot ones come before these.
struct HotWord {
    uint32_t bits;
    uint32_t before;
};

// Pointers are to device memory. The i-th hot neuron is the i-th of those with a bit.
struct HotNeurons {
    uint32_t* sampled;  // [d_ff]: in how many rows of the sample a neuron is active; the gate makes it 0
    uint32_t* count;
    uint32_t* neurons;  // [kMostHot]
    uint16_t* w_up;     // [kMostHot, d_model]: rows of Wu
    float* u;           // [tokens, kMostHot], without the bias
    int num_words;
    int sample_step;  // of so many rows one is in the sample
    int num_sampled;  // rows
};

// On compute capability 9.0: built when the architectures include sm_90a.

// The rows of the configurations, a line each.
void list_hot_sm90(Text& text);

// Enqueues hot.u = x hot.w_up^T, unless no neuron is hot or all rows are dense. Behind launch_chunk_up: order_kernel
// has ended when a CTA starts.
cudaError_t launch_hot_sm90(twell_problem const& problem, twell_tensors const& tensors, HotNeurons const& hot,
                            Schedule const& schedule, Device const& device, cudaStream_t stream);

}  // namespace twell

#endif  // TWELL_KERNELS_MANY_TOKENS_CHUNKS_HOT_H_

// Hot neurons: a few neurons that are active in many rows. A matrix product of all rows and all hot neurons takes less
// time than u of the wanted pairs alone. Beside chunks only.
#pragma once

#include <stdint.h>

namespace twell {

// The most hot neurons: what one CTA of the product takes.
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
    int sample_step;  // one of that many rows is in the sample
    int num_sampled;  // rows
};

}  // namespace twell

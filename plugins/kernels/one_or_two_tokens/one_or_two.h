// The whole block for one or two tokens, of layers whose neurons the device takes at once.
#pragma once

#include <stddef.h>

#include "host/launch.h"
#include "twell/twell.h"

namespace twell {

// The most tokens, and columns of x and y: a thread of a CTA has a vector of each row.
constexpr int kMostTokensOneOrTwo = 2;
constexpr int kMostColumnsOneOrTwo = 2048;
// The most neurons of a CTA, and CTAs of a multiprocessor and of the device.
constexpr int kNeuronsOfCtaOneOrTwo = 16;
constexpr int kCtasPerMultiprocessorOneOrTwo = 3;
constexpr int kMostCtasOneOrTwo = 512;

// The configuration of a call, chosen once.
struct OneOrTwoConfig {
    int num_ctas;
    int neurons_each;  // of a CTA
    int neurons_left;  // that many CTAs have one more
};

// Bytes of workspace that the kernels need; never shrinks when `tokens` grows, also where they are not for it.
size_t one_or_two_bytes(twell_problem const& problem);

// The rows of the configurations, a line each.
void list_one_or_two(Text& text);

// Enqueues the whole block, where routes.cu says so. The problem has been validated, has at least one row, and the
// pointers have been checked; `workspace` is 256-byte aligned.
cudaError_t launch_one_or_two(Call const& call, void* workspace);

}  // namespace twell

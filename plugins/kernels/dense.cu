#include <algorithm>

#include "dense.h"
#include "halves_sm90.cuh"
#include "problem.cuh"
#if defined(TWELL_SM90A)
#include "dense_sm90.h"
#endif

namespace twell {
namespace {

// Of the tokens, this share may be dense while the others are not; from there on all are. It bounds the memory for what
// has to be gathered.
constexpr int64_t kPartDivisor = 4;

size_t h_part_bytes(twell_problem const& problem) {
    return aligned(static_cast<size_t>(max_dense_part(problem)) * spilled_stride(problem) * sizeof(uint16_t));
}

size_t x_part_bytes(twell_problem const& problem) {
    return problem.variant == TWELL_GATED
               ? aligned(static_cast<size_t>(max_dense_part(problem)) * problem.d_model * sizeof(uint16_t))
               : 0;
}

// Up to so many tokens a dense block may lack tiles for all multiprocessors.
constexpr int64_t kMostHalvedTokens = 512;
constexpr int64_t kMostTileTokens = 256;

// With the rows and columns that tiles have outside.
int64_t most_halved_sums(twell_problem const& problem) {
    auto const round_up = [](int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; };
    return round_up(std::min(problem.tokens, kMostHalvedTokens), kMostTileTokens) * round_up(problem.d_out, TWELL_TILE);
}

int num_half_states(twell_problem const& problem) {
    return static_cast<int>(most_halved_sums(problem) / kFewestHalvedSums);
}

size_t half_state_bytes(twell_problem const& problem) { return aligned(num_half_states(problem) * sizeof(uint32_t)); }

}  // namespace

int64_t max_dense_part(twell_problem const& problem) { return (problem.tokens + kPartDivisor - 1) / kPartDivisor; }

size_t dense_scratch_bytes(twell_problem const& problem) {
    return std::max(h_part_bytes(problem) + x_part_bytes(problem),
                    half_state_bytes(problem) + aligned(most_halved_sums(problem) * sizeof(float)));
}

DenseHalves dense_halves_in(twell_problem const& problem, void* scratch) {
    unsigned char* const states = static_cast<unsigned char*>(scratch);
    return {reinterpret_cast<float4*>(states + half_state_bytes(problem)), reinterpret_cast<uint32_t*>(states),
            most_halved_sums(problem), num_half_states(problem)};
}

bool is_dense_block(twell_problem const& problem, Device const& device) {
#if defined(TWELL_SM90A)
    return device.major == 9 && device.minor == 0 && dense_sm90_prefers_block(problem);
#else
    (void)problem;
    (void)device;
    return false;
#endif
}

GuardModel guard_model(twell_problem const& problem, Device const& device) {
#if defined(TWELL_SM90A)
    if (device.major == 9 && device.minor == 0 && dense_sm90_supports(problem)) {
        return dense_sm90_model(problem, device);
    }
#endif
    (void)problem;
    (void)device;
    return {};
}

Gather gather_for(twell_problem const& problem, twell_tensors const& tensors, uint32_t const* packed, uint16_t* spilled,
                  void* scratch) {
    unsigned char* const h_part = static_cast<unsigned char*>(scratch);
    Gather gather = {};
    gather.gate = {packed, spilled, num_tiles(problem), words_per_tile(problem)};
    gather.h_part = reinterpret_cast<uint16_t*>(h_part);
    if (problem.variant == TWELL_GATED) {
        gather.x = static_cast<uint16_t const*>(tensors.x);
        gather.x_part = reinterpret_cast<uint16_t*>(h_part + h_part_bytes(problem));
    }
    gather.d_model = problem.d_model;
    return gather;
}

#if !defined(TWELL_SM90A)
cudaError_t launch_dense(twell_problem const&, twell_tensors const&, Gather const&, Schedule const&, Device const&,
                         cudaStream_t) {
    return cudaErrorNotSupported;
}

cudaError_t launch_dense_block(twell_problem const&, twell_tensors const&, uint16_t*, DenseHalves const&,
                               Schedule const&, Device const&, cudaStream_t) {
    return cudaErrorNotSupported;
}
#endif

}  // namespace twell

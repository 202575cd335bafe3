// Attention: by a kernel of this library where that takes a problem (over_caches.h), else by cuDNN's graph API, whose
// plans for problems are kept.
#pragma once

#include <twell/attention.h>

#include <cstddef>
#include <map>
#include <memory>

namespace twell {

// Bytes of the workspace for rotated queries, before that of cuDNN.
size_t rotated_bytes(twell_attention_problem const& problem);

// Orders problems, so that a map can hold their plans.
struct ProblemOrder {
    bool operator()(twell_attention_problem const& a, twell_attention_problem const& b) const;
};

// A cuDNN handle and the plans that were built with it. To be used by one thread at a time, on the device that is
// current when it is first used. Must outlive the CUDA graphs that were captured from it.
class Attention {
  public:
    Attention();
    ~Attention();
    Attention(Attention const&) = delete;
    Attention& operator=(Attention const&) = delete;

    // Loads cuDNN, once a process, and makes a handle. Throws Refusal if there is none.
    void open();

    // Builds the plan of a valid problem, if it needs cuDNN and is new: not under capture. Returns the workspace that
    // its runs need, in bytes. Throws Refusal if cuDNN is not there or does not do it.
    size_t prepare(twell_attention_problem const& problem);

    // Runs a prepared problem. Throws Refusal if it is not prepared, or cuDNN fails.
    void run(twell_attention_problem const& problem, twell_attention_tensors const& tensors, void* workspace,
             cudaStream_t stream);

  private:
    class Plan;
    class Handle;

    std::unique_ptr<Handle> handle_;
    std::map<twell_attention_problem, std::unique_ptr<Plan>, ProblemOrder> plans_;
};

}  // namespace twell

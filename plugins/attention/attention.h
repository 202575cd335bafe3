// Attention by cuDNN's graph API: plans for problems, kept, and run.
#pragma once

#include <twell/attention.h>

#include <cstddef>
#include <map>
#include <memory>

namespace twell {

// Orders problems, so that a map can hold their plans.
struct ProblemOrder {
    bool operator()(twell_attention_problem const& a, twell_attention_problem const& b) const;
};

// A cuDNN handle and the plans that were built with it. To be used by one thread at a time, on the device that was
// current when it was made. Must outlive the CUDA graphs that were captured from it.
class Attention {
  public:
    // Loads cuDNN, once a process. Throws Refusal if there is none.
    Attention();
    ~Attention();
    Attention(Attention const&) = delete;
    Attention& operator=(Attention const&) = delete;

    // Builds the plan of a valid problem, if it is new: not under capture. Returns the workspace that its runs need, in
    // bytes. Throws Refusal if cuDNN does not do it.
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

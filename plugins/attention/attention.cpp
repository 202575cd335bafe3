#include "attention.h"

#include <cuda_runtime_api.h>
// The whole front end, in this file alone: it is most of the library's compile time.
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../tensorrt/common.h"
#include "append.h"
#include "over_caches.h"

// Where the front end looks up the functions of cuDNN.
void* cudnn_frontend::cudnn_dlhandle = nullptr;

namespace twell {
namespace {

namespace fe = cudnn_frontend;

constexpr char const* kLibrary = "libcudnn.so.9";
constexpr char const* kEnvironmentVariable = "TWELLC_CUDNN";

// Names of tensors in a cuDNN graph.
enum Uid : int64_t { kQ = 1, kK, kV, kY, kQueryLengths, kKeyLengths };

// The cuDNN of this process, else $TWELLC_CUDNN, else the one that the dynamic linker finds. Never closed.
void* open_cudnn() {
    void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD);
    char const* const path = std::getenv(kEnvironmentVariable);
    bool const named = path != nullptr && *path != '\0';
    if (library == nullptr) {
        library = dlopen(named ? path : kLibrary, RTLD_NOW);
    }
    if (library == nullptr) {
        char const* const error = dlerror();
        throw Refusal(std::string("cannot load cuDNN 9 (") + (error == nullptr ? kLibrary : error) +
                      "). Install it, such as by `pip install nvidia-cudnn-cu13` for Python, or set " +
                      kEnvironmentVariable + " to the path of " + kLibrary);
    }
    for (char const* name : {"cudnnGetVersion", "cudnnCreate", "cudnnBackendExecute"}) {
        if (dlsym(library, name) == nullptr) {
            throw Refusal(std::string(named ? path : kLibrary) + " is no cuDNN 9: it has no function " + name);
        }
    }
    return library;
}

void load_cudnn() {
    // Tried again after a failure.
    static bool const loaded = [] {
        fe::cudnn_dlhandle = open_cudnn();
        return true;
    }();
    (void)loaded;
}

void check(cudaError_t status, char const* what) {
    if (status != cudaSuccess) {
        throw Refusal(std::string(what) + ": " + cudaGetErrorName(status) + ", " + cudaGetErrorString(status));
    }
}

void check(fe::error_t error, char const* what) {
    if (error.is_bad()) {
        std::string message = error.get_message();
        std::replace(message.begin(), message.end(), '\n', ' ');  // a log has its own lines
        throw Refusal(std::string("cuDNN ") + std::to_string(fe::detail::get_backend_version()) + " " + what + ": " +
                      message);
    }
}

void check(cudnnStatus_t status, char const* what) {
    if (status != CUDNN_STATUS_SUCCESS) {
        throw Refusal(std::string("cuDNN ") + std::to_string(fe::detail::get_backend_version()) + " " + what + ": " +
                      fe::detail::get_error_string(status));
    }
}

// Lets this thread allocate while another one captures a CUDA graph.
class WhileOthersCapture {
  public:
    WhileOthersCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~WhileOthersCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    WhileOthersCapture(WhileOthersCapture const&) = delete;
    WhileOthersCapture& operator=(WhileOthersCapture const&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// `count` times `value` in device memory.
class Constant {
  public:
    Constant(int64_t count, int32_t value) {
        std::vector<int32_t> const values(static_cast<size_t>(count), value);
        size_t const bytes = values.size() * sizeof(int32_t);
        check(cudaMalloc(&data_, bytes), "cannot allocate the number of queries of each sequence");
        // A separate stream: the default one would wait for others, and end their capture.
        cudaStream_t stream = nullptr;
        cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        if (status == cudaSuccess) {
            status = cudaMemcpyAsync(data_, values.data(), bytes, cudaMemcpyHostToDevice, stream);
            cudaError_t const waited = cudaStreamSynchronize(stream);
            status = status == cudaSuccess ? waited : status;
            cudaStreamDestroy(stream);
        }
        if (status != cudaSuccess) {
            cudaFree(data_);
        }
        check(status, "cannot write the number of queries of each sequence");
    }
    ~Constant() { cudaFree(data_); }
    Constant(Constant const&) = delete;
    Constant& operator=(Constant const&) = delete;

    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
};

// [batch, rows, heads, width] in memory, as cuDNN names it: batch, heads, rows, width.
fe::graph::Tensor_attributes strided(char const* name, Uid uid, int64_t batch, int64_t heads, int64_t rows,
                                     int64_t width) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(uid)
        .set_dim({batch, heads, rows, width})
        .set_stride({rows * heads * width, width, heads * width, 1});
}

// [batch, heads, rows, width] in memory: a cache.
fe::graph::Tensor_attributes cached(char const* name, Uid uid, int64_t batch, int64_t heads, int64_t rows,
                                    int64_t width) {
    return strided(name, uid, batch, heads, rows, width).set_stride({heads * rows * width, rows * width, width, 1});
}

fe::graph::Tensor_attributes per_sequence(char const* name, Uid uid, int64_t batch) {
    return fe::graph::Tensor_attributes()
        .set_name(name)
        .set_uid(uid)
        .set_dim({batch, 1, 1, 1})
        .set_stride({1, 1, 1, 1})
        .set_data_type(fe::DataType_t::INT32);
}

bool does_nothing(twell_attention_problem const& problem) { return problem.batch == 0 || problem.tokens == 0; }

}  // namespace

size_t rotated_bytes(twell_attention_problem const& p) {
    size_t const bytes = static_cast<size_t>(2 * p.batch * p.tokens * p.heads * p.width);
    return p.rotated == 1 ? (bytes + 255) / 256 * 256 : 0;
}

bool ProblemOrder::operator()(twell_attention_problem const& a, twell_attention_problem const& b) const {
    auto const key = [](twell_attention_problem const& p) {
        return std::tie(p.batch, p.tokens, p.keys, p.heads, p.kv_heads, p.width, p.dtype, p.causal, p.lengths, p.scale,
                        p.cached, p.rotated, p.fp8, p.key_scale, p.value_scale);
    };
    return key(a) < key(b);
}

// ---- handle ----

class Attention::Handle {
  public:
    Handle() {
        load_cudnn();
        compute_capability_ = check_device();
        check(fe::detail::create_handle(&handle_), "cannot make a handle");
    }
    ~Handle() { fe::detail::destroy_handle(handle_); }
    Handle(Handle const&) = delete;
    Handle& operator=(Handle const&) = delete;

    cudnnHandle_t get() const { return handle_; }
    int32_t compute_capability() const { return compute_capability_; }

  private:
    cudnnHandle_t handle_ = nullptr;
    int32_t compute_capability_ = 0;
};

// ---- plan ----

class Attention::Plan {
  public:
    Plan(Handle const& handle, twell_attention_problem const& problem) : cached_(problem.cached == 1) {
        if (problem.lengths == 1) {
            query_lengths_ = std::make_unique<Constant>(problem.batch, static_cast<int32_t>(problem.tokens));
        }
        // The composite form is in every cuDNN 9 and is what frameworks run; the unified one may do what it does not.
        try {
            build(handle, problem, fe::AttentionImplementation_t::COMPOSITE);
        } catch (Refusal const& refusal) {
            try {
                build(handle, problem, fe::AttentionImplementation_t::UNIFIED);
            } catch (Refusal const&) {
                throw refusal;
            }
        }
        if (cached_ && problem.tokens > 1) {
            // cuDNN need not write places behind a sequence's last query.
            padded_bytes_ = static_cast<size_t>(2 * problem.batch * problem.tokens * problem.heads * problem.width);
        }
        int64_t bytes = 0;
        check(graph_->get_workspace_size(bytes), "does not say what workspace it needs");
        workspace_bytes_ = static_cast<size_t>(bytes);
        // Looks for functions of the driver once a process; now, not in a capture.
        fe::detail::has_current_context();
    }

    size_t workspace_bytes() const { return workspace_bytes_; }

    void run(Handle const& handle, twell_attention_tensors const& tensors, void* workspace, cudaStream_t stream) const {
        check(fe::detail::set_stream(handle.get(), stream), "cannot use this stream");
        // cuDNN writes through the pointer of y only.
        std::unordered_map<int64_t, void*> pointers{{kQ, const_cast<void*>(tensors.q)},
                                                    {kK, const_cast<void*>(tensors.k)},
                                                    {kV, const_cast<void*>(tensors.v)},
                                                    {kY, tensors.y}};
        if (query_lengths_ != nullptr) {
            pointers[kQueryLengths] = query_lengths_->data();
            pointers[kKeyLengths] = const_cast<int32_t*>(tensors.lengths);
        }
        if (cached_) {
            pointers[kQueryLengths] = const_cast<int32_t*>(tensors.query_lengths);
            pointers[kKeyLengths] = const_cast<int32_t*>(tensors.lengths);
            if (padded_bytes_ > 0) {
                check(cudaMemsetAsync(tensors.y, 0, padded_bytes_, stream), "cannot clear what is behind queries");
            }
        }
        check(graph_->execute(handle.get(), pointers, workspace), "failed");
    }

  private:
    void build(Handle const& handle, twell_attention_problem const& p, fe::AttentionImplementation_t implementation) {
        graph_ = std::make_unique<fe::graph::Graph>();
        graph_->set_io_data_type(p.dtype == TWELL_FP16 ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT)
            // Said, not asked: the front end would look for a libcudart.so, which a process need not have.
            .set_sm_version(handle.compute_capability())
            // This plan outlives the CUDA graphs that are captured from it, so these need not hold on to it. That, too,
            // would need a libcudart.so.
            .set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
        // Queries that are rotated lie as keys do then.
        auto const q =
            graph_->tensor((p.rotated == 1 ? cached : strided)("q", kQ, p.batch, p.heads, p.tokens, p.width));
        auto const keyed = p.cached == 1 ? cached : strided;
        auto const k = graph_->tensor(keyed("k", kK, p.batch, p.kv_heads, p.keys, p.width));
        auto const v = graph_->tensor(keyed("v", kV, p.batch, p.kv_heads, p.keys, p.width));
        auto options = fe::graph::SDPA_attributes();
        options.set_name("attention").set_generate_stats(false).set_attn_scale(p.scale);
        options.set_implementation(implementation);
        // One query of one key sees it either way, and not every cuDNN takes a mask for a single query.
        if (p.causal == 1 && p.tokens > 1) {
            options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
        }
        if (p.cached == 1 && p.tokens > 1) {
            options.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT).set_diagonal_band_right_bound(0);
        }
        if (p.lengths == 1 || p.cached == 1) {
            // Without a cache padding is of the keys alone: every query has a result.
            options.set_padding_mask(true)
                .set_seq_len_q(graph_->tensor(per_sequence("query_lengths", kQueryLengths, p.batch)))
                .set_seq_len_kv(graph_->tensor(per_sequence("lengths", kKeyLengths, p.batch)));
        }
        auto const y = graph_->sdpa(q, k, v, options)[0];
        int64_t const row = int64_t{p.heads} * p.width;
        y->set_output(true)
            .set_uid(kY)
            .set_dim({p.batch, p.heads, p.tokens, p.width})
            .set_stride({p.tokens * row, p.width, row, 1});
        char const* const refused = "does not do this attention";
        check(graph_->validate(), refused);
        check(graph_->build_operation_graph(handle.get()), refused);
        check(graph_->create_execution_plans({fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), refused);
        check(graph_->check_support(), refused);
        check(graph_->build_plans(), "cannot build its plan");
    }

    std::unique_ptr<fe::graph::Graph> graph_;
    std::unique_ptr<Constant> query_lengths_;
    size_t workspace_bytes_ = 0;
    bool cached_;
    size_t padded_bytes_ = 0;  // of a result that may have padding
};

// ---- attention ----

Attention::Attention() = default;

Attention::~Attention() {
    WhileOthersCapture const relaxed;
    plans_.clear();
    handle_.reset();
}

void Attention::open() {
    if (handle_ == nullptr) {
        WhileOthersCapture const relaxed;
        handle_ = std::make_unique<Handle>();
    }
}

size_t Attention::prepare(twell_attention_problem const& problem) {
    if (does_nothing(problem) || takes_caches(problem)) {
        return 0;
    }
    if (problem.fp8 == 1) {
        throw Refusal(
            "caches in FP8 need a GPU of compute capability 9.0 or newer, and heads of a width of 64, 80, 96, "
            "128 or 256");
    }
    open();
    auto found = plans_.find(problem);
    if (found == plans_.end()) {
        WhileOthersCapture const relaxed;
        found = plans_.emplace(problem, std::make_unique<Plan>(*handle_, problem)).first;
    }
    return rotated_bytes(problem) + found->second->workspace_bytes();
}

void Attention::run(twell_attention_problem const& problem, twell_attention_tensors const& tensors, void* workspace,
                    cudaStream_t stream) {
    if (does_nothing(problem)) {
        return;
    }
    if (takes_caches(problem)) {
        check(attend_over_caches(problem, tensors, stream), "cannot attend to the caches");
        return;
    }
    auto const found = plans_.find(problem);
    if (found == plans_.end()) {
        throw Refusal("run with shapes that were not set before");
    }
    twell_attention_tensors given = tensors;
    if (problem.rotated == 1) {
        check(rotate_queries(problem, tensors, workspace, stream), "cannot rotate the queries");
        given.q = workspace;
    }
    found->second->run(*handle_, given, static_cast<char*>(workspace) + rotated_bytes(problem), stream);
}

}  // namespace twell

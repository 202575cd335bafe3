// Answers a prompt greedily with a plan that has a key-value cache (twellc compile --kv-cache), and links neither
// TensorRT nor the plugins:
//
//   generate libnvinfer.so.10 libtwell_plugins.so:libtwell_attention.so bytelm.plan 64 0 105 109 112 111 114 116 32
//
// The prompt is token ids behind the number of new ones; the last line are the ids of the answer. Each cache is an
// input and an output of the plan: both are bound to one address, and the plan writes there in place. The prompt is fed
// in pieces of what the profile for prompts takes, then one token a step through that for one token of one sequence.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "host.h"

namespace {

using nvinfer1::DataType;

constexpr char kCache[] = "past_key_values.";
constexpr char kUpdated[] = "present.";

bool starts_with(std::string const& text, char const* start) { return text.rfind(start, 0) == 0; }

// Element i of logits as they come from the plan.
float element(std::vector<char> const& logits, DataType type, size_t i) {
    if (type == DataType::kFLOAT) {
        return reinterpret_cast<float const*>(logits.data())[i];
    }
    return type == DataType::kHALF ? __half2float(reinterpret_cast<__half const*>(logits.data())[i])
                                   : __bfloat162float(reinterpret_cast<__nv_bfloat16 const*>(logits.data())[i]);
}

// One sequence: the caches, and a context for prompts and one for single tokens.
class Sequence {
  public:
    explicit Sequence(nvinfer1::ICudaEngine& engine) : engine_(engine) {
        check(cudaStreamCreate(&stream_));
        for (int32_t i = 0; i < engine.getNbIOTensors(); ++i) {
            std::string const name = engine.getIOTensorName(i);
            if (starts_with(name, kCache)) {
                nvinfer1::Dims shape = engine.getTensorShape(name.c_str());
                shape.d[0] = 1;
                length_ = shape.d[2];
                memory_.push_back(allocate(bytes_of(shape, engine.getTensorDataType(name.c_str()))));
                // One address for what goes in and what comes out.
                caches_[name] = {shape, memory_.back().get()};
                caches_[kUpdated + name.substr(std::strlen(kCache))] = {shape, memory_.back().get()};
            }
        }
        if (caches_.empty()) {
            throw std::runtime_error("the plan has no key-value cache: compile it with --kv-cache LENGTH");
        }
        // Of two profiles for as many tokens the later is for the fewest sequences, and the fastest with one.
        std::map<int64_t, int32_t> profiles;
        for (int32_t profile = 0; profile < engine.getNbOptimizationProfiles(); ++profile) {
            auto const most = engine.getProfileShape("input_ids", profile, nvinfer1::OptProfileSelector::kMAX);
            profiles[most.d[1]] = profile;
        }
        for (auto const& [most, profile] : profiles) {
            auto& context = contexts_[most];
            context.reset(engine.createExecutionContext());
            context->setOptimizationProfileAsync(profile, stream_);
            for (auto const& [name, cache] : caches_) {
                if (starts_with(name, kCache)) {
                    context->setInputShape(name.c_str(), cache.shape);
                }
                context->setTensorAddress(name.c_str(), cache.address);
            }
        }
        inputs_ = allocate((chunk() + 2) * sizeof(int64_t));
    }
    ~Sequence() { cudaStreamDestroy(stream_); }
    Sequence(Sequence const&) = delete;
    Sequence& operator=(Sequence const&) = delete;

    int64_t length() const { return length_; }
    int64_t chunk() const { return contexts_.rbegin()->first; }

    // Puts tokens at the places from `place` on, and returns the likeliest next one.
    int64_t feed(std::vector<int64_t> const& tokens, int64_t place) {
        auto const count = static_cast<int64_t>(tokens.size());
        auto& context = *contexts_.lower_bound(count)->second;
        auto* const input_ids = static_cast<int64_t*>(inputs_.get());
        std::vector<int64_t> values(tokens);
        values.insert(values.end(), {place, count});
        check(cudaMemcpyAsync(input_ids, values.data(), values.size() * sizeof(int64_t), cudaMemcpyHostToDevice,
                              stream_));
        context.setInputShape("input_ids", nvinfer1::Dims2(1, count));
        context.setTensorAddress("input_ids", input_ids);
        char const* const names[] = {"write_index", "token_count"};
        for (int64_t i = 0; i < 2; ++i) {
            context.setInputShape(names[i], nvinfer1::Dims{1, {1}});
            context.setTensorAddress(names[i], input_ids + count + i);
        }
        nvinfer1::Dims const shape = context.getTensorShape("logits");
        DataType const type = engine_.getTensorDataType("logits");
        std::vector<char> logits(bytes_of(shape, type));
        if (logits.size() > logits_bytes_) {
            logits_ = allocate(logits.size());
            logits_bytes_ = logits.size();
        }
        context.setTensorAddress("logits", logits_.get());
        if (!context.enqueueV3(stream_)) {
            throw std::runtime_error("the plan fails");
        }
        check(cudaMemcpyAsync(logits.data(), logits_.get(), logits.size(), cudaMemcpyDeviceToHost, stream_));
        check(cudaStreamSynchronize(stream_));
        // The last row, if there is one for each token.
        auto const vocabulary = static_cast<size_t>(shape.d[shape.nbDims - 1]);
        size_t const first = bytes_of(shape, DataType::kINT8) - vocabulary;
        size_t best = 0;
        for (size_t i = 1; i < vocabulary; ++i) {
            best = element(logits, type, first + i) > element(logits, type, first + best) ? i : best;
        }
        return static_cast<int64_t>(best);
    }

  private:
    struct Cache {
        nvinfer1::Dims shape;
        void* address;
    };

    nvinfer1::ICudaEngine& engine_;
    cudaStream_t stream_ = nullptr;
    int64_t length_ = 0;
    std::vector<DeviceMemory> memory_;
    std::map<std::string, Cache> caches_;
    std::map<int64_t, std::unique_ptr<nvinfer1::IExecutionContext>> contexts_;  // by the most tokens that each takes
    DeviceMemory inputs_;
    DeviceMemory logits_;
    size_t logits_bytes_ = 0;
};

void run(int argc, char** argv) {
    Plan plan(argv[1], argv[2], argv[3]);
    Sequence sequence(*plan.engine);
    auto const wanted = static_cast<size_t>(std::max(1L, std::atol(argv[4])));
    std::vector<int64_t> prompt;
    for (int i = 5; i < argc; ++i) {
        prompt.push_back(std::atol(argv[i]));
    }
    if (static_cast<int64_t>(prompt.size() + wanted - 1) > sequence.length()) {
        throw std::runtime_error(std::to_string(prompt.size()) + " tokens and " + std::to_string(wanted) +
                                 " new ones do not fit into a cache of " + std::to_string(sequence.length()));
    }
    int64_t place = 0;
    int64_t token = 0;
    while (place < static_cast<int64_t>(prompt.size())) {
        auto const end = std::min<int64_t>(place + sequence.chunk(), static_cast<int64_t>(prompt.size()));
        token = sequence.feed({prompt.begin() + place, prompt.begin() + end}, place);
        place = end;
    }
    std::printf("%ld", static_cast<long>(token));
    for (size_t count = 1; count < wanted; ++count) {
        token = sequence.feed({token}, place++);
        std::printf(" %ld", static_cast<long>(token));
    }
    std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 6) {
        std::fprintf(stderr, "usage: %s TENSORRT_LIBRARY PLUGIN_LIBRARY[:ANOTHER] PLAN NEW_TOKENS TOKEN...\n", argv[0]);
        return 2;
    }
    try {
        run(argc, argv);
    } catch (std::exception const& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}

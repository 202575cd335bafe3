#include <dlfcn.h>
#include <library_types.h>

#include <array>
#include <map>
#include <mutex>

#include "host/launch.h"
#include "linear/cublas_lt.h"

namespace twell::cublas_lt {
namespace {

// Of cublasLt.h, which no wheel has without 570 MB of libraries: the same in versions 12 and 13, behind each number its
// name there. test_linear.py compares them with the header that torch brings.
using Handle = void*;
using Status = int;  // 0: success
enum Compute {
    kCompute32F = 68,  // CUBLAS_COMPUTE_32F
};
enum Transpose : int32_t {
    kTransposed = 1,  // CUBLAS_OP_T
};
enum Attribute {
    kTransposeA = 3,   // CUBLASLT_MATMUL_DESC_TRANSA
    kEpilogue = 7,     // CUBLASLT_MATMUL_DESC_EPILOGUE
    kBiasPointer = 8,  // CUBLASLT_MATMUL_DESC_BIAS_POINTER
    kScaleOfA = 17,    // CUBLASLT_MATMUL_DESC_A_SCALE_POINTER
    kScaleOfB = 18,    // CUBLASLT_MATMUL_DESC_B_SCALE_POINTER
    kFastSums = 25,    // CUBLASLT_MATMUL_DESC_FAST_ACCUM
    kScalesOfA = 31,   // CUBLASLT_MATMUL_DESC_A_SCALE_MODE
    kScalesOfB = 32,   // CUBLASLT_MATMUL_DESC_B_SCALE_MODE
};
enum Scales : int32_t {
    kOfEachRow = 3,    // CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F
    kOfEachGroup = 4,  // CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
    kOfEachBlock = 5,  // CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
};
enum Epilogue : uint32_t {
    kPlain = 1,  // CUBLASLT_EPILOGUE_DEFAULT
    kBias = 4,   // CUBLASLT_EPILOGUE_BIAS
};
enum Preference {
    kMostWorkspace = 1,   // CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES
    kReductions = 3,      // CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK
    kFirstAlignment = 5,  // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES
    kLastAlignment = 8,   // CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES
};
constexpr uint32_t kSumsInFp32 = 2;  // CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: of parts of a sum, or none

struct Algorithm {
    uint64_t data[8];
};

struct Found {
    Algorithm algorithm;
    size_t workspace_bytes;
    Status status;
    float waves;
    int reserved[4];
};

struct Library {
    size_t (*version)();
    Status (*create)(Handle*);
    Status (*create_operation)(void**, int compute_type, int scale_type);
    Status (*set_operation)(void*, int attribute, void const*, size_t);
    Status (*destroy_operation)(void*);
    Status (*create_layout)(void**, int type, uint64_t rows, uint64_t columns, int64_t stride);
    Status (*destroy_layout)(void*);
    Status (*create_preference)(void**);
    Status (*set_preference)(void*, int attribute, void const*, size_t);
    Status (*destroy_preference)(void*);
    Status (*find)(Handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int most, Found*,
                   int* count);
    Status (*multiply)(Handle, void* operation, void const* alpha, void const* a, void* a_layout, void const* b,
                       void* b_layout, void const* beta, void const* c, void* c_layout, void* d, void* d_layout,
                       Algorithm const*, void* workspace, size_t workspace_bytes, cudaStream_t);
    bool complete = true;
};

template <class Function>
void bind(Library& library, void* handle, Function*& function, char const* name) {
    function = reinterpret_cast<Function*>(dlsym(handle, name));
    library.complete = library.complete && function != nullptr;
}

// Null where there is none. Never closed.
Library const* library() {
    static Library const* const found = []() -> Library const* {
        void* handle = nullptr;
        for (int const flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
            for (char const* const name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
                handle = handle != nullptr ? handle : dlopen(name, flags);
            }
        }
        if (handle == nullptr) {
            return nullptr;
        }
        auto* const library = new Library{};
        bind(*library, handle, library->version, "cublasLtGetVersion");
        bind(*library, handle, library->create, "cublasLtCreate");
        bind(*library, handle, library->create_operation, "cublasLtMatmulDescCreate");
        bind(*library, handle, library->set_operation, "cublasLtMatmulDescSetAttribute");
        bind(*library, handle, library->destroy_operation, "cublasLtMatmulDescDestroy");
        bind(*library, handle, library->create_layout, "cublasLtMatrixLayoutCreate");
        bind(*library, handle, library->destroy_layout, "cublasLtMatrixLayoutDestroy");
        bind(*library, handle, library->create_preference, "cublasLtMatmulPreferenceCreate");
        bind(*library, handle, library->set_preference, "cublasLtMatmulPreferenceSetAttribute");
        bind(*library, handle, library->destroy_preference, "cublasLtMatmulPreferenceDestroy");
        bind(*library, handle, library->find, "cublasLtMatmulAlgoGetHeuristic");
        bind(*library, handle, library->multiply, "cublasLtMatmul");
        return library->complete ? library : nullptr;
    }();
    return found;
}

// A descriptor of cuBLASLt, which lives as long as this does.
class Descriptor {
  public:
    explicit Descriptor(Status (*destroy)(void*)) : destroy_(destroy) {}
    Descriptor(Descriptor const&) = delete;
    Descriptor& operator=(Descriptor const&) = delete;
    ~Descriptor() {
        if (address_ != nullptr) {
            destroy_(address_);
        }
    }
    void** out() { return &address_; }
    operator void*() const { return address_; }

  private:
    Status (*destroy_)(void*);
    void* address_ = nullptr;
};

// Handles by device, and algorithms by device and problem: asking takes longer than launching.
struct Known {
    using Key = std::array<int64_t, 10>;
    static constexpr size_t kMost = 4096;
    std::mutex mutex;
    std::map<int, Handle> handles;
    std::map<Key, Found> algorithms;
};

Known& known() {
    static Known& all = *new Known;
    return all;
}

// Tensor cores drop the last bits of sums of E4M3, the more the longer these are. An H100 makes the error of rounded
// rows 0.02655 in the place of 0.02653 with 2048 inputs. Beyond so many, parts of a sum are added in fp32.
constexpr int64_t kMostFastInputs = 8192;

// Sets attributes of a product in E4M3; true: it failed.
bool set_scales(Library const& lt, void* operation, Product const& product) {
    int32_t const of_weight = product.by_block ? kOfEachBlock : kOfEachRow;
    int32_t const of_x = product.by_block ? kOfEachGroup : kOfEachRow;
    int8_t const fast = !product.by_block && product.in <= kMostFastInputs;
    return lt.set_operation(operation, kScalesOfA, &of_weight, sizeof(of_weight)) != 0 ||
           lt.set_operation(operation, kScalesOfB, &of_x, sizeof(of_x)) != 0 ||
           lt.set_operation(operation, kScaleOfA, &product.weight_scale, sizeof(product.weight_scale)) != 0 ||
           lt.set_operation(operation, kScaleOfB, &product.x_scale, sizeof(product.x_scale)) != 0 ||
           lt.set_operation(operation, kFastSums, &fast, sizeof(fast)) != 0;
}

}  // namespace

size_t version() {
    Library const* const lt = library();
    return lt == nullptr ? 0 : lt->version();
}

// In the column-major words of cuBLASLt: y^T [out, tokens] = W x^T, W stored as its transpose.
cudaError_t multiply(Product const& product, void* workspace, cudaStream_t stream) {
    Library const* const lt = library();
    int device = 0;
    TWELL_TRY(cudaGetDevice(&device));
    if (lt == nullptr) {
        return cudaErrorNotSupported;
    }
    Descriptor operation(lt->destroy_operation);
    Descriptor weight(lt->destroy_layout);
    Descriptor x(lt->destroy_layout);
    Descriptor y(lt->destroy_layout);
    int32_t const transposed = kTransposed;
    uint32_t const epilogue = product.bias == nullptr ? kPlain : kBias;
    int const type = product.is_bf16 ? CUDA_R_16BF : CUDA_R_16F;
    bool const scaled = product.x_scale != nullptr;
    int const type_in = scaled ? CUDA_R_8F_E4M3 : type;
    bool failed = lt->create_operation(operation.out(), kCompute32F, CUDA_R_32F) != 0 ||
                  lt->set_operation(operation, kTransposeA, &transposed, sizeof(transposed)) != 0 ||
                  lt->set_operation(operation, kEpilogue, &epilogue, sizeof(epilogue)) != 0 ||
                  lt->create_layout(weight.out(), type_in, product.in, product.out, product.in) != 0 ||
                  lt->create_layout(x.out(), type_in, product.in, product.tokens, product.in) != 0 ||
                  lt->create_layout(y.out(), type, product.out, product.tokens, product.stride) != 0;
    if (!failed && product.bias != nullptr) {
        failed = lt->set_operation(operation, kBiasPointer, &product.bias, sizeof(product.bias)) != 0;
    }
    if (failed || (scaled && set_scales(*lt, operation, product))) {
        return cudaErrorNotSupported;
    }

    Handle handle = nullptr;
    Found found = {};
    {
        Known& all = known();
        std::lock_guard<std::mutex> const lock(all.mutex);
        Handle& of_device = all.handles[device];
        if (of_device == nullptr && lt->create(&of_device) != 0) {
            return cudaErrorNotSupported;
        }
        handle = of_device;
        Known::Key const key = {device,          type,       type_in,
                                product.tokens,  product.in, product.out,
                                product.stride,  epilogue,   product.residual != nullptr,
                                product.by_block};
        auto const place = all.algorithms.find(key);
        if (place != all.algorithms.end()) {
            found = place->second;
        } else {
            Descriptor preference(lt->destroy_preference);
            uint64_t const bytes = kWorkspaceBytes;
            uint32_t const alignment = 16;
            int count = 0;
            failed = lt->create_preference(preference.out()) != 0 ||
                     lt->set_preference(preference, kMostWorkspace, &bytes, sizeof(bytes)) != 0 ||
                     lt->set_preference(preference, kReductions, &kSumsInFp32, sizeof(kSumsInFp32)) != 0;
            for (int operand = kFirstAlignment; operand <= kLastAlignment && !failed; ++operand) {
                failed = lt->set_preference(preference, operand, &alignment, sizeof(alignment)) != 0;
            }
            failed = failed || lt->find(handle, operation, weight, x, y, y, preference, 1, &found, &count) != 0;
            if (failed || count < 1 || found.status != 0) {
                return cudaErrorNotSupported;
            }
            if (all.algorithms.size() >= Known::kMost) {
                all.algorithms.clear();
            }
            all.algorithms[key] = found;
        }
    }
    float const one = 1.0f;
    float const added = product.residual == nullptr ? 0.0f : 1.0f;
    void const* const before = product.residual == nullptr ? product.y : product.residual;
    Status const status = lt->multiply(handle, operation, &one, product.weight, weight, product.x, x, &added, before, y,
                                       product.y, y, &found.algorithm, workspace, kWorkspaceBytes, stream);
    return status == 0 ? cudaSuccess : cudaErrorUnknown;
}

}  // namespace twell::cublas_lt

// A plugin library of somebody else: OtherCopy, whose output has the shape and type of its input.
#include <NvInferRuntime.h>

using namespace nvinfer1;

namespace {

class Copy final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuild, public IPluginV3OneRuntime {
  public:
    IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
        switch (type) {
            case PluginCapabilityType::kCORE:
                return static_cast<IPluginV3OneCore*>(this);
            case PluginCapabilityType::kBUILD:
                return static_cast<IPluginV3OneBuild*>(this);
            case PluginCapabilityType::kRUNTIME:
                return static_cast<IPluginV3OneRuntime*>(this);
        }
        return nullptr;
    }
    IPluginV3* clone() noexcept override { return new Copy(*this); }
    char const* getPluginName() const noexcept override { return "OtherCopy"; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    char const* getPluginNamespace() const noexcept override { return "others"; }

    int32_t getNbOutputs() const noexcept override { return 1; }
    int32_t getOutputDataTypes(DataType* outputs, int32_t, DataType const* inputs, int32_t) const noexcept override {
        outputs[0] = inputs[0];
        return 0;
    }
    int32_t getOutputShapes(DimsExprs const* inputs, int32_t, DimsExprs const*, int32_t, DimsExprs* outputs, int32_t,
                            IExprBuilder&) noexcept override {
        outputs[0] = inputs[0];
        return 0;
    }
    bool supportsFormatCombination(int32_t slot, DynamicPluginTensorDesc const* tensors, int32_t,
                                   int32_t) noexcept override {
        return tensors[slot].desc.format == TensorFormat::kLINEAR && tensors[slot].desc.type == tensors[0].desc.type;
    }
    int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                            int32_t) noexcept override {
        return 0;
    }

    IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
    int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
        return 0;
    }
    int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                    cudaStream_t) noexcept override {
        return 1;  // nobody runs it
    }
    PluginFieldCollection const* getFieldsToSerialize() noexcept override { return &fields_; }

  private:
    PluginFieldCollection fields_{0, nullptr};
};

class Creator final : public IPluginCreatorV3One {
  public:
    IPluginV3* createPlugin(char const*, PluginFieldCollection const*, TensorRTPhase) noexcept override {
        return new Copy();
    }
    PluginFieldCollection const* getFieldNames() noexcept override { return &fields_; }
    char const* getPluginName() const noexcept override { return "OtherCopy"; }
    char const* getPluginVersion() const noexcept override { return "1"; }
    char const* getPluginNamespace() const noexcept override { return "others"; }

  private:
    PluginFieldCollection fields_{0, nullptr};
};

}  // namespace

extern "C" void setLoggerFinder(ILoggerFinder*) {}

extern "C" IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static Creator creator;
    static IPluginCreatorInterface* const all[] = {&creator};
    count = 1;
    return all;
}

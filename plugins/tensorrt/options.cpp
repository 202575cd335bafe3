#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace twell {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr char const* kActivation = "activation";
constexpr char const* kThreshold = "threshold";
constexpr char const* kCompression = "compression";
constexpr char const* kGateBias = "gate_bias";
constexpr char const* kUpBias = "up_bias";
constexpr char const* kDownBias = "down_bias";
constexpr char const* kResidualField = "residual";
// In plans only: raised whenever the meaning of the plan fields changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 2;

struct ActivationName {
    char const* name;
    int32_t value;
};
constexpr ActivationName kActivations[] = {
    {"relu", TWELL_RELU},
    {"relu2", TWELL_RELU2},
    {"fatrelu", TWELL_FATRELU},
    {"drelu", TWELL_DRELU},  // last, because a plain block has all but this one
};

int32_t activation_count(twell_variant variant) { return variant == TWELL_GATED ? 4 : 3; }

// Text from a node or a plan, safe to print: short and without control characters.
std::string printable(std::string_view text) {
    constexpr size_t kLongest = 64;
    std::string out(text.substr(0, kLongest));
    std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
    return text.size() > kLongest ? out + "..." : out;
}

char const* type_name(PluginFieldType type) {
    constexpr char const* kNames[] = {"float16", "float32", "float64",  "int8",  "int16", "int32", "char",
                                      "dims",    "unknown", "bfloat16", "int64", "fp8",   "int4",  "fp4"};
    auto const index = static_cast<size_t>(type);
    return index < std::size(kNames) ? kNames[index] : "an unknown type";
}

// "a, b or c"
std::string one_of(std::vector<std::string> const& items) {
    std::string out;
    for (size_t i = 0; i < items.size(); ++i) {
        out += i == 0 ? "" : i + 1 == items.size() ? " or " : ", ";
        out += items[i];
    }
    return out;
}

[[noreturn]] void refuse(char const* field, std::string const& got, std::string const& allowed) {
    throw Refusal("field '" + std::string(field) + "': got " + got + "; allowed: " + allowed);
}

// The fields of a collection, each of which must be taken exactly once.
class FieldReader {
  public:
    explicit FieldReader(PluginFieldCollection const* collection) {
        if (collection == nullptr || collection->nbFields < 0 ||
            (collection->nbFields > 0 && collection->fields == nullptr)) {
            throw Refusal("the host passed no field collection");
        }
        for (int32_t i = 0; i < collection->nbFields; ++i) {
            PluginField const& field = collection->fields[i];
            if (field.name == nullptr) {
                throw Refusal("the host passed a field without a name");
            }
            for (PluginField const* other : left_) {
                if (std::strcmp(other->name, field.name) == 0) {
                    throw Refusal("field '" + printable(field.name) + "' is given twice");
                }
            }
            left_.push_back(&field);
        }
    }

    bool has(char const* name) const { return find(name) != left_.end(); }

    int32_t integer(char const* name, std::vector<int32_t> const& allowed) {
        std::vector<std::string> names;
        std::transform(allowed.begin(), allowed.end(), std::back_inserter(names),
                       [](int32_t value) { return std::to_string(value); });
        auto const value = scalar<int32_t>(name, PluginFieldType::kINT32, one_of(names));
        if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
            refuse(name, std::to_string(value), one_of(names));
        }
        return value;
    }

    float number(char const* name, std::string const& allowed) {
        return scalar<float>(name, PluginFieldType::kFLOAT32, allowed);
    }

    // ONNX strings arrive with their final NUL counted; hosts that build fields by hand may leave it out.
    std::string text(char const* name, std::string const& allowed) {
        PluginField const& field = take(name, allowed);
        if (field.type != PluginFieldType::kCHAR || field.length < 0 || (field.length > 0 && field.data == nullptr)) {
            refuse(name, describe(field), "a string, " + allowed);
        }
        std::string value(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
        if (!value.empty() && value.back() == '\0') {
            value.pop_back();
        }
        return value;
    }

    void reject_rest(std::vector<PluginField> const& known) const {
        if (left_.empty()) {
            return;
        }
        std::string names;
        for (PluginField const& field : known) {
            names += (names.empty() ? "" : ", ") + std::string(field.name);
        }
        throw Refusal("field '" + printable(left_.front()->name) + "' is unknown; allowed: " + names);
    }

  private:
    std::vector<PluginField const*>::const_iterator find(char const* name) const {
        return std::find_if(left_.begin(), left_.end(),
                            [name](PluginField const* field) { return std::strcmp(field->name, name) == 0; });
    }

    PluginField const& take(char const* name, std::string const& allowed) {
        auto const found = find(name);
        if (found == left_.end()) {
            throw Refusal("field '" + std::string(name) + "' is missing; allowed: " + allowed);
        }
        PluginField const& field = **found;
        left_.erase(found);
        return field;
    }

    template <typename T>
    T scalar(char const* name, PluginFieldType type, std::string const& allowed) {
        PluginField const& field = take(name, allowed);
        if (field.type != type || field.length != 1 || field.data == nullptr) {
            refuse(name, describe(field), std::string("one ") + type_name(type) + ", " + allowed);
        }
        T value{};
        std::memcpy(&value, field.data, sizeof(value));  // a host's field data need not be aligned
        return value;
    }

    static std::string describe(PluginField const& field) {
        if (field.data == nullptr) {
            return "no data";
        }
        return std::to_string(field.length) + " of type " + type_name(field.type);
    }

    std::vector<PluginField const*> left_;
};

int32_t read_activation(twell_variant variant, FieldReader& fields, TensorRTPhase phase) {
    auto const count = static_cast<size_t>(activation_count(variant));
    if (phase == TensorRTPhase::kRUNTIME) {
        std::vector<int32_t> codes;
        for (size_t i = 0; i < count; ++i) {
            codes.push_back(kActivations[i].value);
        }
        return fields.integer(kActivation, codes);
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) {
        names.emplace_back(kActivations[i].name);
    }
    std::string const name = fields.text(kActivation, one_of(names));
    auto const found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
        refuse(kActivation, "'" + printable(name) + "'", one_of(names));
    }
    return kActivations[found - names.begin()].value;
}

float read_threshold(int32_t activation, FieldReader& fields, TensorRTPhase phase) {
    // Only a plan must say it: at build time leaving it out means 0.
    if (phase == TensorRTPhase::kBUILD && !fields.has(kThreshold)) {
        return 0.0F;
    }
    char const* const allowed =
        activation == TWELL_FATRELU ? "finite and at least 0" : "0, because only fatrelu takes a threshold";
    float const value = fields.number(kThreshold, allowed);
    bool const good = activation == TWELL_FATRELU ? std::isfinite(value) && value >= 0.0F : value == 0.0F;
    if (!good) {
        char got[32];
        std::snprintf(got, sizeof(got), "%g", static_cast<double>(value));  // std::to_string makes 1e-7 a 0
        refuse(kThreshold, got, allowed);
    }
    return value;
}

Options read_fields(twell_variant variant, PluginFieldCollection const* collection, TensorRTPhase phase) {
    FieldReader fields(collection);
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kSchemaVersion});
    }
    Options options;
    options.activation = read_activation(variant, fields, phase);
    options.threshold = read_threshold(options.activation, fields, phase);
    options.compression = fields.integer(kCompression, {1, 2, 4, 8});
    if (variant == TWELL_GATED) {
        options.b_gate = fields.integer(kGateBias, {0, 1}) == 1;
        options.b_up = fields.integer(kUpBias, {0, 1}) == 1;
    } else {
        options.b_gate = fields.integer(kUpBias, {0, 1}) == 1;
    }
    options.b_down = fields.integer(kDownBias, {0, 1}) == 1;
    options.residual = fields.integer(kResidualField, {0, 1}) == 1;
    fields.reject_rest(field_names(variant));
    return options;
}

}  // namespace

std::vector<PluginField> field_names(twell_variant variant) {
    std::vector<PluginField> fields{
        {kActivation, nullptr, PluginFieldType::kCHAR, 1},   {kThreshold, nullptr, PluginFieldType::kFLOAT32, 1},
        {kCompression, nullptr, PluginFieldType::kINT32, 1}, {kUpBias, nullptr, PluginFieldType::kINT32, 1},
        {kDownBias, nullptr, PluginFieldType::kINT32, 1},    {kResidualField, nullptr, PluginFieldType::kINT32, 1},
    };
    if (variant == TWELL_GATED) {
        fields.emplace_back(kGateBias, nullptr, PluginFieldType::kINT32, 1);
    }
    return fields;
}

Options read_options(twell_variant variant, PluginFieldCollection const* collection, TensorRTPhase phase) {
    try {
        return read_fields(variant, collection, phase);
    } catch (Refusal const& refusal) {
        if (phase != TensorRTPhase::kRUNTIME) {
            throw;
        }
        throw Refusal(std::string(refusal.what()) + ". The plan is damaged, or built for another libtwell_plugins.so " +
                      "than this one of version " + twell_version() +
                      ": use that of the twellc that built it, which the plan's manifest names, or compile again");
    }
}

Serialized::Serialized(twell_variant variant, Options const& options) : threshold_(options.threshold) {
    size_t used = 0;
    auto const add = [&](char const* name, int32_t value) {
        integers_[used] = value;
        fields_.emplace_back(name, &integers_[used], PluginFieldType::kINT32, 1);
        ++used;
    };
    add(kSchema, kSchemaVersion);
    add(kActivation, options.activation);
    fields_.emplace_back(kThreshold, &threshold_, PluginFieldType::kFLOAT32, 1);
    add(kCompression, options.compression);
    if (variant == TWELL_GATED) {
        add(kGateBias, options.b_gate ? 1 : 0);
        add(kUpBias, options.b_up ? 1 : 0);
    } else {
        add(kUpBias, options.b_gate ? 1 : 0);
    }
    add(kDownBias, options.b_down ? 1 : 0);
    add(kResidualField, options.residual ? 1 : 0);
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

}  // namespace twell

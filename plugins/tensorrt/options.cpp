#include "options.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <string>

namespace twell {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr char const* kActivation = "activation";
constexpr char const* kThreshold = "threshold";
constexpr char const* kCompression = "compression";
constexpr char const* kHot = "hot";
constexpr char const* kGateBias = "gate_bias";
constexpr char const* kUpBias = "up_bias";
constexpr char const* kDownBias = "down_bias";
constexpr char const* kResidualField = "residual";
// May be left out, in a plan, too: then there are none. Plans of before there were any have none.
constexpr char const* kScales = "scales";
constexpr char const* kThresholds = "thresholds";
constexpr char const* kNorm = "norm";
constexpr char const* kEps = "eps";
constexpr char const* kNormWeight = "norm_weight";
constexpr char const* kNormBias = "norm_bias";
// In plans only: raised whenever the meaning of the plan fields changes.
constexpr char const* kSchema = "schema";
constexpr int32_t kSchemaVersion = 3;

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

constexpr char const* kNorms[] = {"none", "rms", "layer"};  // in the order of twell_norm

int32_t activation_count(twell_variant variant) { return variant == TWELL_GATED ? 4 : 3; }

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
    options.hot = fields.integer(kHot, 0, TWELL_MAX_D_FF);
    if (variant == TWELL_GATED) {
        options.b_gate = fields.integer(kGateBias, {0, 1}) == 1;
        options.b_up = fields.integer(kUpBias, {0, 1}) == 1;
    } else {
        options.b_gate = fields.integer(kUpBias, {0, 1}) == 1;
    }
    options.b_down = fields.integer(kDownBias, {0, 1}) == 1;
    options.residual = fields.integer(kResidualField, {0, 1}) == 1;
    options.scales = fields.has(kScales) && fields.integer(kScales, {0, 1}) == 1;
    options.thresholds = fields.has(kThresholds) && fields.integer(kThresholds, {0, 1}) == 1;
    if (options.thresholds && (options.activation != TWELL_FATRELU || options.threshold != 0.0F)) {
        refuse(kThresholds, "1", "0, because only fatrelu with threshold 0 takes thresholds");
    }
    options.norm = fields.has(kNorm) ? read_norm(fields, phase) : TWELL_NORM_NONE;
    options.eps = fields.has(kEps) ? read_eps(fields) : 0.0F;
    options.norm_weight = fields.has(kNormWeight) && fields.integer(kNormWeight, {0, 1}) == 1;
    options.norm_bias = fields.has(kNormBias) && fields.integer(kNormBias, {0, 1}) == 1;
    check_norm_inputs(options.norm, options.norm_weight, options.norm_bias);
    fields.reject_rest(field_names(variant));
    return options;
}

}  // namespace

int32_t read_norm(FieldReader& fields, TensorRTPhase phase) {
    if (phase == TensorRTPhase::kRUNTIME) {
        return fields.integer(kNorm, {TWELL_NORM_NONE, TWELL_NORM_RMS, TWELL_NORM_LAYER});
    }
    std::vector<std::string> const names(std::begin(kNorms), std::end(kNorms));
    std::string const name = fields.text(kNorm, one_of(names));
    auto const found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
        refuse(kNorm, "'" + printable(name) + "'", one_of(names));
    }
    return static_cast<int32_t>(found - names.begin());
}

float read_eps(FieldReader& fields) {
    char const* const allowed = "finite and at least 0";
    float const eps = fields.number(kEps, allowed);
    if (!std::isfinite(eps) || eps < 0.0F) {
        refuse(kEps, std::to_string(eps), allowed);
    }
    return eps;
}

void check_norm_inputs(int32_t norm, bool weight, bool bias) {
    if (weight && norm == TWELL_NORM_NONE) {
        refuse(kNormWeight, "1", "0 without a norm");
    }
    if (bias && norm != TWELL_NORM_LAYER) {
        refuse(kNormBias, "1", "0 without a layer norm");
    }
}

std::vector<PluginField> field_names(twell_variant variant) {
    std::vector<PluginField> fields{
        {kActivation, nullptr, PluginFieldType::kCHAR, 1},     {kThreshold, nullptr, PluginFieldType::kFLOAT32, 1},
        {kCompression, nullptr, PluginFieldType::kINT32, 1},   {kHot, nullptr, PluginFieldType::kINT32, 1},
        {kUpBias, nullptr, PluginFieldType::kINT32, 1},        {kDownBias, nullptr, PluginFieldType::kINT32, 1},
        {kResidualField, nullptr, PluginFieldType::kINT32, 1}, {kScales, nullptr, PluginFieldType::kINT32, 1},
        {kThresholds, nullptr, PluginFieldType::kINT32, 1},    {kNorm, nullptr, PluginFieldType::kCHAR, 1},
        {kEps, nullptr, PluginFieldType::kFLOAT32, 1},         {kNormWeight, nullptr, PluginFieldType::kINT32, 1},
        {kNormBias, nullptr, PluginFieldType::kINT32, 1},
    };
    if (variant == TWELL_GATED) {
        fields.emplace_back(kGateBias, nullptr, PluginFieldType::kINT32, 1);
    }
    return fields;
}

Options read_options(twell_variant variant, PluginFieldCollection const* collection, TensorRTPhase phase) {
    return read_with_advice(phase, "libtwell_plugins.so", twell_version(),
                            [&] { return read_fields(variant, collection, phase); });
}

Serialized::Serialized(twell_variant variant, Options const& options)
    : threshold_(options.threshold), eps_(options.eps) {
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
    add(kHot, options.hot);
    if (variant == TWELL_GATED) {
        add(kGateBias, options.b_gate ? 1 : 0);
        add(kUpBias, options.b_up ? 1 : 0);
    } else {
        add(kUpBias, options.b_gate ? 1 : 0);
    }
    add(kDownBias, options.b_down ? 1 : 0);
    add(kResidualField, options.residual ? 1 : 0);
    if (options.scales) {  // else as before there were any: older libraries read such plans, too
        add(kScales, 1);
    }
    if (options.thresholds) {
        add(kThresholds, 1);
    }
    if (options.norm != TWELL_NORM_NONE) {
        add(kNorm, options.norm);
        fields_.emplace_back(kEps, &eps_, PluginFieldType::kFLOAT32, 1);
        add(kNormWeight, options.norm_weight ? 1 : 0);
        add(kNormBias, options.norm_bias ? 1 : 0);
    }
    collection_.nbFields = static_cast<int32_t>(fields_.size());
    collection_.fields = fields_.data();
}

}  // namespace twell

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

constexpr char const* kCompression = "compression";
constexpr char const* kHot = "hot";
constexpr char const* kGateBias = "gate_bias";
constexpr char const* kUpBias = "up_bias";
constexpr char const* kDownBias = "down_bias";
constexpr char const* kResidualField = "residual";
constexpr char const* kNormWeightField = "norm_weight";
constexpr char const* kNormBiasField = "norm_bias";
constexpr int32_t kBlockSchema = 3;

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

Options read_fields(twell_variant variant, PluginFieldCollection const* collection, TensorRTPhase phase) {
    FieldReader fields(collection);
    if (phase == TensorRTPhase::kRUNTIME) {
        fields.integer(kSchema, {kBlockSchema});
    }
    Options options;
    options.activation = read_activation(variant, fields, phase);
    options.threshold = read_threshold(options.activation, fields, phase);
    options.compression = fields.integer(kCompression, {1, 2, 4, 8});
    options.hot = fields.integer(kHot, 0, TWELL_MAX_D_FF);
    if (variant == TWELL_GATED) {
        options.b_gate = fields.flag(kGateBias);
        options.b_up = fields.flag(kUpBias);
    } else {
        options.b_gate = fields.flag(kUpBias);
    }
    options.b_down = fields.flag(kDownBias);
    options.residual = fields.flag(kResidualField);
    options.scales = fields.newer_flag(field::kScales);
    options.thresholds = fields.newer_flag(field::kThresholds);
    check_thresholds(options.thresholds, options.activation, options.threshold);
    options.norm = fields.has(field::kNorm) ? read_norm(fields, phase) : TWELL_NORM_NONE;
    options.eps = fields.has(field::kEps) ? read_eps(fields) : 0.0F;
    options.norm_weight = fields.newer_flag(kNormWeightField);
    options.norm_bias = fields.newer_flag(kNormBiasField);
    check_norm_inputs(options.norm, options.norm_weight, options.norm_bias);
    fields.reject_rest(field_names(variant));
    return options;
}

}  // namespace

int32_t read_activation(twell_variant variant, FieldReader& fields, TensorRTPhase phase) {
    auto const count = static_cast<size_t>(activation_count(variant));
    if (phase == TensorRTPhase::kRUNTIME) {
        std::vector<int32_t> codes;
        for (size_t i = 0; i < count; ++i) {
            codes.push_back(kActivations[i].value);
        }
        return fields.integer(field::kActivation, codes);
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) {
        names.emplace_back(kActivations[i].name);
    }
    std::string const name = fields.text(field::kActivation, one_of(names));
    auto const found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
        refuse(field::kActivation, "'" + printable(name) + "'", one_of(names));
    }
    return kActivations[found - names.begin()].value;
}

float read_threshold(int32_t activation, FieldReader& fields, TensorRTPhase phase) {
    // Only a plan must say it: at build time leaving it out means 0.
    if (phase == TensorRTPhase::kBUILD && !fields.has(field::kThreshold)) {
        return 0.0F;
    }
    char const* const allowed =
        activation == TWELL_FATRELU ? "finite and at least 0" : "0, because only fatrelu takes a threshold";
    float const value = fields.number(field::kThreshold, allowed);
    bool const good = activation == TWELL_FATRELU ? std::isfinite(value) && value >= 0.0F : value == 0.0F;
    if (!good) {
        char got[32];
        std::snprintf(got, sizeof(got), "%g", static_cast<double>(value));  // std::to_string makes 1e-7 a 0
        refuse(field::kThreshold, got, allowed);
    }
    return value;
}

int32_t read_norm(FieldReader& fields, TensorRTPhase phase) {
    if (phase == TensorRTPhase::kRUNTIME) {
        return fields.integer(field::kNorm, {TWELL_NORM_NONE, TWELL_NORM_RMS, TWELL_NORM_LAYER});
    }
    std::vector<std::string> const names(std::begin(kNorms), std::end(kNorms));
    std::string const name = fields.text(field::kNorm, one_of(names));
    auto const found = std::find(names.begin(), names.end(), name);
    if (found == names.end()) {
        refuse(field::kNorm, "'" + printable(name) + "'", one_of(names));
    }
    return static_cast<int32_t>(found - names.begin());
}

float read_eps(FieldReader& fields) {
    char const* const allowed = "finite and at least 0";
    float const eps = fields.number(field::kEps, allowed);
    if (!std::isfinite(eps) || eps < 0.0F) {
        refuse(field::kEps, std::to_string(eps), allowed);
    }
    return eps;
}

void check_thresholds(bool thresholds, int32_t activation, float threshold) {
    if (thresholds && (activation != TWELL_FATRELU || threshold != 0.0F)) {
        refuse(field::kThresholds, "1", "0, because only fatrelu with threshold 0 takes thresholds");
    }
}

void check_norm_inputs(int32_t norm, bool weight, bool bias) {
    if (weight && norm == TWELL_NORM_NONE) {
        refuse(kNormWeightField, "1", "0 without a norm");
    }
    if (bias && norm != TWELL_NORM_LAYER) {
        refuse(kNormBiasField, "1", "0 without a layer norm");
    }
}

std::vector<PluginField> field_names(twell_variant variant) {
    std::vector<PluginField> fields{known_field(field::kActivation, PluginFieldType::kCHAR),
                                    known_field(field::kThreshold, PluginFieldType::kFLOAT32),
                                    known_integer(kCompression),
                                    known_integer(kHot),
                                    known_integer(kUpBias),
                                    known_integer(kDownBias),
                                    known_integer(kResidualField),
                                    known_integer(field::kScales),
                                    known_integer(field::kThresholds),
                                    known_field(field::kNorm, PluginFieldType::kCHAR),
                                    known_field(field::kEps, PluginFieldType::kFLOAT32),
                                    known_integer(kNormWeightField),
                                    known_integer(kNormBiasField)};
    if (variant == TWELL_GATED) {
        fields.push_back(known_integer(kGateBias));
    }
    return fields;
}

Options read_options(twell_variant variant, PluginFieldCollection const* collection, TensorRTPhase phase) {
    return read_with_advice(phase, "libtwell_plugins.so", twell_version(),
                            [&] { return read_fields(variant, collection, phase); });
}

std::unique_ptr<PlanFields> plan_fields_of(twell_variant variant, Options const& options) {
    auto fields = std::make_unique<PlanFields>(kBlockSchema);
    fields->add(field::kActivation, options.activation);
    fields->add(field::kThreshold, options.threshold);
    fields->add(kCompression, options.compression);
    fields->add(kHot, options.hot);
    if (variant == TWELL_GATED) {
        fields->add(kGateBias, options.b_gate);
        fields->add(kUpBias, options.b_up);
    } else {
        fields->add(kUpBias, options.b_gate);
    }
    fields->add(kDownBias, options.b_down);
    fields->add(kResidualField, options.residual);
    if (options.scales) {  // else as before there were any: older libraries read such plans, too
        fields->add(field::kScales, true);
    }
    if (options.thresholds) {
        fields->add(field::kThresholds, true);
    }
    if (options.norm != TWELL_NORM_NONE) {
        fields->add(field::kNorm, options.norm);
        fields->add(field::kEps, options.eps);
        fields->add(kNormWeightField, options.norm_weight);
        fields->add(kNormBiasField, options.norm_bias);
    }
    return fields;
}

}  // namespace twell

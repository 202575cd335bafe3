// A plugin's fields: what they mean, how they are read from a host and how they are written into a plan.
#pragma once

#include <NvInferRuntime.h>
#include <twell/twell.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fields.h"

namespace twell {

// Names of fields that several plugins have.
namespace field {
constexpr char const* kActivation = "activation";
constexpr char const* kThreshold = "threshold";
// In blocks these may be left out, in a plan, too: then there are none. Older plans lack them.
constexpr char const* kScales = "scales";
constexpr char const* kThresholds = "thresholds";
constexpr char const* kNorm = "norm";
constexpr char const* kEps = "eps";
}  // namespace field

struct Options {
    int32_t activation = TWELL_RELU;  // twell_activation
    float threshold = 0.0F;           // TWELL_FATRELU only
    int32_t compression = 8;          // 1, 2, 4 or 8
    int32_t hot = 0;                  // neurons, the first ones: 0 to d_ff, which only the shapes tell
    int32_t norm = TWELL_NORM_NONE;   // twell_norm
    float eps = 0.0F;                 // of the norm
    // Whether these inputs are present. A plain block has no gate: its `b_gate` is the field up_bias, as in twell.h.
    bool b_gate = false;
    bool b_up = false;
    bool b_down = false;
    bool residual = false;
    bool scales = false;      // whether weights are of fp8, each with its scales
    bool thresholds = false;  // of TWELL_FATRELU with threshold 0 only
    bool norm_weight = false;
    bool norm_bias = false;
};

// Read the fields `activation`, `threshold`, `norm` and `eps`, of any plugin that has them. Throw Refusal, as
// read_options does.
int32_t read_activation(twell_variant variant, FieldReader& fields, nvinfer1::TensorRTPhase phase);
float read_threshold(int32_t activation, FieldReader& fields, nvinfer1::TensorRTPhase phase);
int32_t read_norm(FieldReader& fields, nvinfer1::TensorRTPhase phase);
float read_eps(FieldReader& fields);

// Throws Refusal where thresholds of neurons are there for an activation that takes none.
void check_thresholds(bool thresholds, int32_t activation, float threshold);

// Throws Refusal where a field says that an input of a norm is there, but the norm has none of the kind.
void check_norm_inputs(int32_t norm, bool weight, bool bias);

// The fields that a node of this variant may have, for IPluginCreatorV3One::getFieldNames.
std::vector<nvinfer1::PluginField> field_names(twell_variant variant);

// Reads the fields that an ONNX node gives (kBUILD) or that a plan gives (kRUNTIME; see plan_fields_of). Throws
// Refusal, naming the field, its value and the allowed ones.
Options read_options(twell_variant variant, nvinfer1::PluginFieldCollection const* fields,
                     nvinfer1::TensorRTPhase phase);

// Options as plan fields: int32 and float32 of length 1 only.
std::unique_ptr<PlanFields> plan_fields_of(twell_variant variant, Options const& options);

}  // namespace twell

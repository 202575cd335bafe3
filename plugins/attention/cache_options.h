// The fields that both plugins over key-value caches have.
#pragma once

#include <NvInferRuntime.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../tensorrt/fields.h"

namespace twell {

constexpr char const* kRotated = "rotated";
constexpr char const* kFp8 = "fp8";
constexpr char const* kKeyScale = "key_scale";
constexpr char const* kValueScale = "value_scale";

struct CacheOptions {
    bool rotated = false;  // whether queries, or new keys, are rotated first
    // Whether caches are in FP8, E4M3, and stand for their numbers times these scales; else they have the element type.
    bool fp8 = false;
    float key_scale = 1.0F;
    float value_scale = 1.0F;

    InputType type() const { return fp8 ? InputType::kFp8 : InputType::kElement; }

    void add_to(PlanFields& fields) const {
        if (rotated) {
            fields.add(kRotated, true);
        }
        if (fp8) {
            fields.add(kFp8, true);
            fields.add(kKeyScale, key_scale);
            fields.add(kValueScale, value_scale);
        }
    }
};

inline std::vector<nvinfer1::PluginField> cache_fields() {
    constexpr auto kNumber = nvinfer1::PluginFieldType::kFLOAT32;
    return {known_integer(kRotated), known_integer(kFp8), known_field(kKeyScale, kNumber),
            known_field(kValueScale, kNumber)};
}

// Older graphs and plans lack these fields.
inline CacheOptions read_cache_options(FieldReader& fields) {
    constexpr char const* kAllowed = "positive and finite";
    CacheOptions options;
    options.rotated = fields.newer_flag(kRotated);
    options.fp8 = fields.newer_flag(kFp8);
    for (auto const& [name, scale] : {std::pair{kKeyScale, &options.key_scale}, {kValueScale, &options.value_scale}}) {
        if (options.fp8 || fields.has(name)) {
            *scale = fields.number(name, kAllowed);
            if (!std::isfinite(*scale) || *scale <= 0.0F) {
                refuse(name, std::to_string(*scale), kAllowed);
            }
        }
    }
    return options;
}

}  // namespace twell

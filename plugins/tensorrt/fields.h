// A plugin's fields: reading those that a host passes to its creator, and writing those of a plan.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common.h"

namespace twell {

// Text from a node or a plan, safe to print: short and without control characters.
std::string printable(std::string_view text);

char const* type_name(nvinfer1::PluginFieldType type);

// "a, b or c"
std::string one_of(std::vector<std::string> const& items);

[[noreturn]] void refuse(char const* field, std::string const& got, std::string const& allowed);

// In plans only: the version of a plugin's set of fields, raised whenever their meaning changes.
constexpr char const* kSchema = "schema";

// A field that a node may have.
inline nvinfer1::PluginField known_field(char const* name, nvinfer1::PluginFieldType type) {
    return {name, nullptr, type, 1};
}
inline nvinfer1::PluginField known_integer(char const* name) {
    return known_field(name, nvinfer1::PluginFieldType::kINT32);
}

// The fields of a collection; each must be taken exactly once.
class FieldReader {
  public:
    explicit FieldReader(nvinfer1::PluginFieldCollection const* collection) {
        if (collection == nullptr || collection->nbFields < 0 ||
            (collection->nbFields > 0 && collection->fields == nullptr)) {
            throw Refusal("the host passed no field collection");
        }
        for (int32_t i = 0; i < collection->nbFields; ++i) {
            nvinfer1::PluginField const& field = collection->fields[i];
            if (field.name == nullptr) {
                throw Refusal("the host passed a field without a name");
            }
            for (nvinfer1::PluginField const* other : left_) {
                if (std::strcmp(other->name, field.name) == 0) {
                    throw Refusal("field '" + printable(field.name) + "' is given twice");
                }
            }
            left_.push_back(&field);
        }
    }

    bool has(char const* name) const { return find(name) != left_.end(); }

    bool flag(char const* name) { return integer(name, {0, 1}) == 1; }

    // A flag that older graphs and plans lack: then it is not set.
    bool newer_flag(char const* name) { return has(name) && flag(name); }

    int32_t integer(char const* name, std::vector<int32_t> const& allowed) {
        std::vector<std::string> names;
        std::transform(allowed.begin(), allowed.end(), std::back_inserter(names),
                       [](int32_t value) { return std::to_string(value); });
        auto const value = scalar<int32_t>(name, nvinfer1::PluginFieldType::kINT32, one_of(names));
        if (std::find(allowed.begin(), allowed.end(), value) == allowed.end()) {
            refuse(name, std::to_string(value), one_of(names));
        }
        return value;
    }

    int32_t integer(char const* name, int32_t least, int32_t most) {
        std::string const allowed = std::to_string(least) + " to " + std::to_string(most);
        auto const value = scalar<int32_t>(name, nvinfer1::PluginFieldType::kINT32, allowed);
        if (value < least || value > most) {
            refuse(name, std::to_string(value), allowed);
        }
        return value;
    }

    // One integer or more, up to `most`.
    std::vector<int32_t> integers(char const* name, int32_t most, std::string const& allowed) {
        nvinfer1::PluginField const& field = take(name, allowed);
        if (field.type != nvinfer1::PluginFieldType::kINT32 || field.length < 1 || field.length > most ||
            field.data == nullptr) {
            refuse(name, describe(field), allowed);
        }
        std::vector<int32_t> values(static_cast<size_t>(field.length));
        std::memcpy(values.data(), field.data, values.size() * sizeof(int32_t));
        return values;
    }

    float number(char const* name, std::string const& allowed) {
        return scalar<float>(name, nvinfer1::PluginFieldType::kFLOAT32, allowed);
    }

    // ONNX strings arrive with their final NUL counted; hosts that build fields by hand may leave it out.
    std::string text(char const* name, std::string const& allowed) {
        nvinfer1::PluginField const& field = take(name, allowed);
        if (field.type != nvinfer1::PluginFieldType::kCHAR || field.length < 0 ||
            (field.length > 0 && field.data == nullptr)) {
            refuse(name, describe(field), "a string, " + allowed);
        }
        std::string value(static_cast<char const*>(field.data), static_cast<size_t>(field.length));
        if (!value.empty() && value.back() == '\0') {
            value.pop_back();
        }
        return value;
    }

    void reject_rest(std::vector<nvinfer1::PluginField> const& known) const {
        if (left_.empty()) {
            return;
        }
        std::string names;
        for (nvinfer1::PluginField const& field : known) {
            names += (names.empty() ? "" : ", ") + std::string(field.name);
        }
        throw Refusal("field '" + printable(left_.front()->name) + "' is unknown; allowed: " + names);
    }

  private:
    std::vector<nvinfer1::PluginField const*>::const_iterator find(char const* name) const {
        return std::find_if(left_.begin(), left_.end(),
                            [name](nvinfer1::PluginField const* field) { return std::strcmp(field->name, name) == 0; });
    }

    nvinfer1::PluginField const& take(char const* name, std::string const& allowed) {
        auto const found = find(name);
        if (found == left_.end()) {
            throw Refusal("field '" + std::string(name) + "' is missing; allowed: " + allowed);
        }
        nvinfer1::PluginField const& field = **found;
        left_.erase(found);
        return field;
    }

    template <typename T>
    T scalar(char const* name, nvinfer1::PluginFieldType type, std::string const& allowed) {
        nvinfer1::PluginField const& field = take(name, allowed);
        if (field.type != type || field.length != 1 || field.data == nullptr) {
            refuse(name, describe(field), std::string("one ") + type_name(type) + ", " + allowed);
        }
        T value{};
        std::memcpy(&value, field.data, sizeof(value));  // a host's field data need not be aligned
        return value;
    }

    static std::string describe(nvinfer1::PluginField const& field) {
        if (field.data == nullptr) {
            return "no data";
        }
        return std::to_string(field.length) + " of type " + type_name(field.type);
    }

    std::vector<nvinfer1::PluginField const*> left_;
};

// The fields of a plan, led by their schema. `collection` points into the object, so it must stay where it is while a
// host reads it.
class PlanFields {
  public:
    explicit PlanFields(int32_t schema) { add(kSchema, schema); }
    PlanFields(PlanFields const&) = delete;
    PlanFields& operator=(PlanFields const&) = delete;

    void add(char const* name, std::vector<int32_t> const& values) {
        integers_.push_back(values);
        add(name, integers_.back().data(), nvinfer1::PluginFieldType::kINT32, integers_.back().size());
    }
    void add(char const* name, int32_t value) { add(name, std::vector<int32_t>{value}); }
    void add(char const* name, bool value) { add(name, value ? 1 : 0); }
    void add(char const* name, float value) {
        numbers_.push_back(value);
        add(name, &numbers_.back(), nvinfer1::PluginFieldType::kFLOAT32, 1);
    }

    nvinfer1::PluginFieldCollection const* collection() const { return &collection_; }

  private:
    void add(char const* name, void const* data, nvinfer1::PluginFieldType type, size_t length) {
        fields_.emplace_back(name, data, type, static_cast<int32_t>(length));
        collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    }

    // Deques: the data that fields point to stay where they are.
    std::deque<std::vector<int32_t>> integers_;
    std::deque<float> numbers_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

// Runs `read`. Refusals of a plan's fields come with advice: which library this is, and what to do.
template <typename Read>
auto read_with_advice(nvinfer1::TensorRTPhase phase, char const* library, char const* version, Read&& read) {
    try {
        return read();
    } catch (Refusal const& refusal) {
        if (phase != nvinfer1::TensorRTPhase::kRUNTIME) {
            throw;
        }
        throw Refusal(std::string(refusal.what()) + ". The plan is damaged, or built for another " + library +
                      " than this one of version " + version +
                      ": use that of the twellc that built it, which the plan's manifest names, or compile again");
    }
}

}  // namespace twell

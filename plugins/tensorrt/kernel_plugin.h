// Shared by blocks, linear layers and experts, plugins that are one call of the kernels. Their inputs have roles; the
// number of an input depends on the optional ones that are there.
#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "plugin_base.h"

namespace twell {

// An input of a plugin, where it is present.
struct Role {
    char const* name;
    InputType type;
    bool present;
    bool by_row = false;  // besides x: whether it has a row for each one of x
};

using Types = std::array<nvinfer1::DataType, kMostInputs>;

// `Problem` is the kernels', of twell.h. Role 0 is x.
template <class Plugin, class Problem, size_t ROLES>
class KernelPlugin : public PluginBase<Plugin> {
  protected:
    using Roles = std::array<Role, ROLES>;

    KernelPlugin(char const* name, std::string layer, Roles const& roles)
        : PluginBase<Plugin>(name, std::move(layer), inputs_of(roles)), roles_(roles), slots_(slots_of(roles)) {}

    // ---- what a plugin has ----

    // The problem that inputs of these shapes and types pose. Extents may be kAny; then only known ones are checked,
    // and the result holds placeholders.
    virtual Problem problem_of(Shapes const& inputs, Types const& types) const = 0;
    virtual size_t bytes_of(Problem const& problem) const = 0;
    virtual void launch(Problem const& problem, void const* const* inputs, void* const* outputs, void* workspace,
                        cudaStream_t stream) const = 0;
    // Inputs of other types than the first one's, as a list in words.
    virtual std::string other_types() const = 0;

    // ---- checks ----

    bool has(int32_t role) const { return slots_[role] >= 0; }
    char const* role_name(int32_t role) const { return roles_[role].name; }

    int32_t slot(int32_t role) const { return slots_[role]; }
    nvinfer1::Dims const& shape(Shapes const& inputs, int32_t role) const { return inputs[slots_[role]]; }

    // Throws Refusal unless the input, if there is one, may have the expected shape.
    void check(Shapes const& inputs, int32_t role, nvinfer1::Dims const& expected, char const* meaning) const {
        if (has(role)) {
            check_shape(role_name(role), shape(inputs, role), expected, meaning);
        }
    }

    // Throws Refusal unless the rows of x may be as long as those of a weight of the given shape, whose last extent is
    // `name`.
    void check_rows(Shapes const& inputs, char const* name, int32_t weight, char const* meaning) const {
        nvinfer1::Dims const& x = inputs[0];
        if (x.nbDims < 1 || x.nbDims > nvinfer1::Dims::MAX_DIMS) {
            throw Refusal("input x has rank " + std::to_string(x.nbDims) + "; expected [..., " + name +
                          "] of rank 1 to 8");
        }
        int64_t const columns = x.d[x.nbDims - 1];
        int64_t const expected = shape(inputs, weight).d[1];
        if (columns != kAny && expected != kAny && columns != expected) {
            throw Refusal("input x has shape " + text_of(x) + "; its last extent must be " + name + " = " +
                          std::to_string(expected) + ", as in " + role_name(weight) + " " + meaning);
        }
    }

    // Throws Refusal unless the residual, if there is one, may have the shape of y, [..., out].
    void check_residual(Shapes const& inputs, int32_t residual, int64_t out, char const* out_name) const {
        nvinfer1::Dims y = inputs[0];
        y.d[y.nbDims - 1] = out;
        check(inputs, residual, y, ("that of y, [..., " + std::string(out_name) + "]").c_str());
    }

    // Throws Refusal with the kernels' complaint, unless it is null, and the shapes of some inputs.
    void check_problem(char const* complaint, Shapes const& inputs, std::initializer_list<int32_t> roles) const {
        if (complaint == nullptr) {
            return;
        }
        std::string shapes;
        for (int32_t const role : roles) {
            shapes += (shapes.empty() ? "" : ", ") + std::string(role_name(role)) + " " + text_of(shape(inputs, role));
        }
        throw Refusal(std::string(complaint) + " (" + shapes + ")");
    }

    // ---- overrides ----

    std::string allowed_types(nvinfer1::DataType first) const final {
        std::string const others = other_types();
        return (others.empty() ? "all inputs" : "all inputs but " + others) + " must be bf16, or all fp16 (x is " +
               text_of(first) + ")";
    }

    void check_shapes(Shapes const& inputs) const final {
        Types types;
        types.fill(nvinfer1::DataType::kBF16);  // no limit depends on types, which need not be known
        problem_of(inputs, types);
    }

    void configure(nvinfer1::DynamicPluginTensorDesc const* inputs) final { largest_problem(inputs); }

    size_t workspace_bytes(nvinfer1::DynamicPluginTensorDesc const* inputs) const final {
        return bytes_of(largest_problem(inputs));
    }

    Plugin* attached() const final {
        check_device();
        return new Plugin(this->self());
    }

    void run(nvinfer1::PluginTensorDesc const* descs, void const* const* inputs, void* const* outputs, void* workspace,
             cudaStream_t stream) final {
        Types const types = types_of([&](int32_t i) { return descs[i].type; });
        launch(problem_of(this->runtime_shapes(descs), types), inputs, outputs, workspace, stream);
    }

  private:
    static std::vector<Input> inputs_of(Roles const& roles) {
        std::vector<Input> inputs;
        for (Role const& role : roles) {
            if (role.present) {
                inputs.push_back({role.name, role.type});
            }
        }
        return inputs;
    }

    static std::array<int32_t, ROLES> slots_of(Roles const& roles) {
        std::array<int32_t, ROLES> slots{};
        int32_t count = 0;
        std::transform(roles.begin(), roles.end(), slots.begin(),
                       [&](Role const& role) { return role.present ? count++ : -1; });
        return slots;
    }

    // Gathers the type of each input.
    template <typename TypeOf>
    Types types_of(TypeOf&& type_of) const {
        Types types{};
        for (int32_t i = 0; i < this->input_count(); ++i) {
            types[i] = type_of(i);
        }
        return types;
    }

    // The problem with the most tokens of the profile: the one with the largest workspace. Of inputs that have no row
    // for each one of x extents must be fixed, since the workspace may shrink where these grow. Where they have one,
    // the largest extents may be an estimate, other than those of x.
    Problem largest_problem(nvinfer1::DynamicPluginTensorDesc const* inputs) const {
        Shapes largest{};
        for (size_t role = 0; role < ROLES; ++role) {
            int32_t const slot = slots_[role];
            if (slot < 0) {
                continue;
            }
            nvinfer1::DynamicPluginTensorDesc const& input = inputs[slot];
            bool const fixed = std::equal(input.max.d, input.max.d + input.max.nbDims, input.min.d);
            if (slot != 0 && !roles_[role].by_row && !fixed) {
                throw Refusal("input " + std::string(role_name(role)) + " has shapes from " + text_of(input.min) +
                              " to " + text_of(input.max) + "; expected a fixed shape");
            }
            largest[slot] = roles_[role].by_row ? input.desc.dims : input.max;
        }
        return problem_of(largest, types_of([&](int32_t i) { return inputs[i].desc.type; }));
    }

    static_assert(ROLES <= kMostInputs);

    Roles const roles_;
    std::array<int32_t, ROLES> const slots_;  // the input of each role; -1 where there is none
};

}  // namespace twell

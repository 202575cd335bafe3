#include "fields.h"

#include <iterator>

namespace twell {

std::string printable(std::string_view text) {
    constexpr size_t kLongest = 64;
    std::string out(text.substr(0, kLongest));
    std::replace_if(out.begin(), out.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
    return text.size() > kLongest ? out + "..." : out;
}

char const* type_name(nvinfer1::PluginFieldType type) {
    constexpr char const* kNames[] = {"float16", "float32", "float64",  "int8",  "int16", "int32", "char",
                                      "dims",    "unknown", "bfloat16", "int64", "fp8",   "int4",  "fp4"};
    auto const index = static_cast<size_t>(type);
    return index < std::size(kNames) ? kNames[index] : "an unknown type";
}

std::string one_of(std::vector<std::string> const& items) {
    std::string out;
    for (size_t i = 0; i < items.size(); ++i) {
        out += i == 0 ? "" : i + 1 == items.size() ? " or " : ", ";
        out += items[i];
    }
    return out;
}

void refuse(char const* field, std::string const& got, std::string const& allowed) {
    throw Refusal("field '" + std::string(field) + "': got " + got + "; allowed: " + allowed);
}

}  // namespace twell

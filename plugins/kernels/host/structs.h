// Reading the structs of a caller that may have been compiled with another header of the second version.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>

#include "twell/twell.h"

namespace twell {

// Bytes of the first layouts of the second version: no caller has a shorter struct.
constexpr size_t kLeastBytesProblem = offsetof(twell_problem, hot);
constexpr size_t kLeastBytesTensors = offsetof(twell_tensors, w_gate_scale);
// No struct is longer: more tells of something else in the place of struct_bytes, and is not looked at.
constexpr size_t kMostBytesOfStruct = 256;

enum class StructFault { kNone, kTooShort, kTooLong, kUnknownFields };

// Copies a caller's struct; the fields that it does not have become 0.
template <class Struct>
StructFault read_struct(Struct& copy, Struct const& given, size_t least_bytes) {
    static_assert(sizeof(Struct) <= kMostBytesOfStruct, "no struct is longer");
    size_t const bytes = given.struct_bytes;
    if (bytes < least_bytes) {
        return StructFault::kTooShort;
    }
    if (bytes > kMostBytesOfStruct) {
        return StructFault::kTooLong;
    }
    copy = {};
    memcpy(&copy, &given, std::min(bytes, sizeof(Struct)));
    auto const* const raw = reinterpret_cast<unsigned char const*>(&given);
    bool const knows_all =
        std::all_of(raw + std::min(bytes, sizeof(Struct)), raw + bytes, [](unsigned char byte) { return byte == 0; });
    return knows_all ? StructFault::kNone : StructFault::kUnknownFields;
}

}  // namespace twell

// Launches in words: what twell_describe gives instead of launching.
#pragma once

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <algorithm>

namespace twell {

// Text in memory of the caller's, cut off where that ends.
class Text {
  public:
    Text(char* out, size_t size) : out_(out), size_(size) {
        if (size_ > 0) {
            out_[0] = 0;
        }
    }

    __attribute__((format(printf, 2, 3))) void add(char const* format, ...) {
        size_t const begin = std::min(length_, size_);
        va_list values;
        va_start(values, format);
        length_ += static_cast<size_t>(
            vsnprintf(begin < size_ ? out_ + begin : nullptr, begin < size_ ? size_ - begin : 0, format, values));
        va_end(values);
    }

    // Bytes that all of it takes, with the closing 0.
    size_t bytes() const { return length_ + 1; }

  private:
    char* out_;
    size_t size_;
    size_t length_ = 0;
};

struct Number {
    char const* name;
    int64_t value;
};

// A kernel, and a row in the kernel's table of configurations: one compiled instance, but for the element type.
struct Label {
    char const* name;
    Number row[2] = {};

    // The same in words.
    void add_to(Text& text) const {
        text.add("%s", name);
        for (Number const& number : row) {
            if (number.name != nullptr) {
                text.add(" %s=%lld", number.name, static_cast<long long>(number.value));
            }
        }
    }
};

inline void add_line(Text& text, Label const& label) {
    label.add_to(text);
    text.add("\n");
}

// Another choice of the host for a launch, and how much of a piece of scratch memory it takes.
struct Choice {
    Number number = {};
    int64_t used = 0;
    int64_t most_used = 0;  // 0: it takes none whose size is not plain from the problem
};

}  // namespace twell

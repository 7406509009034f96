// How much a thread is given at least.
#pragma once
#include <algorithm>
#include <cstdint>

namespace kvpager::cpu {

constexpr int64_t kGrainElements = 1 << 14;  // fewer are not worth waking a thread for

// Rows that a thread takes at least, so that small calls stay on one.
inline int64_t grain_of(int64_t elements_of_row) {
  return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, elements_of_row));
}

}  // namespace kvpager::cpu

// From floats to the codes of a quantised cache: write_kv and qk_norm_rope_write share it, so that both give the same
// bits.
#pragma once
#include <cfloat>

#include "vec.h"

namespace kvpager::cpu::KVPAGER_ISA {

KVPAGER_INLINE Vec load_up_to_width(const float* source, int64_t count) {
  return count < kWidth ? load_partial(source, count) : load(source);
}

// `codes` [head_dim] = row times `factor`, rounded to even; what a code can't hold becomes the largest one.
template <class C>
KVPAGER_INLINE void store_codes(const float* row, int64_t head_dim, float factor, C* codes) {
  for (int64_t d = 0; d < head_dim; d += kWidth) {
    const int64_t count = least(kWidth, head_dim - d);
    float scaled[kWidth];
    store(scaled, mul(load_up_to_width(row + d, count), splat(factor)));
    for (int64_t i = 0; i < count; ++i) codes[d + i] = narrow<C>(scaled[i]);
  }
}

// Quantises a row of floats by its own largest magnitude; returns the scale, with code * scale = number.
// A row of zeros gets the smallest normal scale. One with a NaN or an inf gets codes 0 and a NaN scale: it reads as
// NaN.
template <class C>
float quantise_row(const float* row, int64_t head_dim, C* codes) {
  Vec tops = zero(), poison = zero();  // 0 * inf and 0 * NaN are NaN
  for (int64_t d = 0; d < head_dim; d += kWidth) {
    const Vec numbers = load_up_to_width(row + d, least(kWidth, head_dim - d));
    tops = maximum(absolute(numbers), tops);
    poison = fma(numbers, zero(), poison);
  }
  const float bad = reduce_add(poison);
  if (bad != bad) {
    memset(codes, 0, head_dim);
    return __builtin_nanf("");
  }
  const float top = reduce_max(tops), least_top = CodeTraits<C>::kLargest * FLT_MIN;
  const float bounded = top > least_top ? top : least_top;
  store_codes(row, head_dim, CodeTraits<C>::kLargest / bounded, codes);
  return bounded / CodeTraits<C>::kLargest;
}

}  // namespace kvpager::cpu::KVPAGER_ISA

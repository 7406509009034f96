// Float vectors of the instruction set that a source is compiled for: loads of every cache type, arithmetic, exp, tanh.
//
// `Vec` holds kWidth floats. `load(const T*)` widens kWidth elements of numbers or codes (../../types.h) in order,
// `load_partial(p, n)` the first n < kWidth of them with zeros behind, reading nothing past them. A `Pair` is
// 2 * kWidth elements in the order that is cheapest to widen: that of `load_pair`. A set with KVPAGER_HAS_DOT16 has
// `Vec16`, kPair elements of 16 bits, and dot products of them. All of it lives in the set's own namespace
// (../runtime/isa.h).
#pragma once
#include "../../types.h"

#if !defined(KVPAGER_ISA)
#error "vec.h is for *.isa.cpp sources, compiled with -DKVPAGER_ISA=<set>"
#endif
#define KVPAGER_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "baseline.h"
#endif

namespace kvpager::cpu::KVPAGER_ISA {

constexpr int kPair = 2 * kWidth;

struct Pair {
  Vec first, second;
};

// std::min without a symbol that instruction sets would share.
KVPAGER_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class T>
KVPAGER_INLINE Vec load_partial(const T* source, int64_t count) {
  T padded[kWidth] = {};
  memcpy(padded, source, count * sizeof(T));
  return load(padded);
}

KVPAGER_INLINE void store_partial(float* target, Vec numbers, int64_t count) {
  float padded[kWidth];
  store(padded, numbers);
  memcpy(target, padded, count * sizeof(float));
}

template <class T>
KVPAGER_INLINE Pair load_pair(const T* source) {
  if constexpr (std::is_same_v<T, bfloat16> && kHasBfloat16Pairs) {
    return {load_even(source), load_odd(source)};
  } else {
    return {load(source), load(source + kWidth)};
  }
}

KVPAGER_INLINE float first_of(Vec numbers) { return numbers[0]; }

// The first count < kPair elements, zeros behind them.
template <class T>
KVPAGER_INLINE Pair load_pair_partial(const T* source, int64_t count) {
  T padded[kPair] = {};
  memcpy(padded, source, count * sizeof(T));
  return load_pair(padded);
}

// e^x within 2 units in the last place for x <= 88; 0 below -87.3 (no subnormals), NaN for NaN.
// Range reduction and polynomial: S. Moshier, Cephes, `expf`.
KVPAGER_INLINE Vec exp(Vec x) {
  const Vec clamped = clamp_low(x, -87.33654f);
  const Vec n = round_even(mul(clamped, splat(1.44269504088896341f)));
  const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return zero_below(x, -87.33654f, scale_exponent(add(fma(mul(r, r), p, r), splat(1.0f)), n));
}

// tanh within 2 units in the last place: a polynomial near 0 (Cephes, `tanhf`), 1 - 2 / (e^2|x| + 1) elsewhere.
KVPAGER_INLINE Vec tanh(Vec x) {
  const Vec z = mul(x, x);
  Vec p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const Vec near = fma(mul(p, z), x, x);
  const Vec magnitude = absolute(x);
  const Vec bounded = clamp_high(magnitude, 20.0f);  // tanh is 1 there
  const Vec far = sub(splat(1.0f), div(splat(2.0f), add(exp(add(bounded, bounded)), splat(1.0f))));
  return select_below(magnitude, 0.625f, near, copy_sign(far, x));
}

}  // namespace kvpager::cpu::KVPAGER_ISA

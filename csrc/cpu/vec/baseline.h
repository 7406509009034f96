// 4 floats in whatever the compiler has for them (SSE2 on x86-64, NEON on ARM): its own vector types, no intrinsics.
#pragma once
#include <cmath>

#include "../../types.h"

namespace kvpager::cpu::KVPAGER_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
constexpr int kWidth = 4;
constexpr int kNumRegisters = 16;
constexpr bool kHasBfloat16Pairs = false;

KVPAGER_INLINE Vec zero() { return Vec{}; }
KVPAGER_INLINE Vec splat(float number) { return Vec{number, number, number, number}; }
KVPAGER_INLINE Vec load(const float* source) {
  Vec numbers;
  memcpy(&numbers, source, sizeof numbers);
  return numbers;
}
KVPAGER_INLINE void store(float* target, Vec numbers) { memcpy(target, &numbers, sizeof numbers); }
KVPAGER_INLINE Vec add(Vec a, Vec b) { return a + b; }
KVPAGER_INLINE Vec sub(Vec a, Vec b) { return a - b; }
KVPAGER_INLINE Vec mul(Vec a, Vec b) { return a * b; }
KVPAGER_INLINE Vec div(Vec a, Vec b) { return a / b; }
KVPAGER_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
// Lanes of `yes` where the mask is set, of `no` elsewhere.
KVPAGER_INLINE Vec choose(IntVec mask, Vec yes, Vec no) { return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask)); }
KVPAGER_INLINE Vec maximum(Vec a, Vec b) { return choose(a > b, a, b); }  // b where either is NaN
KVPAGER_INLINE float reduce_add(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
KVPAGER_INLINE float reduce_max(Vec v) {
  const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}

template <class T>
KVPAGER_INLINE Vec load(const T* source) {
  return Vec{widen(source[0]), widen(source[1]), widen(source[2]), widen(source[3])};
}

// For exp and tanh.
KVPAGER_INLINE Vec clamp_low(Vec x, float low) { return choose(x < splat(low), splat(low), x); }
KVPAGER_INLINE Vec clamp_high(Vec x, float high) { return choose(x > splat(high), splat(high), x); }
// For |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
KVPAGER_INLINE Vec round_even(Vec x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }
// x * 2^n for n of -126 ... 127; a NaN x stays one.
KVPAGER_INLINE Vec scale_exponent(Vec x, Vec n) {
  const IntVec shifted = (IntVec)(n + splat(12582912.0f)) - (IntVec)splat(12582912.0f);  // n as integers
  return x * (Vec)((shifted + 127) << 23);
}
KVPAGER_INLINE Vec zero_below(Vec x, float low, Vec result) { return choose(x < splat(low), zero(), result); }
KVPAGER_INLINE Vec absolute(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }
KVPAGER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return (Vec)((IntVec)magnitude | ((IntVec)sign & static_cast<int32_t>(0x80000000u)));
}
KVPAGER_INLINE Vec select_below(Vec x, float bound, Vec below, Vec otherwise) {
  return choose(x < splat(bound), below, otherwise);
}

// The sums of four vectors, into target[0 ... 3].
KVPAGER_INLINE void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* target) {
  target[0] = reduce_add(a);
  target[1] = reduce_add(b);
  target[2] = reduce_add(c);
  target[3] = reduce_add(d);
}

}  // namespace kvpager::cpu::KVPAGER_ISA

// 8 floats in a 256-bit register (AVX2, FMA, F16C).
#pragma once
#include <immintrin.h>

#include "../../types.h"

namespace kvpager::cpu::KVPAGER_ISA {

using Vec = __m256;
constexpr int kWidth = 8;
constexpr int kNumRegisters = 16;
constexpr bool kHasBfloat16Pairs = true;

KVPAGER_INLINE Vec zero() { return _mm256_setzero_ps(); }
KVPAGER_INLINE Vec splat(float number) { return _mm256_set1_ps(number); }
KVPAGER_INLINE Vec load(const float* source) { return _mm256_loadu_ps(source); }
KVPAGER_INLINE void store(float* target, Vec numbers) { _mm256_storeu_ps(target, numbers); }
KVPAGER_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
KVPAGER_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
KVPAGER_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
KVPAGER_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
KVPAGER_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
KVPAGER_INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }  // b where either is NaN
KVPAGER_INLINE float reduce_add(Vec v) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}
KVPAGER_INLINE float reduce_max(Vec v) {
  __m128 top = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  top = _mm_max_ps(top, _mm_movehl_ps(top, top));
  return _mm_cvtss_f32(_mm_max_ss(top, _mm_movehdup_ps(top)));
}

KVPAGER_INLINE Vec load(const bfloat16* source) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
KVPAGER_INLINE Vec load(const float16* source) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
KVPAGER_INLINE Vec load(const int8_code* source) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
}
// e4m3 has fp16's layout but for the exponent's bias (7 against 15) and one bit pattern of NaN.
KVPAGER_INLINE Vec load(const fp8_e4m3* source) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  const __m128i half =
      _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(half, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x3f80));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))),
                       _mm256_set1_ps(256.0f));
}
KVPAGER_INLINE Vec load(const fp8_e5m2* source) {  // upper bytes of fp16
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(source));
  return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
}
// The elements at even and at odd places of 16 bfloat16.
KVPAGER_INLINE Vec load_even(const bfloat16* source) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)), 16));
}
KVPAGER_INLINE Vec load_odd(const bfloat16* source) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)),
                                              _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// For exp and tanh.
KVPAGER_INLINE Vec clamp_low(Vec x, float low) { return _mm256_max_ps(_mm256_set1_ps(low), x); }
KVPAGER_INLINE Vec clamp_high(Vec x, float high) { return _mm256_min_ps(_mm256_set1_ps(high), x); }
KVPAGER_INLINE Vec round_even(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n for n of -126 ... 127; a NaN x stays one.
KVPAGER_INLINE Vec scale_exponent(Vec x, Vec n) {
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(power));
}
KVPAGER_INLINE Vec zero_below(Vec x, float low, Vec result) {
  return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(low), _CMP_NLT_UQ), result);
}
KVPAGER_INLINE Vec absolute(Vec x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
KVPAGER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return _mm256_or_ps(magnitude, _mm256_and_ps(sign, _mm256_set1_ps(-0.0f)));
}
KVPAGER_INLINE Vec select_below(Vec x, float bound, Vec below, Vec otherwise) {
  return _mm256_blendv_ps(otherwise, below, _mm256_cmp_ps(x, _mm256_set1_ps(bound), _CMP_LT_OQ));
}

// The sums of four vectors, into target[0 ... 3].
KVPAGER_INLINE void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* target) {
  const Vec abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(target, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

// Vec16: kPair elements of 16 bits. dot_int16 adds the products of neighbours in pairs to kWidth sums.
#define KVPAGER_HAS_DOT16 1
using Vec16 = __m256i;
KVPAGER_INLINE Vec16 zero16() { return _mm256_setzero_si256(); }
KVPAGER_INLINE Vec16 bits_of(Vec v) { return _mm256_castps_si256(v); }
KVPAGER_INLINE Vec as_floats(Vec16 elements) { return _mm256_castsi256_ps(elements); }
KVPAGER_INLINE Vec16 load16(const int8_code* source) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
}
KVPAGER_INLINE Vec16 load16_partial(const int8_code* source, int64_t count) {
  int8_code padded[2 * kWidth] = {};
  memcpy(padded, source, count);
  return load16(padded);
}
KVPAGER_INLINE Vec16 zip_low(Vec16 a, Vec16 b) { return _mm256_unpacklo_epi16(a, b); }
KVPAGER_INLINE Vec16 zip_high(Vec16 a, Vec16 b) { return _mm256_unpackhi_epi16(a, b); }
KVPAGER_INLINE Vec16 dot_int16(Vec16 sums, Vec16 a, Vec16 b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
KVPAGER_INLINE Vec sums_to_floats(Vec16 sums) { return _mm256_cvtepi32_ps(sums); }
// Rounded to integers, which fit.
KVPAGER_INLINE Vec16 round_int16(Vec low, Vec high) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

}  // namespace kvpager::cpu::KVPAGER_ISA

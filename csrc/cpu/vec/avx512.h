// 16 floats in a 512-bit register (AVX-512 F, BW, DQ, VL), and 16-bit dot products: VNNI and BF16 where the set has
// them.
#pragma once
#include <immintrin.h>

#include "../../types.h"

namespace kvpager::cpu::KVPAGER_ISA {

using Vec = __m512;
constexpr int kWidth = 16;
constexpr int kNumRegisters = 32;
constexpr bool kHasBfloat16Pairs = true;

KVPAGER_INLINE Vec zero() { return _mm512_setzero_ps(); }
KVPAGER_INLINE Vec splat(float number) { return _mm512_set1_ps(number); }
KVPAGER_INLINE Vec load(const float* source) { return _mm512_loadu_ps(source); }
KVPAGER_INLINE void store(float* target, Vec numbers) { _mm512_storeu_ps(target, numbers); }
KVPAGER_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
KVPAGER_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
KVPAGER_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
KVPAGER_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
KVPAGER_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
KVPAGER_INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }  // b where either is NaN
KVPAGER_INLINE float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
KVPAGER_INLINE float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }

KVPAGER_INLINE Vec load(const bfloat16* source) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
KVPAGER_INLINE Vec load(const float16* source) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
KVPAGER_INLINE Vec load(const int8_code* source) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
}
// e4m3 has fp16's layout but for the exponent's bias (7 against 15) and one bit pattern of NaN.
KVPAGER_INLINE Vec load(const fp8_e4m3* source) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                        _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __mmask16 nan =
      _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, _mm256_set1_epi16(0x3f80)), _mm256_set1_epi16(0x3f80));
  return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_mask_blend_epi16(nan, half, _mm256_set1_epi16(0x7e00))),
                       _mm512_set1_ps(256.0f));
}
KVPAGER_INLINE Vec load(const fp8_e5m2* source) {  // upper bytes of fp16
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8));
}
// The elements at even and at odd places of 32 bfloat16.
KVPAGER_INLINE Vec load_even(const bfloat16* source) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(source), 16));
}
KVPAGER_INLINE Vec load_odd(const bfloat16* source) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(source), _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// For exp and tanh.
KVPAGER_INLINE Vec clamp_low(Vec x, float low) { return _mm512_max_ps(_mm512_set1_ps(low), x); }
KVPAGER_INLINE Vec clamp_high(Vec x, float high) { return _mm512_min_ps(_mm512_set1_ps(high), x); }
KVPAGER_INLINE Vec round_even(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
KVPAGER_INLINE Vec scale_exponent(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
KVPAGER_INLINE Vec zero_below(Vec x, float low, Vec result) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(low), _CMP_NLT_UQ), result);
}
KVPAGER_INLINE Vec absolute(Vec x) { return _mm512_abs_ps(x); }
KVPAGER_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  return _mm512_or_ps(magnitude, _mm512_and_ps(sign, _mm512_set1_ps(-0.0f)));
}
KVPAGER_INLINE Vec select_below(Vec x, float bound, Vec below, Vec otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, _mm512_set1_ps(bound), _CMP_LT_OQ), below);
}

// The sums of four vectors, into target[0 ... 3].
KVPAGER_INLINE void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* target) {
  const Vec ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const Vec abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(target, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

// Vec16: kPair elements of 16 bits. dot_int16 adds the products of neighbours in pairs to kWidth sums.
#define KVPAGER_HAS_DOT16 1
using Vec16 = __m512i;
KVPAGER_INLINE Vec16 zero16() { return _mm512_setzero_si512(); }
KVPAGER_INLINE Vec16 bits_of(Vec v) { return _mm512_castps_si512(v); }
KVPAGER_INLINE Vec as_floats(Vec16 elements) { return _mm512_castsi512_ps(elements); }
KVPAGER_INLINE Vec16 load16(const bfloat16* source) { return _mm512_loadu_si512(source); }
KVPAGER_INLINE Vec16 load16(const int8_code* source) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
KVPAGER_INLINE Vec16 load16_partial(const bfloat16* source, int64_t count) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), source);
}
KVPAGER_INLINE Vec16 load16_partial(const int8_code* source, int64_t count) {
  return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << count) - 1), source));
}
KVPAGER_INLINE Vec16 zip_low(Vec16 a, Vec16 b) { return _mm512_unpacklo_epi16(a, b); }
KVPAGER_INLINE Vec16 zip_high(Vec16 a, Vec16 b) { return _mm512_unpackhi_epi16(a, b); }
KVPAGER_INLINE Vec16 dot_int16(Vec16 sums, Vec16 a, Vec16 b) {
#if defined(__AVX512VNNI__)
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}
KVPAGER_INLINE Vec sums_to_floats(Vec16 sums) { return _mm512_cvtepi32_ps(sums); }
// Rounded to integers, which fit.
KVPAGER_INLINE Vec16 round_int16(Vec low, Vec high) {
  const __m256i halves[2] = {_mm512_cvtepi32_epi16(_mm512_cvtps_epi32(low)),
                             _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(high))};
  return _mm512_inserti64x4(_mm512_castsi256_si512(halves[0]), halves[1], 1);
}

#if defined(__AVX512BF16__)
// dot_bf16 adds the products of neighbours in pairs, in float, to kWidth sums.
#define KVPAGER_HAS_BF16_DOT 1
using Bf16Vec = __m512bh;
// fp8 as bfloat16: looked up, since subnormal codes are normal numbers there.
template <class C>
struct Bf16Table {
  alignas(64) uint16_t magnitudes[128];
  bool exact;
  constexpr Bf16Table() : magnitudes(), exact(true) {
    for (int code = 0; code < 128; ++code) {
      const uint32_t bits = float_bits(widen(C{static_cast<uint8_t>(code)}));
      magnitudes[code] = static_cast<uint16_t>(bits >> 16);
      exact = exact && bits << 16 == 0;
    }
  }
};
template <class C>
constexpr Bf16Table<C> kBf16Table;
template <class C>
KVPAGER_INLINE Vec16 fp8_to_bf16(__m256i codes) {
  static_assert(kBf16Table<C>.exact);
  const Vec16 index = _mm512_cvtepu8_epi16(codes), *table = reinterpret_cast<const Vec16*>(kBf16Table<C>.magnitudes);
  const Vec16 low = _mm512_permutex2var_epi16(table[0], index, table[1]),  // by the index's last six bits
      high = _mm512_permutex2var_epi16(table[2], index, table[3]);
  const Vec16 magnitude = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(index, _mm512_set1_epi16(0x40)), low, high);
  const Vec16 sign = _mm512_and_si512(_mm512_slli_epi16(index, 8), _mm512_set1_epi16(static_cast<int16_t>(0x8000)));
  return _mm512_or_si512(magnitude, sign);
}
template <class C>
KVPAGER_INLINE Vec16 load16(const C* source) {
  return fp8_to_bf16<C>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
template <class C>
KVPAGER_INLINE Vec16 load16_partial(const C* source, int64_t count) {
  return fp8_to_bf16<C>(_mm256_maskz_loadu_epi8(static_cast<__mmask32>((uint64_t{1} << count) - 1), source));
}
KVPAGER_INLINE Vec dot_bf16(Vec sums, Bf16Vec a, Bf16Vec b) { return _mm512_dpbf16_ps(sums, a, b); }
KVPAGER_INLINE Vec dot_bf16(Vec sums, Vec16 a, Vec16 b) { return dot_bf16(sums, (Bf16Vec)a, (Bf16Vec)b); }
KVPAGER_INLINE Vec16 round_bf16(Vec low, Vec high) { return (Vec16)_mm512_cvtne2ps_pbh(high, low); }
#endif

}  // namespace kvpager::cpu::KVPAGER_ISA

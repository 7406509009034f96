// What tiles need beside arithmetic: squares transposed in registers, and stores that narrow.
#pragma once
#include "vec.h"

namespace kvpager::cpu::KVPAGER_ISA {

// Lanes of a and b for one step of a transpose: blocks of kStep lanes change places across the diagonal.
template <int kStep, bool kHigh>
KVPAGER_INLINE Vec interleave_blocks(Vec a, Vec b) {
  typedef int32_t Lanes __attribute__((vector_size(4 * kWidth)));
  Lanes from;
#pragma GCC unroll 16
  for (int lane = 0; lane < kWidth; ++lane) {
    const bool second = lane & kStep;
    from[lane] = kHigh ? (second ? kWidth + lane : lane + kStep) : (second ? kWidth + lane - kStep : lane);
  }
  typedef float Floats __attribute__((vector_size(4 * kWidth)));
#if defined(__clang__)
  Floats out;
  for (int lane = 0; lane < kWidth; ++lane) out[lane] = from[lane] < kWidth ? a[from[lane]] : b[from[lane] - kWidth];
  return (Vec)out;
#else
  return (Vec)__builtin_shuffle((Floats)a, (Floats)b, from);
#endif
}

// Transposes kWidth vectors of kWidth 32-bit lanes, in log2(kWidth) steps; the bits of a lane are never looked at.
template <int kStep = 1>
KVPAGER_INLINE void transpose(Vec* rows) {
  if constexpr (kStep < kWidth) {
#pragma GCC unroll 16
    for (int row = 0; row < kWidth; ++row)
      if ((row & kStep) == 0) {
        const Vec a = rows[row], b = rows[row + kStep];
        rows[row] = interleave_blocks<kStep, false>(a, b);
        rows[row + kStep] = interleave_blocks<kStep, true>(a, b);
      }
    transpose<2 * kStep>(rows);
  }
}

// store_narrow(target, v): kWidth floats as T, rounded like narrow<T>.
KVPAGER_INLINE void store_narrow(float* target, Vec numbers) { store(target, numbers); }
#if defined(__AVX512F__)
KVPAGER_INLINE void store_narrow(float16* target, Vec numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
}
KVPAGER_INLINE void store_narrow(bfloat16* target, Vec numbers) {
  const __m512i bits = _mm512_castps_si512(numbers), high = _mm512_srli_epi32(bits, 16);
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(high, _mm512_set1_epi32(1)))),
      16);
  const __mmask16 nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(result));
}
#elif defined(__AVX2__)
KVPAGER_INLINE void store_narrow(float16* target, Vec numbers) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT));
}
KVPAGER_INLINE void store_narrow(bfloat16* target, Vec numbers) {
  const __m256i bits = _mm256_castps_si256(numbers), high = _mm256_srli_epi32(bits, 16);
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)))),
      16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
  const __m256i result = _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target),
                   _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1)));
}
#else
template <class T>
KVPAGER_INLINE void store_narrow(T* target, Vec numbers) {
  for (int i = 0; i < kWidth; ++i) target[i] = narrow<T>(numbers[i]);
}
#endif

template <class T>
KVPAGER_INLINE void store_narrow_partial(T* target, Vec numbers, int64_t count) {
  T padded[kWidth];
  store_narrow(padded, numbers);
  memcpy(target, padded, count * sizeof(T));
}

}  // namespace kvpager::cpu::KVPAGER_ISA

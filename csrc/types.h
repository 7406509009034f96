// The types of elements: the one list of them, what is true of each, and their conversions to float and back.
//
// "Numbers" are float, float16, bfloat16 and double; "codes" are the one-byte elements of a quantised cache, where the
// number is code * scale. The same source serves the host compiler, nvcc and the emulator, and knows no framework. A
// new type of codes is a struct, a line in the list, its traits, `widen` and `narrow` here; whatever is missing does
// not compile.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__)
#define KVPAGER_HD __host__ __device__ __forceinline__
#else
// Always inlined: kernels of several instruction sets use these, and no set's code may serve another
// (cpu/runtime/isa.h).
#define KVPAGER_HD inline __attribute__((always_inline))
#endif

// X(type, enumerator of torch's ScalarType, torch's name, ...) for every type of numbers and of codes. The build reads
// the codes from here as well: it compiles `*.cache.cu` once for each (build_backend/native_build.py).
#define KVPAGER_FOR_NUMBERS(X, ...)              \
  X(float, Float, "float32", __VA_ARGS__)        \
  X(float16, Half, "float16", __VA_ARGS__)       \
  X(bfloat16, BFloat16, "bfloat16", __VA_ARGS__) \
  X(double, Double, "float64", __VA_ARGS__)
#define KVPAGER_FOR_CODES(X, ...)                          \
  X(int8_code, Char, "int8", __VA_ARGS__)                  \
  X(fp8_e4m3, Float8_e4m3fn, "float8_e4m3fn", __VA_ARGS__) \
  X(fp8_e5m2, Float8_e5m2, "float8_e5m2", __VA_ARGS__)

// X(T, C) for every pair of a type of numbers below double and the caches it may stand beside: its own type, or codes.
#define KVPAGER_FOR_CACHES(X) \
  X(float, float) X(float16, float16) X(bfloat16, bfloat16) KVPAGER_FOR_CODES(KVPAGER_BESIDE_CODES_, X)
#define KVPAGER_BESIDE_CODES_(C, dtype, name, X) X(float, C) X(float16, C) X(bfloat16, C)

namespace kvpager {

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct int8_code {
  int8_t code;  // -127 ... 127
};
struct fp8_e4m3 {
  uint8_t bits;  // sign, 4 exponent bits of bias 7, 3 of mantissa; no inf, 0x7f and 0xff are NaN, the largest is 448
};
struct fp8_e5m2 {
  uint8_t bits;  // the upper byte of a float16: 5 exponent bits of bias 15, 2 of mantissa; the largest is 57344
};

// Whether caches of this type are quantised: whether it is a type of codes.
template <class T>
inline constexpr bool is_quantised = false;
#define KVPAGER_IS_QUANTISED(C, ...) \
  template <>                        \
  inline constexpr bool is_quantised<C> = true;
KVPAGER_FOR_CODES(KVPAGER_IS_QUANTISED)
#undef KVPAGER_IS_QUANTISED

// What is true of one type of codes. There is no default: a type without traits must not compile.
template <class C>
struct CodeTraits;
template <>
struct CodeTraits<int8_code> {
  static constexpr float kLargest = 127;  // the largest number a code stands for before it is scaled
};
template <>
struct CodeTraits<fp8_e4m3> {
  static constexpr float kLargest = 448;
};
template <>
struct CodeTraits<fp8_e5m2> {
  static constexpr float kLargest = 57344;
};

// The type of all arithmetic over T: float, or double for double.
template <class T>
using accumulate_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// In `*.cache.cu`, where KVPAGER_CACHE names the type of the caches: that type, or T itself for `query_type`.
struct query_type {};
template <class T, class Cache>
using cache_type = std::conditional_t<std::is_same_v<Cache, query_type>, T, Cache>;

KVPAGER_HD constexpr uint32_t float_bits(float number) { return __builtin_bit_cast(uint32_t, number); }
KVPAGER_HD constexpr float float_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Types of fewer bits than float, with kMantissa bits of mantissa and exponents that count from kBias: the bits of a
// magnitude to those of the same float, and a float's rounded half to even, if it is no larger than the type's largest.
template <int kBias, int kMantissa>
KVPAGER_HD constexpr uint32_t widen_magnitude(uint32_t magnitude) {
  if (magnitude >> kMantissa) return (magnitude << (23 - kMantissa)) + (uint32_t{127 - kBias} << 23);
  constexpr float kStep = float_of_bits(uint32_t{128 - kBias - kMantissa} << 23);  // between subnormal numbers
  return float_bits(static_cast<float>(magnitude) * kStep);
}
template <int kBias, int kMantissa>
KVPAGER_HD constexpr uint32_t narrow_magnitude(uint32_t magnitude) {
  constexpr int kDropped = 23 - kMantissa;
  constexpr float kUnit = float_of_bits(uint32_t{151 - kBias - kMantissa} << 23);  // its last place is such a step
  if (magnitude < uint32_t{128 - kBias} << 23) return float_bits(float_of_bits(magnitude) + kUnit) - float_bits(kUnit);
  const uint32_t half = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1u);
  return (magnitude + half - (uint32_t{127 - kBias} << 23)) >> kDropped;
}

KVPAGER_HD float widen(float number) { return number; }
KVPAGER_HD double widen(double number) { return number; }
KVPAGER_HD float widen(bfloat16 number) { return float_of_bits(uint32_t{number.bits} << 16); }

KVPAGER_HD float widen(float16 number) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number.bits));
  return wide;
#else
  const uint32_t sign = uint32_t{number.bits} << 16 & 0x80000000u, magnitude = number.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of_bits(sign | 0x7f800000u | magnitude << 13);  // inf, NaN
  return float_of_bits(sign | widen_magnitude<15, 10>(magnitude));
#endif
}

KVPAGER_HD constexpr float widen(int8_code number) { return number.code; }

KVPAGER_HD constexpr float widen(fp8_e4m3 number) {
  const uint32_t sign = uint32_t{number.bits} << 24 & 0x80000000u, magnitude = number.bits & 0x7fu;
  if (magnitude == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
  return float_of_bits(sign | widen_magnitude<7, 3>(magnitude));
}

KVPAGER_HD constexpr float widen(fp8_e5m2 number) {
  const uint32_t sign = uint32_t{number.bits} << 24 & 0x80000000u, magnitude = number.bits & 0x7fu;
  if (magnitude >= 0x7cu) return float_of_bits(sign | 0x7f800000u | magnitude << 21);  // inf, NaN
  return float_of_bits(sign | widen_magnitude<15, 2>(magnitude));
}

// fp8 from a float; a NaN becomes 0x7f.
template <class C, int kBias, int kMantissa>
KVPAGER_HD constexpr C narrow_fp8(float number) {
  constexpr uint32_t kLargest = float_bits(CodeTraits<C>::kLargest);
  const uint32_t bits = float_bits(number), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const uint32_t bounded = magnitude < kLargest ? magnitude : kLargest;
  const uint32_t code = magnitude > 0x7f800000u ? 0x7fu : narrow_magnitude<kBias, kMantissa>(bounded);
  return C{static_cast<uint8_t>(sign | code)};
}

// narrow<T>(x): nearest T, ties to even; NaN stays NaN, overflow becomes inf. Codes of a quantised cache saturate, and
// int8, which has no NaN, makes a 0 of it.
template <class T>
KVPAGER_HD constexpr T narrow(accumulate_t<T> number) {
#if defined(__CUDA_ARCH__)
  if constexpr (std::is_same_v<T, float16>) {
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(number));
    return result;
  }
#endif
  if constexpr (std::is_same_v<T, bfloat16>) {
    const uint32_t bits = float_bits(number);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bfloat16{static_cast<uint16_t>(bits >> 16 | 0x40u)};
    return bfloat16{static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
  } else if constexpr (std::is_same_v<T, float16>) {
    const uint32_t bits = float_bits(number), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to inf
      result = 0x7c00u;
    } else {
      result = narrow_magnitude<15, 10>(magnitude);
    }
    return float16{static_cast<uint16_t>(sign | result)};
  } else if constexpr (std::is_same_v<T, int8_code>) {
    const float bounded = number > 127.0f ? 127.0f : (number < -127.0f ? -127.0f : number);
    // Adding 1.5 * 2^23 leaves no room for a fraction: rounded to even, the code in the low bits.
    return int8_code{static_cast<int8_t>(number == number ? float_bits(bounded + 12582912.0f) & 0xffu : 0u)};
  } else if constexpr (std::is_same_v<T, fp8_e4m3>) {
    return narrow_fp8<fp8_e4m3, 7, 3>(number);
  } else if constexpr (std::is_same_v<T, fp8_e5m2>) {
    return narrow_fp8<fp8_e5m2, 15, 2>(number);
  } else {
    static_assert(std::is_same_v<T, accumulate_t<T>>, "narrow() has no rule for this type");
    return number;
  }
}

// What all kernels take for granted of codes: a byte each, all zero bits are 0, and what is too large saturates.
#define KVPAGER_CHECK_CODES(C, ...)                                                    \
  static_assert(sizeof(C) == 1 && widen(C{}) == 0);                                    \
  static_assert(widen(narrow<C>(CodeTraits<C>::kLargest)) == CodeTraits<C>::kLargest); \
  static_assert(widen(narrow<C>(-2 * CodeTraits<C>::kLargest)) == -CodeTraits<C>::kLargest);
KVPAGER_FOR_CODES(KVPAGER_CHECK_CODES)
#undef KVPAGER_CHECK_CODES

}  // namespace kvpager

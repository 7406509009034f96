// How decode multiplies rows of K by the query, and weights by rows of V. The kind of product follows from the types of
// the query T and of the cache C:
//
// - floats: elements are widened, a Pair at a time. This is the rule, and every instruction set can do it.
// - bf16_pairs, for bfloat16 over bfloat16 or codes, all of which bfloat16 holds exactly, where the set has dot_bf16:
//   neighbours of a row of K, or two tokens of V, are multiplied and added at once. The weights are rounded to bfloat16
//   and, over bfloat16, divided by the sum of the rounded ones.
// - integers, for 16-bit queries over int8 codes where the set has dot_int16: the same with 16-bit integers, exact up
//   to rounding the query to 16 bits of its largest element, and a chunk's weights to 16 bits of the largest of them.
//
// Elements come in Pairs; `place` gives the place of a lane's element in the natural order. A Vec16 holds 16-bit
// elements, bfloat16 or integers.
#pragma once
#include "../vec/vec.h"

namespace kvpager::cpu::decode::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

enum class ProductKind { floats, bf16_pairs, integers };

template <class T, class C>
constexpr ProductKind product_kind() {
#if defined(KVPAGER_HAS_DOT16)
  if constexpr (sizeof(T) == 2 && std::is_same_v<C, int8_code>) return ProductKind::integers;
#endif
#if defined(KVPAGER_HAS_BF16_DOT)
  if constexpr (std::is_same_v<T, bfloat16> && (std::is_same_v<C, bfloat16> || is_quantised<C>))
    return ProductKind::bf16_pairs;
#endif
  return ProductKind::floats;
}

// A prepared query has kPair floats' room for each Pair; `prepare` returns what its scores are to be multiplied by.
template <class T, class C, ProductKind = product_kind<T, C>()>
struct KeyProduct {
  using Key = Pair;
  using Sum = Vec;
  static float prepare(const T* query, int64_t head_dim, float* target) {
    for (int64_t d = 0; d < head_dim; d += kPair) {
      T whole[kPair] = {};
      memcpy(whole, query + d, least(kPair, head_dim - d) * sizeof(T));
      const Pair pair =
          is_quantised<C> ? Pair{KVPAGER_ISA::load(whole), KVPAGER_ISA::load(whole + kWidth)} : load_pair(whole);
      store(target + d, pair.first);
      store(target + d + kWidth, pair.second);
    }
    return 1;
  }
  static KVPAGER_INLINE Key load(const C* key) { return load_pair(key); }
  static KVPAGER_INLINE Key load_partial(const C* key, int64_t count) { return load_pair_partial(key, count); }
  static KVPAGER_INLINE Sum none() { return zero(); }
  static KVPAGER_INLINE Sum add(Sum sum, const float* query, Key key) {
    return fma(key.second, KVPAGER_ISA::load(query + kWidth), fma(key.first, KVPAGER_ISA::load(query), sum));
  }
  static KVPAGER_INLINE Vec total(Sum sum) { return sum; }
};

// `prepare` turns the weights of a chunk, kPair at a time up to `count`, into what `spread` reads, in place; it returns
// what sums of their products are to be multiplied by, and adds to `rounded` the weights as they now are. `load` takes
// of the rows of kTokens tokens kPair elements or, not kWhole, the first `count`; a last token has no second row, not
// kBoth.
template <class T, class C, ProductKind = product_kind<T, C>()>
struct ValueProduct {
  static constexpr int kTokens = 1;
  static constexpr bool kRounds = false, kScales = false;  // whether `rounded` is kept, whether the factor isn't 1
  using Sum = Vec;
  static int place(int lane) {
    if (!std::is_same_v<C, bfloat16> || !kHasBfloat16Pairs) return lane;
    return lane < kWidth ? 2 * lane : 2 * (lane - kWidth) + 1;
  }
  static KVPAGER_INLINE float prepare(float*, int64_t, float&) { return 1; }
  static KVPAGER_INLINE Vec spread(const float* weights, int64_t token) { return splat(weights[token]); }
  template <bool kWhole, bool>
  static KVPAGER_INLINE Pair load(const C* row, const C*, int64_t count) {
    return kWhole ? load_pair(row) : load_pair_partial(row, count);
  }
  static KVPAGER_INLINE Sum none() { return zero(); }
  static KVPAGER_INLINE Sum add(Sum sum, Vec weight, Vec values) { return fma(weight, values, sum); }
  static KVPAGER_INLINE Vec total(Sum sum) { return sum; }
};

#if defined(KVPAGER_HAS_DOT16)

struct Pair16 {
  Vec16 first, second;
};

// Rows of two tokens zipped, so that a lane has one element of both.
template <class C>
struct TwoRows {
  static constexpr int kTokens = 2;
  static int place(int lane) {
    const int within = lane % kWidth;
    return within + within / 4 * 4 + (lane < kWidth ? 0 : 4);
  }
  static KVPAGER_INLINE Vec spread(const float* weights, int64_t token) { return splat(weights[token / 2]); }
  template <bool kWhole, bool kBoth>
  static KVPAGER_INLINE Pair16 load(const C* row, const C* second, int64_t count) {
    const auto load_row = [count](const C* at) __attribute__((always_inline)) {
      return kWhole ? load16(at) : load16_partial(at, count);
    };
    const Vec16 a = load_row(row), b = kBoth ? load_row(second) : zero16();
    return {zip_low(a, b), zip_high(a, b)};
  }
};

template <class T>
struct KeyProduct<T, int8_code, ProductKind::integers> {
  using Key = Vec16;
  using Sum = Vec16;
  static float prepare(const T* query, int64_t head_dim, float* target) {
    // A sum has two products of up to 2^7 * limit for each Pair; it stays below 2^31.
    const int64_t pairs = (head_dim + kPair - 1) / kPair, most = (int64_t{1} << 23) / pairs - 1;
    const float limit = static_cast<float>(least(32767, most));
    Vec tops = zero(), poison = zero();  // 0 * inf and 0 * NaN are NaN
    const auto element = [&](int64_t d) {
      return d + kWidth <= head_dim ? KVPAGER_ISA::load(query + d)
                                    : KVPAGER_ISA::load_partial(query + d, d < head_dim ? head_dim - d : 0);
    };
    for (int64_t d = 0; d < head_dim; d += kWidth) {
      tops = maximum(absolute(element(d)), tops);
      poison = fma(element(d), zero(), poison);
    }
    const float bad = reduce_add(poison), top = reduce_max(tops), bounded = top > 1e-30f ? top : 1e-30f;
    const Vec factor = splat(bad == bad ? limit / bounded : 0.0f);
    const auto code = [&](int64_t d) { return bad == bad ? mul(element(d), factor) : zero(); };
    for (int64_t d = 0; d < head_dim; d += kPair) store(target + d, as_floats(round_int16(code(d), code(d + kWidth))));
    return bad == bad ? bounded / limit : bad;
  }
  static KVPAGER_INLINE Key load(const int8_code* key) { return load16(key); }
  static KVPAGER_INLINE Key load_partial(const int8_code* key, int64_t count) { return load16_partial(key, count); }
  static KVPAGER_INLINE Sum none() { return zero16(); }
  static KVPAGER_INLINE Sum add(Sum sum, const float* query, Key key) {
    return dot_int16(sum, bits_of(KVPAGER_ISA::load(query)), key);
  }
  static KVPAGER_INLINE Vec total(Sum sum) { return sums_to_floats(sum); }
};

template <class T>
struct ValueProduct<T, int8_code, ProductKind::integers> : TwoRows<int8_code> {
  static constexpr bool kRounds = false, kScales = true;
  using Sum = Vec16;  // at most kMaxChunk products of 2^15 * 2^7
  // A weight that is no number or infinite makes the factor NaN, and with it all that it is multiplied with.
  static KVPAGER_INLINE float prepare(float* weights, int64_t count, float&) {
    Vec tops = zero(), poison = zero();
    for (int64_t i = 0; i < count; i += kWidth) {
      tops = maximum(KVPAGER_ISA::load(weights + i), tops);
      poison = fma(KVPAGER_ISA::load(weights + i), zero(), poison);
    }
    const float bad = reduce_add(poison), top = reduce_max(tops), bounded = top > 1e-30f ? top : 1e-30f;
    const Vec factor = splat(32767.0f / bounded);
    for (int64_t i = 0; i < count; i += kPair) {
      const Vec low = mul(KVPAGER_ISA::load(weights + i), factor),
                high = mul(KVPAGER_ISA::load(weights + i + kWidth), factor);
      store(weights + i / 2, as_floats(round_int16(low, high)));
    }
    return bad == bad ? bounded / 32767.0f : bad;
  }
  static KVPAGER_INLINE Sum none() { return zero16(); }
  static KVPAGER_INLINE Sum add(Sum sum, Vec weight, Vec16 values) { return dot_int16(sum, bits_of(weight), values); }
  static KVPAGER_INLINE Vec total(Sum sum) { return sums_to_floats(sum); }
};

#endif

#if defined(KVPAGER_HAS_BF16_DOT)

template <class C>
struct KeyProduct<bfloat16, C, ProductKind::bf16_pairs> {
  using Key = Vec16;
  using Sum = Vec;
  static float prepare(const bfloat16* query, int64_t head_dim, float* target) {
    for (int64_t d = 0; d < head_dim; d += kPair) {
      memset(target + d, 0, kPair * sizeof(float));
      memcpy(target + d, query + d, least(kPair, head_dim - d) * sizeof(bfloat16));
    }
    return 1;
  }
  static KVPAGER_INLINE Key load(const C* key) { return load16(key); }
  static KVPAGER_INLINE Key load_partial(const C* key, int64_t count) { return load16_partial(key, count); }
  static KVPAGER_INLINE Sum none() { return zero(); }
  static KVPAGER_INLINE Sum add(Sum sum, const float* query, Key key) {
    return dot_bf16(sum, bits_of(KVPAGER_ISA::load(query)), key);
  }
  static KVPAGER_INLINE Vec total(Sum sum) { return sum; }
};

template <class C>
struct ValueProduct<bfloat16, C, ProductKind::bf16_pairs> : TwoRows<C> {
  static constexpr bool kRounds = !is_quantised<C>, kScales = false;
  using Sum = Vec;
  static KVPAGER_INLINE Sum none() { return zero(); }
  static KVPAGER_INLINE float prepare(float* weights, int64_t count, float& rounded) {
    Vec sum = zero();
    for (int64_t i = 0; i < count; i += kPair) {
      const Vec16 rounded_pair = round_bf16(KVPAGER_ISA::load(weights + i), KVPAGER_ISA::load(weights + i + kWidth));
      sum = dot_bf16(sum, rounded_pair, bits_of(splat(float_of_bits(0x3f803f80))));  // times ones
      store(weights + i / 2, as_floats(rounded_pair));
    }
    rounded += reduce_add(sum);
    return 1;
  }
  static KVPAGER_INLINE Sum add(Sum sum, Vec weight, Vec16 values) { return dot_bf16(sum, bits_of(weight), values); }
  static KVPAGER_INLINE Vec total(Sum sum) { return sum; }
};

#endif

}  // namespace kvpager::cpu::decode::KVPAGER_ISA

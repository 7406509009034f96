// QK-norm, RoPE and slot write of one step's tokens in one pass over the rows of the QKV projection.
//
// A head's row is widened once, normed and turned in float, and rounded once: on its way to query_out, to its slot, or
// to the codes of a quantised cache. Values go to their slot as they are, or as codes. Cost: one read of qkv, one write
// of query_out and of the slots.
#include "../../layers/params.h"
#include "../vec/quantise.h"
#include "../vec/transpose.h"

namespace kvpager::cpu::layers::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/
namespace {

template <class T>
KVPAGER_INLINE Vec load_up_to(const T* source, int64_t count) {
  return count < kWidth ? load_partial(source, count) : load(source);
}

KVPAGER_INLINE void store_up_to(float* target, Vec numbers, int64_t count) {
  count < kWidth ? store_partial(target, numbers, count) : store(target, numbers);
}

KVPAGER_INLINE int64_t vector_at(int64_t d, int64_t end) { return end - d < kWidth ? end - d : kWidth; }

// 1 / sqrt(mean of squares + eps) of `row` [D], which is also widened into `wide`.
template <class T>
float widen_and_measure(const T* row, int64_t D, float eps, float* wide) {
  Vec squares = zero();
  for (int64_t d = 0; d < D; d += kWidth) {
    const int64_t count = vector_at(d, D);
    const Vec numbers = load_up_to(row + d, count);
    squares = fma(numbers, numbers, squares);
    store_up_to(wide + d, numbers, count);
  }
  return 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(D) + eps);
}

// row [D] of T -> `wide`: times 1 / rms and weight where there is a weight, then pair j turned by angle j.
template <class T>
void norm_and_turn(const T* row, const T* weight, const float* cos_sin, int64_t D, float eps, float* wide) {
  const int64_t half = D / 2;
  const Vec factor = splat(widen_and_measure(row, D, eps, wide));
  const float *cosines = cos_sin, *sines = cos_sin + half;
  for (int64_t d = 0; d < half; d += kWidth) {
    const int64_t count = vector_at(d, half);
    Vec low = load_up_to(wide + d, count), high = load_up_to(wide + half + d, count);
    if (weight != nullptr) {
      low = mul(mul(low, factor), load_up_to(weight + d, count));
      high = mul(mul(high, factor), load_up_to(weight + half + d, count));
    }
    const Vec c = load_up_to(cosines + d, count), s = load_up_to(sines + d, count);
    store_up_to(wide + d, sub(mul(low, c), mul(high, s)), count);
    store_up_to(wide + half + d, fma(high, c, mul(low, s)), count);
  }
}

template <class T>
void store_row(const float* wide, int64_t D, T* target) {
  for (int64_t d = 0; d < D; d += kWidth) {
    const int64_t count = vector_at(d, D);
    if (count < kWidth) {
      store_narrow_partial(target + d, load_partial(wide + d, count), count);
    } else {
      store_narrow(target + d, load(wide + d));
    }
  }
}

// Where a row goes: a head of a slot.
struct Place {
  int64_t block, head, offset;
};

// A row of floats to its place in a cache, rounded; in a quantised one with its own scale, or under the one of all.
template <class C>
void write_row(const float* wide, int64_t D, const Cache<C>& cache, const Scales<float>& scales, const Place& place) {
  C* target = cache.at(place.block, place.head, place.offset);
  if constexpr (!is_quantised<C>) {
    store_row(wide, D, target);
  } else if (scales.fixed) {
    store_codes(wide, D, 1.0f / *scales.data, target);
  } else {
    *scales.at(place.block, place.head, place.offset) = quantise_row(wide, D, target);
  }
}

// Like write_row, of a row that is as it was given.
template <class T, class C>
void write_given(const T* row, int64_t D, const Cache<C>& cache, const Scales<float>& scales, const Place& place,
                 float* wide) {
  if constexpr (!is_quantised<C>) {
    memcpy(cache.at(place.block, place.head, place.offset), row, D * sizeof(T));
  } else {
    for (int64_t d = 0; d < D; d += kWidth) {
      const int64_t count = vector_at(d, D);
      store_up_to(wide + d, load_up_to(row + d, count), count);
    }
    write_row(wide, D, cache, scales, place);
  }
}

}  // namespace

template <class T, class C>
void write_tokens(const QkNormRopeWriteParams<T, C>& p, int64_t begin, int64_t end, float* row) {
  const int64_t H = p.num_heads, K = p.pool.num_kv_heads, D = p.pool.head_dim, S = p.pool.block_size;
  for (int64_t token = begin; token < end; ++token) {
    // In bounds: token < num_tokens <= rows of qkv, query_out and positions; the driver has checked positions and
    // slots.
    const float* cos_sin = p.cos_sin + p.positions[token] * p.cos_sin_stride;
    for (int64_t head = 0; head < H; ++head) {
      norm_and_turn(p.qkv.at(token, head), p.q_weight, cos_sin, D, p.eps, row);
      store_row(row, D, p.query_out.at(token, head));
    }
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    for (int64_t head = 0; head < K; ++head) {
      const Place place{slot / S, head, slot % S};
      norm_and_turn(p.qkv.at(token, H + head), p.k_weight, cos_sin, D, p.eps, row);
      write_row(row, D, p.key_cache, p.key_scale, place);
      write_given(p.qkv.at(token, H + K + head), D, p.value_cache, p.value_scale, place, row);
    }
  }
}

#define KVPAGER_INSTANTIATE(T, C) \
  template void write_tokens(const QkNormRopeWriteParams<T, C>&, int64_t, int64_t, float*);
KVPAGER_FOR_CACHES(KVPAGER_INSTANTIATE)

}  // namespace kvpager::cpu::layers::KVPAGER_ISA

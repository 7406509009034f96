// A row [D] of one token and head, spread over kRowLanes lanes, and what is done to it: norm, rotation, quantising.
//
// Lane l of the kRowLanes keeps elements 8 c ... 8 c + 7 of the lower half of the row, for c = l, l + kRowLanes, ...,
// and the same of the upper half: the two numbers that RoPE turns together are in one lane, and every access is 16
// bytes (of 16-bit numbers) or 8 bytes (of codes). D is a multiple of 16, up to 128 * kPacks; lanes past the row hold
// zeros.
// Rounding is that of csrc/cpu/vec/quantise.h, number by number.
#pragma once
#include <cfloat>

#include "codes.cuh"
#include "units.h"

namespace kvpager::cuda {

constexpr int kRowLanes = 8;
constexpr int kPack = 8;  // elements

// Whether the kernels that spread rows over lanes take a call: 16-bit numbers, a head dim that the lanes share in
// packs, memory aligned to 16 bytes (`numbers` says of what is read), caches to a pack. For launchers.
template <class T, class C>
bool takes_rows(const PoolShape& pool, const Alignment& numbers, const Cache<C>& key_cache,
                const Cache<C>& value_cache) {
  const Alignment caches = Alignment().cache(key_cache, sizeof(C)).cache(value_cache, sizeof(C));
  return sizeof(T) == 2 && pool.head_dim % (2 * kPack) == 0 && pool.head_dim <= 4 * kRowLanes * kPack &&
         numbers.fits(16) && caches.fits(kPack * sizeof(C));
}

template <int kPacks>
struct RowShare {
  float low[kPacks][kPack], high[kPacks][kPack];
};

// First element, within a half, of pack `index` of this lane.
__device__ __forceinline__ int pack_start(int index) {
  return (static_cast<int>(threadIdx.x) % kRowLanes + index * kRowLanes) * kPack;
}

template <class T>
__device__ __forceinline__ void load_numbers(const T* source, float (&numbers)[kPack]) {
  constexpr int kAtOnce = 16 / sizeof(T) < kPack ? 16 / sizeof(T) : kPack;
#pragma unroll
  for (int first = 0; first < kPack; first += kAtOnce) {
    const Pack<T, kAtOnce> pack = load_pack<T, kAtOnce>(source + first);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) numbers[first + i] = widen(pack.at[i]);
  }
}

template <class T>
__device__ __forceinline__ void store_numbers(T* target, const float (&numbers)[kPack], float factor) {
  if constexpr (is_quantised<T>) {
    Pack<uint16_t, kPack / 2> pack;
#pragma unroll
    for (int i = 0; i < kPack; i += 2)
      pack.at[i / 2] = static_cast<uint16_t>(two_codes<T>(numbers[i] * factor, numbers[i + 1] * factor));
    store_pack(reinterpret_cast<uint16_t*>(target), pack);
  } else {
    Pack<T, kPack> pack;
#pragma unroll
    for (int i = 0; i < kPack; ++i) pack.at[i] = narrow<T>(numbers[i] * factor);
    store_pack(target, pack);
  }
}

template <class T, int kPacks>
__device__ __forceinline__ void load_row(const T* row, int half, RowShare<kPacks>& share) {
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int d = pack_start(c);
#pragma unroll
    for (int i = 0; i < kPack; ++i) share.low[c][i] = share.high[c][i] = 0;
    if (row == nullptr || d >= half) continue;
    load_numbers(row + d, share.low[c]);
    load_numbers(row + half + d, share.high[c]);
  }
}

template <class T, int kPacks>
__device__ __forceinline__ void store_row(const RowShare<kPacks>& share, int half, float factor, T* row) {
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int d = pack_start(c);
    if (d >= half) continue;
    store_numbers(row + d, share.low[c], factor);
    store_numbers(row + half + d, share.high[c], factor);
  }
}

// As it is, bit for bit.
template <int kPacks, class T>
__device__ __forceinline__ void copy_row(const T* row, int half, T* target) {
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int d = pack_start(c);
    if (d >= half) continue;
    store_pack(target + d, load_pack<T, kPack>(row + d));
    store_pack(target + half + d, load_pack<T, kPack>(row + half + d));
  }
}

__device__ __forceinline__ float row_sum(float share) {
#pragma unroll
  for (int width = kRowLanes / 2; width > 0; width /= 2) share += __shfl_xor_sync(0xffffffffu, share, width);
  return share;
}

// What a row is multiplied with to become codes, and the scale that takes them back. `bad`: it holds a NaN or an inf.
template <class C>
__device__ __forceinline__ void scale_of_row(float top, bool bad, float& factor, float& scale) {
  const float least = CodeTraits<C>::kLargest * FLT_MIN, bounded = top > least ? top : least;
  factor = bad ? 0.0f : CodeTraits<C>::kLargest / bounded;
  scale = bad ? float_of_bits(0x7fc00000u) : bounded / CodeTraits<C>::kLargest;
}

// Largest magnitude of a row, and whether it holds a NaN or an inf; the same in all its lanes. Called by whole warps.
template <int kPacks>
__device__ __forceinline__ float top_of_row(const RowShare<kPacks>& share, bool& bad) {
  float top = 0, poison = 0;  // 0 * inf and 0 * NaN are NaN
#pragma unroll
  for (int c = 0; c < kPacks; ++c)
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float low = fabsf(share.low[c][i]), high = fabsf(share.high[c][i]);
      top = low > top ? low : top;
      top = high > top ? high : top;
      poison += low * 0.0f + high * 0.0f;
    }
#pragma unroll
  for (int width = kRowLanes / 2; width > 0; width /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, top, width);
    top = other > top ? other : top;
  }
  bad = row_sum(poison) != 0;  // NaN is not 0 either
  return top;
}

// A row to its place in a quantised cache, with its own scale, which is written, or under the one of all. Called by
// whole warps; `target` is null in lanes whose row goes nowhere.
template <class C, int kPacks>
__device__ __forceinline__ void write_codes(const RowShare<kPacks>& share, int half, const Scales<float>& scales,
                                            float* scale_target, C* target) {
  if (scales.fixed) {
    if (target != nullptr) store_row(share, half, 1.0f / *scales.data, target);
    return;
  }
  float factor, scale;
  bool bad;
  const float top = top_of_row(share, bad);
  scale_of_row<C>(top, bad, factor, scale);
  if (target == nullptr) return;
  if (threadIdx.x % kRowLanes == 0) *scale_target = scale;
  bad ? store_row(RowShare<kPacks>{}, half, 0.0f, target) : store_row(share, half, factor, target);  // 0 * inf is NaN
}

// The same for a row [D] of any layout, by a warp. `number(d)` gives its elements, as often as asked.
template <class C, class F>
__device__ void write_codes(const F& number, int64_t D, const Scales<float>& scales, float* scale_target, C* codes) {
  const int lane = threadIdx.x % 32;
  float factor = 1.0f, scale = 0, top = 0, poison = 0;
  bool bad = false;
  if (scales.fixed) {
    factor = 1.0f / *scales.data;
  } else {
    for (int64_t d = lane; d < D; d += 32) {
      const float magnitude = fabsf(number(d));
      top = magnitude > top ? magnitude : top;
      poison += magnitude * 0.0f;  // 0 * inf and 0 * NaN are NaN
    }
    for (int width = 16; width > 0; width /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, width);
      top = other > top ? other : top;
      poison += __shfl_xor_sync(0xffffffffu, poison, width);
    }
    bad = poison != 0;
    scale_of_row<C>(top, bad, factor, scale);
    if (lane == 0) *scale_target = scale;
  }
  for (int64_t d = lane; d < D; d += 32) codes[d] = bad ? C{} : narrow<C>(number(d) * factor);
}

}  // namespace kvpager::cuda

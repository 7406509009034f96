// QK-norm, RoPE, quantising and slot write of a step's tokens in one pass over their QKV rows.
//
// A row is one head of one token: H query heads, K key heads, K value heads. Fast: kRowLanes lanes a row
// (device/row.cuh), 16 rows a block: a row is read once, normed, turned and quantised in registers, and written once.
// Plain, for any even head dim, stride and dtype: a warp a row, element by element, recomputed for each use.
// Bytes moved: T (H + 2 K) D numbers in, as many out (codes for K and V), and the angles out of L2.
// In flight: 32 bytes a thread, 32 KB on an SM of 1024 threads.
// budget: kernel=qk_norm_rope_write_rows_kernel registers=104 shared=0 spills=0 threads=128
// budget: kernel=qk_norm_rope_write_plainly_kernel registers=72 shared=0 spills=0 threads=128
#pragma once
#include "../../layers/params.h"
#include "../moves/quantised_write.cuh"

namespace kvpager::cuda::layers {

using moves::kRowsPerBlock, moves::kWriteThreads;

// A row of the grid: which token and head, and where it stands. Nothing is done with it if `token` is -1.
struct TokenRow {
  int64_t token, head, position, slot;
};

// The same in every thread of a block; a token with a value that does not fit is reported, and skipped as a whole.
template <class T, class C>
__device__ __forceinline__ TokenRow token_row(const QkNormRopeWriteParams<T, C>& p, int64_t head, unsigned* errors) {
  const int64_t token = blockIdx.x, position = p.positions[token], slot = p.slot_mapping[token];
  const bool position_fits = position >= 0 && position < p.num_positions;
  const bool slot_fits = slot >= -1 && slot < p.pool.num_blocks * p.pool.block_size;
  if (threadIdx.x == 0 && !position_fits) report(errors, kPositions);
  if (threadIdx.x == 0 && !slot_fits) report(errors, kSlotMapping);
  return {position_fits && slot_fits && scales_are_valid(p, errors) ? token : -1, head, position, slot};
}

// 1 / rms of a row. Called by whole warps.
template <int kPacks>
__device__ __forceinline__ float norm_factor(const RowShare<kPacks>& share, int half, float eps) {
  float squares = 0;
#pragma unroll
  for (int c = 0; c < kPacks; ++c)
#pragma unroll
    for (int i = 0; i < kPack; ++i) squares += share.low[c][i] * share.low[c][i] + share.high[c][i] * share.high[c][i];
  return 1.0f / sqrtf(row_sum(squares) / static_cast<float>(2 * half) + eps);
}

// times factor and weight, where there is a weight
template <class T>
__device__ __forceinline__ void weigh(const T* weight, float factor, float (&numbers)[kPack]) {
  float weights[kPack];
  load_numbers(weight, weights);
#pragma unroll
  for (int i = 0; i < kPack; ++i) numbers[i] = numbers[i] * factor * weights[i];
}

template <class T, int kPacks>
__device__ __forceinline__ void norm_and_turn(const T* weight, float factor, const float* angles, int half,
                                              RowShare<kPacks>& share) {
#pragma unroll
  for (int c = 0; c < kPacks; ++c) {
    const int d = pack_start(c);
    if (d >= half) continue;
    if (weight != nullptr) {
      weigh(weight + d, factor, share.low[c]);
      weigh(weight + half + d, factor, share.high[c]);
    }
    float cosines[kPack], sines[kPack];
    load_numbers(angles + d, cosines);
    load_numbers(angles + half + d, sines);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const float low = share.low[c][i], high = share.high[c][i];
      share.low[c][i] = low * cosines[i] - high * sines[i];
      share.high[c][i] = high * cosines[i] + low * sines[i];
    }
  }
}

// grid (num_tokens, (H + 2 K) / kRowsPerBlock rounded up), block kWriteThreads
template <class T, class C, int kPacks>
__global__ void __launch_bounds__(kWriteThreads)
    qk_norm_rope_write_rows_kernel(QkNormRopeWriteParams<T, C> p, unsigned* errors) {
  const int64_t H = p.num_heads, K = p.pool.num_kv_heads, S = p.pool.block_size;
  const TokenRow row = token_row(p, int64_t{blockIdx.y} * kRowsPerBlock + threadIdx.x / kRowLanes, errors);
  if (row.token < 0) return;  // whole blocks
  // In bounds: token < num_tokens <= rows of qkv and query_out; head < H + 2 K where `exists`; position and slot fit.
  const bool exists = row.head < H + 2 * K, is_query = row.head < H, is_value = row.head >= H + K;
  const int half = static_cast<int>(p.pool.head_dim / 2);
  const T* source = exists ? p.qkv.at(row.token, row.head) : nullptr;
  const bool is_written = exists && !is_query && row.slot >= 0;
  const int64_t head = is_value ? row.head - H - K : row.head - H, block = row.slot / S, offset = row.slot % S;
  C* target = is_written ? (is_value ? p.value_cache : p.key_cache).at(block, head, offset) : nullptr;
  // A warp may hold rows of several kinds, and its shuffles need all of its lanes: they run for every row.
  RowShare<kPacks> share;
  load_row(source, half, share);
  const float factor = norm_factor(share, half, p.eps);
  if (!is_value)
    norm_and_turn(is_query ? p.q_weight : p.k_weight, factor, p.cos_sin + row.position * p.cos_sin_stride, half, share);
  if (exists && is_query) store_row(share, half, 1.0f, p.query_out.at(row.token, row.head));
  if constexpr (is_quantised<C>) {
    const Scales<float>& scales = is_value ? p.value_scale : p.key_scale;
    write_codes(share, half, scales, is_written ? scales.at(block, head, offset) : nullptr, target);
  } else if (target != nullptr) {
    is_value ? copy_row<kPacks>(source, half, target) : store_row(share, half, 1.0f, target);
  }
}

// grid (num_tokens, (H + 2 K) / warps of a block rounded up), block kWriteThreads
template <class T, class C>
__global__ void __launch_bounds__(kWriteThreads)
    qk_norm_rope_write_plainly_kernel(QkNormRopeWriteParams<T, C> p, unsigned* errors) {
  using A = accumulate_t<T>;
  const int64_t H = p.num_heads, K = p.pool.num_kv_heads, D = p.pool.head_dim, S = p.pool.block_size, half = D / 2;
  const TokenRow row = token_row(p, int64_t{blockIdx.y} * (kWriteThreads / 32) + threadIdx.x / 32, errors);
  if (row.token < 0 || row.head >= H + 2 * K) return;  // whole warps
  const bool is_query = row.head < H, is_value = row.head >= H + K;
  if (!is_query && row.slot < 0) return;
  const int lane = threadIdx.x % 32;
  const T *source = p.qkv.at(row.token, row.head), *weight = is_query ? p.q_weight : p.k_weight;
  A factor = 1;
  if (weight != nullptr) {
    A squares = 0;
    for (int64_t d = lane; d < D; d += 32) squares += widen(source[d]) * widen(source[d]);
    for (int width = 16; width > 0; width /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, width);
    factor = 1 / sqrt(squares / static_cast<A>(D) + p.eps);
  }
  const A* angles = p.cos_sin + row.position * p.cos_sin_stride;
  const auto normed = [&](int64_t d) {
    return weight != nullptr ? widen(source[d]) * factor * widen(weight[d]) : widen(source[d]);
  };
  const auto number = [&](int64_t d) -> A {
    if (is_value) return widen(source[d]);
    if (d < half) return normed(d) * angles[d] - normed(d + half) * angles[d + half];
    return normed(d) * angles[d - half] + normed(d - half) * angles[d];
  };
  if (is_query) {
    T* target = p.query_out.at(row.token, row.head);
    for (int64_t d = lane; d < D; d += 32) target[d] = narrow<T>(number(d));
    return;
  }
  const int64_t head = is_value ? row.head - H - K : row.head - H, block = row.slot / S, offset = row.slot % S;
  C* target = (is_value ? p.value_cache : p.key_cache).at(block, head, offset);
  if constexpr (is_quantised<C>) {
    const Scales<float>& scales = is_value ? p.value_scale : p.key_scale;
    write_codes(number, D, scales, scales.at(block, head, offset), target);
  } else {
    for (int64_t d = lane; d < D; d += 32) target[d] = is_value ? source[d] : narrow<T>(number(d));
  }
}

}  // namespace kvpager::cuda::layers

// Writing tokens into a quantised cache: each row finds its scale, becomes codes and goes to its slot in one pass.
//
// Fast: kRowLanes lanes a row (device/row.cuh), which stays in registers between the maximum and the codes; 16 rows a
// block. Plain, for any head dim, stride and dtype: a warp a row, read twice, the second time out of L1.
// Bytes moved: 2 T K D numbers in, 2 T K (D + 4) out. In flight: 32 bytes a thread, 64 KB on an SM.
// kPacks is 1 for head dims to 128, 2 to 256.
// budget: kernel=write_quantised_rows_kernel registers=64 shared=0 spills=0 threads=128
// budget: kernel=write_quantised_plainly_kernel registers=48 shared=0 spills=0 threads=128
#pragma once
#include "../device/row.cuh"
#include "write.cuh"

namespace kvpager::cuda::moves {

constexpr int kRowsPerBlock = kWriteThreads / kRowLanes;

// grid (num_tokens, 2 K / kRowsPerBlock rounded up), block kWriteThreads
template <class T, class C, int kPacks>
__global__ void __launch_bounds__(kWriteThreads) write_quantised_rows_kernel(WriteParams<T, C> p, unsigned* errors) {
  const int64_t token = blockIdx.x, slot = slot_of(p.slot_mapping, token, p.pool, errors);
  if (slot < 0 || !scales_are_valid(p, errors)) return;
  // In bounds: as in write_kv_kernel; rows K ... 2 K - 1 of a token are its values, later ones are none.
  const int64_t block = slot / p.pool.block_size, offset = slot % p.pool.block_size, K = p.pool.num_kv_heads;
  const int64_t row = int64_t{blockIdx.y} * kRowsPerBlock + threadIdx.x / kRowLanes;
  const bool is_value = row >= K, exists = row < 2 * K;
  const int64_t head = is_value ? row - K : row;
  const Scales<float>& scales = is_value ? p.value_scale : p.key_scale;
  const int half = static_cast<int>(p.pool.head_dim / 2);
  RowShare<kPacks> share;
  load_row(!exists ? nullptr : (is_value ? p.value : p.key).at(token, head), half, share);
  C* target = !exists ? nullptr : (is_value ? p.value_cache : p.key_cache).at(block, head, offset);
  write_codes(share, half, scales, exists ? scales.at(block, head, offset) : nullptr, target);
}

// grid (num_tokens, 2 K / warps of a block rounded up), block kWriteThreads
template <class T, class C>
__global__ void __launch_bounds__(kWriteThreads) write_quantised_plainly_kernel(WriteParams<T, C> p, unsigned* errors) {
  const int64_t token = blockIdx.x, slot = slot_of(p.slot_mapping, token, p.pool, errors);
  if (slot < 0 || !scales_are_valid(p, errors)) return;
  const int64_t block = slot / p.pool.block_size, offset = slot % p.pool.block_size, K = p.pool.num_kv_heads;
  const int64_t row = int64_t{blockIdx.y} * (kWriteThreads / 32) + threadIdx.x / 32;
  if (row >= 2 * K) return;  // whole warps
  const bool is_value = row >= K;
  const int64_t head = is_value ? row - K : row;
  const Scales<float>& scales = is_value ? p.value_scale : p.key_scale;
  const T* source = (is_value ? p.value : p.key).at(token, head);
  write_codes([&](int64_t d) { return widen(source[d]); }, p.pool.head_dim, scales, scales.at(block, head, offset),
              (is_value ? p.value_cache : p.key_cache).at(block, head, offset));
}

}  // namespace kvpager::cuda::moves

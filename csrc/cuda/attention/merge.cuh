// Merging two partial attention results by log-sum-exp.
//
// A thread merges kWidth neighbouring elements of a row, 16 bytes where alignment allows, else one; a block holds whole
// rows, so that `lse` may be `lse_a` or `lse_b`, and `out` one of the results.
// Bytes moved: 3 T H D elements and 12 T H of lse.
// budget: kernel=merge_attention_kernel registers=48 shared=0 spills=0 threads=128
#pragma once
#include "../../attention/params.h"
#include "../device/gpu.h"
#include "../device/units.h"

namespace kvpager::cuda::attention {

constexpr int kMergeThreads = 128;

// Rows that a block holds, of `packs` packs each.
KVPAGER_HD int64_t merge_rows_per_block(int64_t packs) { return packs < kMergeThreads ? kMergeThreads / packs : 1; }

// grid (num_tokens, H / merge_rows_per_block rounded up), block kMergeThreads
template <class T, int kWidth>
__global__ void __launch_bounds__(kMergeThreads) merge_attention_kernel(MergeParams<T> p) {
  using A = accumulate_t<T>;
  const int64_t packs = p.head_dim / kWidth, rows = merge_rows_per_block(packs);
  const int64_t token = blockIdx.x, local = packs < kMergeThreads ? threadIdx.x / packs : 0;
  const int64_t head = int64_t{blockIdx.y} * rows + local,
                first = packs < kMergeThreads ? threadIdx.x % packs : threadIdx.x;
  // In bounds: token < num_tokens, and head < H where `exists`; every tensor is [num_tokens, H, ...].
  const bool exists = local < rows && head < p.num_heads;
  MergeWeights<A> weights{};
  if (exists) weights = merge_weights<A>(p.lse_a.at(token, head), p.lse_b.at(token, head));
  __syncthreads();  // `lse` may be `lse_a` or `lse_b`: all have read before one writes
  if (!exists) return;
  const T *a = p.out_a.at(token, head), *b = p.out_b.at(token, head);
  T* out = p.out.at(token, head);
  for (int64_t pack = first; pack < packs; pack += kMergeThreads) {
    Pack<T, kWidth> row_a{}, row_b{}, sum;
    // An empty result is not read: it may hold NaN. A NaN weight is not 0, and shows.
    if (weights.a != 0) row_a = load_pack<T, kWidth>(a + pack * kWidth);
    if (weights.b != 0) row_b = load_pack<T, kWidth>(b + pack * kWidth);
#pragma unroll
    for (int i = 0; i < kWidth; ++i)
      sum.at[i] = narrow<T>((weights.a != 0 ? weights.a * widen(row_a.at[i]) : A(0)) +
                            (weights.b != 0 ? weights.b * widen(row_b.at[i]) : A(0)));
    store_pack(out + pack * kWidth, sum);
  }
  if (p.lse.data && first == 0) p.lse.at(token, head) = weights.lse;
}

}  // namespace kvpager::cuda::attention

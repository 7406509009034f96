// Where several warps or blocks share the rows of a prefill: from their shares to results.
#pragma once
#include "prefill_rows.cuh"

namespace kvpager::cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// The positions of a block's rows, cut over the blocks of grid.z.
struct PrefillSplit {
  float* parts;        // [blocks, K, num_splits, 16, kHeadDim + 2]: of a row its sums, its top and its total
  unsigned* arrivals;  // [blocks, K], zeros
  int num_splits;      // 1: nothing is cut, and both are null
};

// A share of one row and dim: sums relative to the largest logit, `top`, in base 2.
struct PrefillPart {
  float top, total, sum;
};

// Of `count` shares, in order; `part_of(index, row, d)` gives them.
template <class F>
__device__ __forceinline__ PrefillPart merged(int count, int row, int d, const F& part_of) {
  float highest = -INFINITY;
  for (int i = 0; i < count; ++i) {
    const float other = part_of(i, row, d).top;
    highest = other > highest || other != other ? other : highest;  // a NaN shows
  }
  PrefillPart all{highest, 0, 0};
  for (int i = 0; i < count; ++i) {
    const PrefillPart part = part_of(i, row, d);
    if (part.top == -INFINITY) continue;  // it had no position of the row's
    const float shrink = exp2_fast(part.top - highest);
    all.total += shrink * part.total;
    all.sum += shrink * part.sum;
  }
  return all;
}

// The results of a block's rows, by all of its threads.
template <class T, class C, class F>
__device__ __forceinline__ void write_merged(const AttentionParams<T, C>& p, const PrefillRows& rows, int64_t kv_head,
                                             int count, const F& part_of) {
  const int D = static_cast<int>(p.pool.head_dim);
  const int32_t group = static_cast<int32_t>(p.num_heads / p.pool.num_kv_heads);
  for (int i = threadIdx.x; i < rows.num_rows * D; i += kPrefillThreads) {
    const int row = i / D, d = i % D;
    const int32_t packed = rows.first_row + row;
    const PrefillPart all = merged(count, row, d, part_of);
    const int64_t token = rows.first_token + packed / group, head = kv_head * group + packed % group;
    p.out.at(token, head)[d] = narrow<T>(all.sum / all.total);
    if (p.lse.data && d == 0) p.lse.at(token, head) = (all.top + log2_fast(all.total)) * kLn2;
  }
}

}  // namespace kvpager::cuda

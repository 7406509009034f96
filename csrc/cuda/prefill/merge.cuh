// Where several warps or blocks share the rows of a prefill: from partial results to results.
#pragma once
#include "launch.h"
#include "rows.cuh"

namespace kvpager::cuda::prefill {

// A partial result of one row and dim: sums relative to the largest logit, `top`, in base 2.
struct Partial {
  float top, total, sum;
};

// Of `count` partial results, in order; `partial_of(index, row, d)` gives them.
template <class F>
__device__ __forceinline__ Partial merged(int count, int row, int d, const F& partial_of) {
  float highest = -INFINITY;
  for (int i = 0; i < count; ++i) {
    const float other = partial_of(i, row, d).top;
    highest = other > highest || other != other ? other : highest;  // a NaN shows
  }
  Partial all{highest, 0, 0};
  for (int i = 0; i < count; ++i) {
    const Partial part = partial_of(i, row, d);
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
                                             int count, const F& partial_of) {
  const int D = static_cast<int>(p.pool.head_dim);
  const int32_t group = static_cast<int32_t>(p.num_heads / p.pool.num_kv_heads);
  for (int i = threadIdx.x; i < rows.num_rows * D; i += kPrefillThreads) {
    const int row = i / D, d = i % D;
    const int32_t packed = rows.first_row + row;
    const Partial all = merged(count, row, d, partial_of);
    const int64_t token = rows.first_token + packed / group, head = kv_head * group + packed % group;
    p.out.at(token, head)[d] = narrow<T>(all.sum / all.total);
    if (p.lse.data && d == 0) p.lse.at(token, head) = (all.top + log2_fast(all.total)) * kLn2;
  }
}

}  // namespace kvpager::cuda::prefill

// What the attention kernels that take `query_start_loc` check of it.
#pragma once
#include "../../attention/params.h"
#include "../device/errors.cuh"

namespace kvpager::cuda {

// The whole list of starts, and the lengths beside it, are checked by the block at the grid's origin, of kThreads
// threads.
template <int kThreads, class T, class C>
__device__ void check_query_starts(const AttentionParams<T, C>& p, unsigned* errors) {
  if (p.query_start_loc.data == nullptr || blockIdx.x != 0 || blockIdx.y != 0) return;
  for (int64_t row = threadIdx.x; row < p.num_sequences; row += kThreads) {
    const int64_t query_len = int64_t{p.query_start_loc[row + 1]} - p.query_start_loc[row];
    const int64_t length = p.seq_lens[row];
    if (!p.length_is_valid(length)) {
      report(errors, kSeqLens);
    } else if (query_len < 0 || query_len > p.max_query_len || query_len > length) {
      report(errors, kQueryStartLoc);
    }
  }
  if (threadIdx.x == 0 && (p.query_start_loc[0] != 0 || p.query_start_loc[p.num_sequences] > p.num_tokens))
    report(errors, kQueryStartLoc);
}

}  // namespace kvpager::cuda

// The body of launch_prefill, for the files that compile it.
#pragma once
#include "prefill.cuh"
#include "prefill_launch.h"

namespace kvpager::cuda {

template <class T, class C, int kHeadDim, int kRowWarps>
void launch_prefill_kernel(const AttentionParams<T, C>& params, const LaunchScope& scope) {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  constexpr int kBytes = Shape::kBytes > Shape::kMergeBytes ? Shape::kBytes : Shape::kMergeBytes;
  const int64_t group = params.num_heads / params.pool.num_kv_heads;
  const dim3 grid = grid_of_size("query", params.num_tokens * group / Shape::kRows + params.num_sequences + 1,
                                 params.pool.num_kv_heads);
  allow_dynamic_shared(prefill_kernel<T, C, kHeadDim, kRowWarps>, kBytes);
  KVPAGER_LAUNCH_SHARED((prefill_kernel<T, C, kHeadDim, kRowWarps>), grid, dim3(kPrefillThreads), kBytes, scope.stream,
                        params, scope.errors);
  scope.check();
}

template <class T, class C>
void launch_prefill(const AttentionParams<T, C>& params, bool few_rows, const LaunchScope& scope) {
  const int64_t D = params.pool.head_dim;
  if (D <= 64) {
    few_rows ? launch_prefill_kernel<T, C, 64, 1>(params, scope) : launch_prefill_kernel<T, C, 64, 4>(params, scope);
  } else if (D <= 128) {
    few_rows ? launch_prefill_kernel<T, C, 128, 1>(params, scope) : launch_prefill_kernel<T, C, 128, 4>(params, scope);
  } else {
    few_rows ? launch_prefill_kernel<T, C, 256, 1>(params, scope) : launch_prefill_kernel<T, C, 256, 4>(params, scope);
  }
}

}  // namespace kvpager::cuda

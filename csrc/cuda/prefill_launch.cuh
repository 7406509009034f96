// The body of launch_prefill, for the files that compile it.
#pragma once
#include <algorithm>

#include "prefill.cuh"
#include "prefill_launch.h"

namespace kvpager::cuda {

constexpr int64_t kMostSplits = 64;

template <class T, class C, int kHeadDim, int kRowWarps>
void launch_prefill_kernel(const AttentionParams<T, C>& params, const Tensor& beside, const LaunchScope& scope) {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  constexpr int kBytes = Shape::kBytes > Shape::kMergeBytes ? Shape::kBytes : Shape::kMergeBytes;
  const int64_t group = params.num_heads / params.pool.num_kv_heads;
  dim3 grid = grid_of_size("query", params.num_tokens * group / Shape::kRows + params.num_sequences + 1,
                           params.pool.num_kv_heads);
  PrefillSplit split{nullptr, nullptr, 1};
  std::optional<Tensor> room;  // kept until the kernel is launched: torch reuses it in stream order
  if constexpr (kRowWarps == 1) {
    const int64_t working = std::max<int64_t>(1, params.num_tokens * group / Shape::kRows) * grid.y;
    const int64_t wanted = 2 * scope.multiprocessors() / working, most = params.max_seq_len / (4 * Shape::kTile);
    split.num_splits = static_cast<int>(std::clamp<int64_t>(std::min(wanted, most), 1, kMostSplits));
    if (split.num_splits > 1) {
      const int64_t places = int64_t{grid.x} * grid.y, part = 16 * (kHeadDim + 2);
      room = torch::stable::new_zeros(beside, {places * (split.num_splits * part + 1)}, ScalarType::Float);
      split.parts = static_cast<float*>(room->mutable_data_ptr());
      split.arrivals = reinterpret_cast<unsigned*>(split.parts + places * split.num_splits * part);
    }
  }
  grid.z = static_cast<unsigned>(split.num_splits);
  allow_dynamic_shared(prefill_kernel<T, C, kHeadDim, kRowWarps>, kBytes);
  KVPAGER_LAUNCH_SHARED((prefill_kernel<T, C, kHeadDim, kRowWarps>), grid, dim3(kPrefillThreads), kBytes, scope.stream,
                        params, split, scope.errors);
  scope.check();
}

template <class T, class C>
void launch_prefill(const AttentionParams<T, C>& params, bool few_rows, const Tensor& beside,
                    const LaunchScope& scope) {
  const int64_t D = params.pool.head_dim;
  if (D <= 64) {
    few_rows ? launch_prefill_kernel<T, C, 64, 1>(params, beside, scope)
             : launch_prefill_kernel<T, C, 64, 4>(params, beside, scope);
  } else if (D <= 128) {
    few_rows ? launch_prefill_kernel<T, C, 128, 1>(params, beside, scope)
             : launch_prefill_kernel<T, C, 128, 4>(params, beside, scope);
  } else {
    few_rows ? launch_prefill_kernel<T, C, 256, 1>(params, beside, scope)
             : launch_prefill_kernel<T, C, 256, 4>(params, beside, scope);
  }
}

}  // namespace kvpager::cuda

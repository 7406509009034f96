// The CUDA entry points of the ops that move rows: check (../checks.h), pick the type, launch.
#include "runtime.h"

#include <algorithm>

#include "moves.cuh"

namespace kvpager::cuda {
namespace {

void refuse_quantised(const Tensor& cache, const std::optional<Tensor>& key_scale,
                      const std::optional<Tensor>& value_scale) {
  if (is_quantised_dtype(cache.scalar_type()))
    fail_argument("key_cache", std::string(kFloatDtypes) + " (no quantised caches on CUDA yet)", "codes");
  check_scales("key_scale", key_scale, cache, {});
  check_scales("value_scale", value_scale, cache, {});
}

void write_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
              std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  refuse_quantised(key_cache, key_scale, value_scale);
  with_bits_type("key_cache", key_cache.element_size(), [&](auto zero) {
    using T = decltype(zero);
    if constexpr (sizeof(T) > 1) {
      const WriteParams<T> params = write_params<T>(key, value, key_cache, value_cache, slot_mapping);
      if (params.num_tokens == 0) return;
      const LaunchScope scope(key_cache);
      const dim3 grid = grid_of_size("slot_mapping", params.num_tokens, 1);
      KVPAGER_LAUNCH(write_kv_kernel<T>, grid, dim3(kMoveThreads), scope.stream, params, scope.errors);
      scope.check();
    } else {
      fail_argument("key_cache", "elements of 2, 4 or 8 bytes", "1");
    }
  });
}

void merge_attention(Tensor out, std::optional<Tensor> lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  with_float_type("out", out.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const MergeParams<T> params = merge_params<T>(out, lse, out_a, lse_a, out_b, lse_b);
    if (params.num_tokens == 0 || params.num_heads == 0) return;
    const LaunchScope scope(out);
    const dim3 grid = grid_of_size("out", params.num_tokens, params.num_heads);
    KVPAGER_LAUNCH(merge_attention_kernel<T>, grid, dim3(kMoveThreads), scope.stream, params);
    scope.check();
  });
}

void copy_blocks(std::vector<Tensor> caches, Tensor pairs) {
  check_copy(caches, pairs);
  std::vector<CopyShape> shapes;
  for (const Tensor& cache : caches) shapes.push_back(copy_shape(cache));  // all are checked before one is written
  if (pairs.size(0) == 0) return;
  const LaunchScope scope(pairs);
  for (size_t i = 0; i < caches.size(); ++i) {
    const int64_t slices = std::min<int64_t>((shapes[i].elements + 8 * kMoveThreads - 1) / (8 * kMoveThreads), 1024);
    if (slices == 0) continue;
    const dim3 grid = grid_of_size("pairs", pairs.size(0), slices);
    with_bits_type("caches", caches[i].element_size(), [&](auto zero) {
      using T = decltype(zero);
      KVPAGER_LAUNCH(copy_blocks_kernel<T>, grid, dim3(kMoveThreads), scope.stream,
                     static_cast<T*>(caches[i].mutable_data_ptr()), shapes[i], grid_of<int64_t>(pairs), scope.errors);
    });
    scope.check();
  }
}

void swap_blocks(std::vector<Tensor>, std::vector<Tensor>, Tensor pairs) {
  fail_argument("pairs", "caches and pairs on the CPU (swap_blocks is not there on CUDA yet)", shape_text(pairs));
}

void gather_kv(Tensor, Tensor, Tensor key_cache, Tensor, Tensor, Tensor, Tensor, std::optional<Tensor>,
               std::optional<Tensor>) {
  fail_argument("key_cache", "a cache on the CPU (gather_kv is not there on CUDA yet)", shape_text(key_cache));
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::cuda::write_kv));
  library.impl("merge_attention", TORCH_BOX(&kvpager::cuda::merge_attention));
  library.impl("copy_blocks", TORCH_BOX(&kvpager::cuda::copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&kvpager::cuda::swap_blocks));
  library.impl("gather_kv", TORCH_BOX(&kvpager::cuda::gather_kv));
}

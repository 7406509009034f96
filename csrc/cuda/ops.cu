// The CUDA entry points of the ops: check (../checks.h), pick the type, launch. No decision beyond the grid's size.
//
// csrc/testing/ compiles this same file with a host compiler and the emulator, under another namespace of ops, so that
// checks, dispatch, launch geometry and kernels are all tested where there is no GPU.
#include "runtime.h"

#include <algorithm>

#include "attention.cuh"
#include "moves.cuh"

#if defined(KVPAGER_EMULATE)
#define KVPAGER_NAMESPACE kvpager_emulated
#define KVPAGER_KEY CPU
#else
#define KVPAGER_NAMESPACE kvpager
#define KVPAGER_KEY CUDA
#endif

namespace kvpager::cuda {
namespace {

constexpr int64_t kMaxGridX = 0x7fffffff, kMaxGridY = 65535;

dim3 grid_of_size(const char* argument, int64_t x, int64_t y) {
  if (x > kMaxGridX) fail_argument(argument, "at most 2147483647 rows on CUDA", std::to_string(x));
  if (y > kMaxGridY) fail_argument(argument, "at most 65535 heads on CUDA", std::to_string(y));
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

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

void attend(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query, const Tensor& key_cache,
            const Tensor& value_cache, const Tensor& block_tables, const std::optional<Tensor>& query_start_loc,
            const Tensor& seq_lens, const std::optional<Tensor>& sinks, const AttentionOptions& options) {
  with_float_type("key_cache", key_cache.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const AttentionParams<T> params = attention_params<T>(out, lse, query, key_cache, value_cache, block_tables,
                                                          query_start_loc, seq_lens, sinks, options);
    if (params.pool.head_dim > kMaxHeadDim)
      fail_argument("query", "a head dim of at most " + std::to_string(kMaxHeadDim) + " on CUDA",
                    std::to_string(params.pool.head_dim));
    if (params.num_tokens == 0) return;
    const LaunchScope scope(key_cache);
    const dim3 grid = grid_of_size("query", params.num_tokens, params.num_heads);
    KVPAGER_LAUNCH(attention_kernel<T>, grid, dim3(kThreads), scope.stream, params, scope.errors);
    scope.check();
  });
}

void paged_attention(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                     Tensor block_tables, Tensor seq_lens, double scale, int64_t max_seq_len, int64_t window,
                     double softcap, std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                     std::optional<Tensor> value_scale, int64_t fixed_split, std::optional<Tensor> schedule,
                     std::optional<Tensor> workspace) {
  refuse_quantised(key_cache, key_scale, value_scale);
  // No sequence is cut, and a row's sums depend on nothing but itself: that is what a fixed split promises.
  if (fixed_split < 0) fail_argument("fixed_split", "0 or more tokens", std::to_string(fixed_split));
  if (schedule) fail_argument("schedule", "none (the CUDA kernels cut no sequence yet)", shape_text(*schedule));
  if (workspace) fail_argument("workspace", "none (the CUDA kernels need no room yet)", shape_text(*workspace));
  attend(out, lse, query, key_cache, value_cache, block_tables, std::nullopt, seq_lens, sinks,
         {scale, 1, max_seq_len, window, softcap});
}

void paged_prefill(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                   Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, double scale, int64_t max_query_len,
                   int64_t max_seq_len, int64_t window, double softcap, std::optional<Tensor> sinks,
                   std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  refuse_quantised(key_cache, key_scale, value_scale);
  attend(out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks,
         {scale, max_query_len, max_seq_len, window, softcap});
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

void take_errors(Tensor word) {
  check_tensor("word", word, ScalarType::Long, word, {1});
  const LaunchScope scope(word);
  KVPAGER_LAUNCH(take_errors_kernel, dim3(1), dim3(32), scope.stream, scope.errors,
                 static_cast<int64_t*>(word.mutable_data_ptr()));
  scope.check();
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("write_kv", TORCH_BOX(&kvpager::cuda::write_kv));
  library.impl("paged_attention", TORCH_BOX(&kvpager::cuda::paged_attention));
  library.impl("paged_prefill", TORCH_BOX(&kvpager::cuda::paged_prefill));
  library.impl("merge_attention", TORCH_BOX(&kvpager::cuda::merge_attention));
  library.impl("copy_blocks", TORCH_BOX(&kvpager::cuda::copy_blocks));
  library.impl("swap_blocks", TORCH_BOX(&kvpager::cuda::swap_blocks));
  library.impl("gather_kv", TORCH_BOX(&kvpager::cuda::gather_kv));
  library.impl("take_errors", TORCH_BOX(&kvpager::cuda::take_errors));
}

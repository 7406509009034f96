// The plain attention of attention.cuh, for all types: a compilation of its own, since it is the slowest to compile.
#include "attention.h"

#include "attention.cuh"

namespace kvpager::cuda {
namespace {

template <class T, class C>
void launch(const AttentionParams<T, C>& params, const Tensor& beside) {
  if (params.pool.head_dim > kMaxHeadDim)
    fail_argument("query", "a head dim of at most " + std::to_string(kMaxHeadDim) + " on CUDA",
                  std::to_string(params.pool.head_dim));
  if (params.num_tokens == 0) return;
  const LaunchScope scope(beside);
  const dim3 grid = grid_of_size("query", params.num_tokens, params.num_heads);
  KVPAGER_LAUNCH((attention_kernel<T, C>), grid, dim3(kThreads), scope.stream, params, scope.errors);
  scope.check();
}

}  // namespace

void attend_plainly(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query, const Tensor& key_cache,
                    const Tensor& value_cache, const Tensor& block_tables, const std::optional<Tensor>& query_start_loc,
                    const Tensor& seq_lens, const std::optional<Tensor>& sinks, const AttentionOptions& options,
                    const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  with_cache_types("query", query, key_cache, [&](auto number, auto code) {
    launch(attention_params<decltype(number), decltype(code)>(out, lse, query, key_cache, value_cache, block_tables,
                                                              query_start_loc, seq_lens, sinks, options, key_scale,
                                                              value_scale),
           key_cache);
  });
}

}  // namespace kvpager::cuda

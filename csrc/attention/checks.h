// From tensors to what the attention kernels are given. The signatures of the attention ops stand here once, for the
// CPU and CUDA: a further option is a further member of AttentionArguments and AttentionOptions.
#pragma once
#include <limits>

#include "../tensors.h"
#include "params.h"
#include "split_plan.h"

namespace kvpager {

struct AttentionArguments {
  Tensor out;
  std::optional<Tensor> lse;
  Tensor query, key_cache, value_cache, block_tables;
  std::optional<Tensor> query_start_loc;  // none: row b is the one query of sequence b
  Tensor seq_lens;
  double scale;
  int64_t max_query_len, max_seq_len, window;
  double softcap;
  std::optional<Tensor> sinks, alibi_slopes, key_scale, value_scale;
};

// How decode attention is split; the values of a plan are the kernels' to check.
struct SplitArguments {
  int64_t fixed_split;
  std::optional<Tensor> split_plan, workspace;

  SplitPlan plan() const {
    if (!split_plan) return {{}, 0, static_cast<int>(fixed_split)};
    return {list_of<int32_t>(*split_plan), static_cast<int>(SplitPlan::parts_of_size(split_plan->size(0))),
            static_cast<int>(fixed_split)};
  }
};

// `paged_attention` and `paged_prefill` as their schemas have them. `attend` checks the values and computes.
template <void (*attend)(const AttentionArguments&, const SplitArguments&)>
void paged_attention(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                     Tensor block_tables, Tensor seq_lens, double scale, int64_t max_seq_len, int64_t window,
                     double softcap, std::optional<Tensor> sinks, std::optional<Tensor> alibi_slopes,
                     std::optional<Tensor> key_scale, std::optional<Tensor> value_scale, int64_t fixed_split,
                     std::optional<Tensor> split_plan, std::optional<Tensor> workspace) {
  attend({out, lse, query, key_cache, value_cache, block_tables, std::nullopt, seq_lens, scale, 1, max_seq_len, window,
          softcap, sinks, alibi_slopes, key_scale, value_scale},
         {fixed_split, split_plan, workspace});
}

template <void (*attend)(const AttentionArguments&)>
void paged_prefill(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                   Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, double scale, int64_t max_query_len,
                   int64_t max_seq_len, int64_t window, double softcap, std::optional<Tensor> sinks,
                   std::optional<Tensor> alibi_slopes, std::optional<Tensor> key_scale,
                   std::optional<Tensor> value_scale) {
  attend({out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, max_query_len,
          max_seq_len, window, softcap, sinks, alibi_slopes, key_scale, value_scale});
}

// `accumulate`: the dtype of the arithmetic, in which A is used.
template <class A>
AttentionOptions<A> attention_options(const AttentionArguments& given, ScalarType accumulate, int64_t num_heads) {
  if (given.sinks) check_tensor("sinks", *given.sinks, accumulate, given.key_cache, {num_heads});
  if (given.alibi_slopes) check_tensor("alibi_slopes", *given.alibi_slopes, accumulate, given.key_cache, {num_heads});
  if (given.window < 0) fail_argument("window", "0 or more positions", std::to_string(given.window));
  constexpr double kLargest = std::numeric_limits<A>::max();
  if (!(given.softcap >= 0 && given.softcap <= kLargest))
    fail_argument("softcap", "0 (none) or a finite positive number", std::to_string(given.softcap));
  if (!(given.scale >= -kLargest && given.scale <= kLargest))
    fail_argument("scale", "a finite number", std::to_string(given.scale));
  return {static_cast<A>(given.scale), static_cast<A>(given.softcap), given.window,
          given.sinks ? list_of<A>(*given.sinks) : List<A>{},
          given.alibi_slopes ? list_of<A>(*given.alibi_slopes) : List<A>{}};
}

template <class T, class C>
AttentionParams<T, C> attention_params(const AttentionArguments& given) {
  using A = accumulate_t<T>;
  const auto& [out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, max_query_len,
               max_seq_len, window, softcap, sinks, alibi_slopes, key_scale, value_scale] = given;
  const PoolShape pool = check_pool(key_cache, value_cache);
  check_scales("key_scale", key_scale, key_cache, pool);
  check_scales("value_scale", value_scale, value_cache, pool);
  const ScalarType dtype = is_quantised<C> ? query.scalar_type() : key_cache.scalar_type();
  check_tensor("query", query, dtype, key_cache, {-1, -1, pool.head_dim});
  check_last_contiguous("query", query);
  const int64_t num_tokens = query.size(0), num_heads = query.size(1);
  check_num_heads("query", num_heads, pool);
  check_tensor("out", out, dtype, key_cache, {num_tokens, num_heads, pool.head_dim});
  check_last_contiguous("out", out);
  check_written("out", out);
  check_tensor("seq_lens", seq_lens, ScalarType::Int, key_cache, {query_start_loc ? -1 : num_tokens});
  const int64_t num_sequences = seq_lens.size(0);
  check_tensor("block_tables", block_tables, ScalarType::Int, key_cache, {num_sequences, -1});
  if (query_start_loc)
    check_tensor("query_start_loc", *query_start_loc, ScalarType::Int, key_cache, {num_sequences + 1});
  if (lse) {
    check_tensor("lse", *lse, accumulate_dtype(dtype), key_cache, {num_tokens, num_heads});
    check_written("lse", *lse);
  }
  return {mutable_rows_of<T>(out),
          lse ? mutable_grid_of<A>(*lse) : Grid<A>{},
          rows_of<T>(query),
          cache_of<C>(key_cache),
          cache_of<C>(value_cache),
          scales_of<const float>(key_scale),
          scales_of<const float>(value_scale),
          grid_of<int32_t>(block_tables),
          query_start_loc ? list_of<int32_t>(*query_start_loc) : List<int32_t>{},
          list_of<int32_t>(seq_lens),
          num_tokens,
          num_sequences,
          num_heads,
          block_tables.size(1),
          max_query_len,
          max_seq_len,
          pool,
          attention_options<A>(given, accumulate_dtype(dtype), num_heads)};
}

// `alignment`: bytes that the workspace's address is a multiple of.
inline void check_split(const SplitArguments& split, const Tensor& query, uintptr_t alignment) {
  if (split.fixed_split < 0 || split.fixed_split > std::numeric_limits<int32_t>::max())
    fail_argument("fixed_split", "0 or more tokens, below 2^31", std::to_string(split.fixed_split));
  if (split.split_plan) {
    check_tensor("split_plan", *split.split_plan, ScalarType::Int, query, {-1});
    if (const int64_t size = split.split_plan->size(0); !SplitPlan::size_is_valid(size))
      fail_argument("split_plan", SplitPlan::kWanted, std::to_string(size) + " entries");
  }
  if (split.workspace) {
    check_tensor("workspace", *split.workspace, ScalarType::Byte, query, {-1});
    check_last_contiguous("workspace", *split.workspace);
    if (reinterpret_cast<uintptr_t>(split.workspace->const_data_ptr()) % alignment != 0)
      fail_argument("workspace", "an address that is a multiple of " + std::to_string(alignment), "another");
  }
}

template <class T>
MergeParams<T> merge_params(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& out_a,
                            const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  using A = accumulate_t<T>;
  const ScalarType dtype = out.scalar_type(), wide = accumulate_dtype(dtype);
  check_tensor("out", out, dtype, out, {-1, -1, -1});
  const int64_t num_tokens = out.size(0), num_heads = out.size(1), head_dim = out.size(2);
  check_tensor("out_a", out_a, dtype, out, {num_tokens, num_heads, head_dim});
  check_tensor("out_b", out_b, dtype, out, {num_tokens, num_heads, head_dim});
  check_tensor("lse_a", lse_a, wide, out, {num_tokens, num_heads});
  check_tensor("lse_b", lse_b, wide, out, {num_tokens, num_heads});
  if (lse) {
    check_tensor("lse", *lse, wide, out, {num_tokens, num_heads});
    check_written("lse", *lse);
  }
  check_last_contiguous("out", out);
  check_written("out", out);
  check_last_contiguous("out_a", out_a);
  check_last_contiguous("out_b", out_b);
  return {mutable_rows_of<T>(out),
          lse ? mutable_grid_of<A>(*lse) : Grid<A>{},
          rows_of<T>(out_a),
          rows_of<T>(out_b),
          grid_of<A>(lse_a),
          grid_of<A>(lse_b),
          num_tokens,
          num_heads,
          head_dim};
}

}  // namespace kvpager

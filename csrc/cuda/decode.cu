// The CUDA entry point of decode attention: which kernel takes a call, its schedule and its workspace.
#include "attention.h"
#include "decode_cut_kernel.cuh"
#include "decode_launch.h"

namespace kvpager::cuda {
namespace {

bool is_aligned(const Tensor& tensor, int64_t dims, int64_t bytes) {
  const int64_t size = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % bytes == 0;
  for (int64_t dim = 0; dim < dims; ++dim) aligned &= tensor.size(dim) < 2 || tensor.stride(dim) * size % bytes == 0;
  return aligned;
}

// Offsets of a cache or its scales, in units of `unit_bytes`, fit into 32 bits: of a cache that is 64 GiB.
bool is_within(const Tensor& tensor, int64_t unit_bytes) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < 3 && dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return last * static_cast<int64_t>(tensor.element_size()) / unit_bytes <= UINT32_MAX;
}

// The rule: tensor cores for bfloat16 and float16 queries and the head dims that are compiled in, if every row of the
// caches begins at a multiple of 16 bytes (of the query: 4), as those of any cache that kvpager makes do. All else
// (float32 and float64, other head dims, odd views, a pool without blocks or of over 64 GiB a layer) is for the plain
// kernel.
bool takes_tensor_cores(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                        const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  if (query.scalar_type() != ScalarType::Half && query.scalar_type() != ScalarType::BFloat16) return false;
  return query.dim() == 3 && key_cache.dim() == 4 && value_cache.dim() == 4 && key_cache.size(0) > 0 &&
         is_decode_head_dim(key_cache.size(3)) && is_aligned(query, 2, 4) && is_aligned(key_cache, 3, 16) &&
         is_aligned(value_cache, 3, 16) && is_within(key_cache, 16) && is_within(value_cache, 16) &&
         (!key_scale || is_within(*key_scale, 4)) && (!value_scale || is_within(*value_scale, 4));
}

// How one call is cut: by the caller's schedule, or by one that is made first.
struct Split {
  int64_t fixed, num_parts, num_slots, splits_per_row;
};

// Checks of the options that every kernel takes alike. The values of a schedule are checked on the device.
void check_options(const Tensor& query, int64_t fixed_split, const std::optional<Tensor>& schedule,
                   const std::optional<Tensor>& workspace) {
  if (fixed_split < 0 || fixed_split > INT32_MAX)
    fail_argument("fixed_split", "0 or more tokens", std::to_string(fixed_split));
  if (schedule) {
    check_tensor("split_plan", *schedule, ScalarType::Int, query, {-1});
    if (const int64_t size = schedule->size(0); size < 6 || size % 2 != 0)
      fail_argument("split_plan", "one that make_split_plan made for these `seq_lens` and `fixed_split`",
                    std::to_string(size) + " entries");
  }
  if (workspace) {
    check_tensor("workspace", *workspace, ScalarType::Byte, query, {-1});
    check_last_contiguous("workspace", *workspace);
    if (!is_aligned(*workspace, 0, 16)) fail_argument("workspace", "an address that is a multiple of 16", "another");
  }
}

template <class P>
Split split_of(const P& params, int64_t fixed_split, int64_t head_tiles, const std::optional<Tensor>& schedule,
               int64_t multiprocessors) {
  Split split{fixed_split, 0, 0, 0};
  const int64_t blocks = multiprocessors * decode_blocks(params.pool.head_dim);
  split.num_parts = schedule ? (schedule->size(0) - 2) / 2 - 1 : std::max<int64_t>(1, blocks / head_tiles);
  if (split.num_parts > 65535)
    fail_argument("split_plan", "at most 65535 parts on CUDA", std::to_string(split.num_parts));
  if (fixed_split > 0) split.splits_per_row = (params.max_seq_len + fixed_split - 1) / fixed_split;
  split.num_slots = fixed_split > 0 ? params.num_sequences * split.splits_per_row : 2 * (split.num_parts - 1);
  return split;
}

// The areas of the caller's workspace, or of one that torch finds; `room` keeps hold of it until all is launched.
template <class P>
Workspace workspace_of(const P& params, const Split& split, int64_t head_tiles, const Tensor& beside,
                       std::optional<Tensor>& room) {
  const int64_t counters = whole_vectors(params.num_sequences * head_tiles);
  const int64_t pairs = whole_vectors(2 * split.num_slots * params.num_heads);
  const int64_t bytes = 4 * (counters + pairs + split.num_slots * params.num_heads * params.pool.head_dim);
  if (!room) room = torch::stable::new_zeros(beside, {bytes}, ScalarType::Byte);
  if (room->size(0) < bytes)
    fail_argument("workspace", "at least " + std::to_string(bytes) + " bytes",
                  std::to_string(room->size(0)) + " bytes");
  float* const floats = static_cast<float*>(room->mutable_data_ptr());
  return {reinterpret_cast<unsigned*>(floats), floats + counters, floats + counters + pairs, split.splits_per_row};
}

template <class T, class C>
void attend_on_tensor_cores(const AttentionParams<T, C>& params, int64_t fixed_split,
                            const std::optional<Tensor>& schedule, std::optional<Tensor> workspace,
                            const Tensor& beside) {
  if (params.num_tokens == 0) return;
  const LaunchScope scope(beside);
  const int64_t K = params.pool.num_kv_heads, group = params.num_heads / K;
  const int64_t head_tiles = K * ((group + kTileHeads - 1) / kTileHeads);
  const Split split = split_of(params, fixed_split, head_tiles, schedule, scope.multiprocessors());
  const Workspace areas = workspace_of(params, split, head_tiles, beside, workspace);
  const Tensor cuts =
      schedule ? *schedule : torch::stable::new_empty(beside, {2 * split.num_parts + 4}, ScalarType::Int);
  if (!schedule) {
    const CutParams cut{params.seq_lens,
                        params.num_sequences,
                        params.max_seq_len,
                        params.window,
                        static_cast<int32_t*>(cuts.mutable_data_ptr()),
                        static_cast<int>(split.num_parts),
                        static_cast<int>(fixed_split > 0 ? fixed_split : params.pool.block_size),
                        static_cast<int>(fixed_split)};
    KVPAGER_LAUNCH(cut_kernel, dim3(1), dim3(kCutThreads), scope.stream, cut);
    scope.check();
  }
  launch_decode(params,
                Schedule{list_of<int32_t>(cuts), static_cast<int>(split.num_parts), static_cast<int>(fixed_split)},
                areas, head_tiles, scope.stream, scope.errors);
  scope.check();
}

void paged_attention(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                     Tensor block_tables, Tensor seq_lens, double scale, int64_t max_seq_len, int64_t window,
                     double softcap, std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                     std::optional<Tensor> value_scale, int64_t fixed_split, std::optional<Tensor> schedule,
                     std::optional<Tensor> workspace) {
  check_options(query, fixed_split, schedule, workspace);
  const AttentionOptions options{scale, 1, max_seq_len, window, softcap};
  if (!takes_tensor_cores(query, key_cache, value_cache, key_scale,
                          value_scale))  // cuts no sequence, so that no split or schedule matters
    return attend_plainly(out, lse, query, key_cache, value_cache, block_tables, std::nullopt, seq_lens, sinks, options,
                          key_scale, value_scale);
  with_cache_types("query", query, key_cache, [&](auto number, auto code) {
    using T = decltype(number);
    using C = decltype(code);
    if constexpr (sizeof(T) == 2)
      attend_on_tensor_cores(attention_params<T, C>(out, lse, query, key_cache, value_cache, block_tables, std::nullopt,
                                                    seq_lens, sinks, options, key_scale, value_scale),
                             fixed_split, schedule, workspace, query);
  });
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_attention", TORCH_BOX(&kvpager::cuda::paged_attention));
}

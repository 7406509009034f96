// The CUDA op `paged_attention`, decode attention: which kernel takes a call, its split plan and its workspace.
#include "../../attention/checks.h"
#include "../attention/plain.h"
#include "../device/scope.h"
#include "cut_kernel.cuh"
#include "launch.h"

namespace kvpager::cuda::decode {
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
// kernel. The arguments are checked, and the query is of 16 bits.
bool takes_tensor_cores(const AttentionArguments& arguments) {
  const auto& key_cache = arguments.key_cache;
  const auto scales_are_within = [](const std::optional<Tensor>& scale) { return !scale || is_within(*scale, 4); };
  return key_cache.size(0) > 0 && is_decode_head_dim(key_cache.size(3)) && is_aligned(arguments.query, 2, 4) &&
         is_aligned(key_cache, 3, 16) && is_aligned(arguments.value_cache, 3, 16) && is_within(key_cache, 16) &&
         is_within(arguments.value_cache, 16) && scales_are_within(arguments.key_scale) &&
         scales_are_within(arguments.value_scale);
}

// How one call is cut: by the caller's plan, or by one that is made first. A room of the workspace holds one piece.
struct Split {
  int64_t fixed, num_parts, num_rooms, splits_per_row;
};

template <class P>
Split split_of(const P& params, int64_t fixed_split, int64_t head_tiles, const SplitPlan& plan) {
  Split split{fixed_split, 0, 0, 0};
  const int64_t blocks = num_multiprocessors() * decode_blocks(params.pool.head_dim);
  split.num_parts = plan.entries.data ? plan.num_parts : std::max<int64_t>(1, blocks / head_tiles);
  if (split.num_parts > 65535)
    fail_argument("split_plan", "at most 65535 parts on CUDA", std::to_string(split.num_parts));
  if (fixed_split > 0) split.splits_per_row = (params.max_seq_len + fixed_split - 1) / fixed_split;
  split.num_rooms = fixed_split > 0 ? params.num_sequences * split.splits_per_row : 2 * (split.num_parts - 1);
  return split;
}

// The areas of the caller's workspace, or of one that torch finds; `memory` keeps it alive until
// all is launched.
template <class P>
Workspace workspace_of(const P& params, const Split& split, int64_t head_tiles, const Tensor& beside,
                       std::optional<Tensor>& memory) {
  const int64_t counters = whole_vectors(params.num_sequences * head_tiles);
  const int64_t pairs = whole_vectors(2 * split.num_rooms * params.num_heads);
  const int64_t bytes = 4 * (counters + pairs + split.num_rooms * params.num_heads * params.pool.head_dim);
  if (!memory) memory = torch::stable::new_zeros(beside, {bytes}, ScalarType::Byte);
  if (memory->size(0) < bytes)
    fail_argument("workspace", "at least " + std::to_string(bytes) + " bytes",
                  std::to_string(memory->size(0)) + " bytes");
  float* const floats = static_cast<float*>(memory->mutable_data_ptr());
  return {reinterpret_cast<unsigned*>(floats), floats + counters, floats + counters + pairs, split.splits_per_row};
}

template <class T, class C>
void attend_on_tensor_cores(const AttentionParams<T, C>& params, const SplitArguments& arguments, const Tensor& beside,
                            const Launch& launch) {
  if (params.num_tokens == 0) return;
  const int64_t K = params.pool.num_kv_heads, group = params.num_heads / K;
  const int64_t head_tiles = K * divided_up(group, kTileHeads), fixed_split = arguments.fixed_split;
  SplitPlan plan = arguments.plan();
  const Split split = split_of(params, fixed_split, head_tiles, plan);
  std::optional<Tensor> memory = arguments.workspace, cuts;
  const Workspace areas = workspace_of(params, split, head_tiles, beside, memory);
  if (!plan.entries.data) {
    cuts = torch::stable::new_empty(beside, {2 * split.num_parts + 4}, ScalarType::Int);
    plan = {list_of<int32_t>(*cuts), static_cast<int>(split.num_parts), static_cast<int>(fixed_split)};
    const CutParams cut{params.seq_lens,
                        params.num_sequences,
                        params.max_seq_len,
                        params.options.window,
                        static_cast<int32_t*>(cuts->mutable_data_ptr()),
                        static_cast<int>(split.num_parts),
                        static_cast<int>(fixed_split > 0 ? fixed_split : params.pool.block_size),
                        static_cast<int>(fixed_split)};
    KVPAGER_LAUNCH(cut_kernel, dim3(1), dim3(kCutThreads), launch.stream, cut);
    check_launch();
  }
  launch_decode(params, plan, areas, head_tiles, launch);
}

void attend(const AttentionArguments& arguments, const SplitArguments& split) {
  const Tensor& query = arguments.query;
  check_split(split, query, 16);
  with_cache_types("query", query, arguments.key_cache, [&](auto number, auto code) {
    const auto params = attention_params<decltype(number), decltype(code)>(arguments);
    const LaunchScope scope(query);
    if constexpr (sizeof(number) == 2)
      if (takes_tensor_cores(arguments)) return attend_on_tensor_cores(params, split, query, scope);
    plain::attend(params, scope);  // cuts no sequence, so that no split or plan matters
  });
}

}  // namespace
}  // namespace kvpager::cuda::decode

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_attention", TORCH_BOX((&kvpager::paged_attention<&kvpager::cuda::decode::attend>)));
}

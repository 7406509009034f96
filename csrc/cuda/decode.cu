// The CUDA entry point of decode attention: which kernel takes a call.
#include "attention.h"

namespace kvpager::cuda {
namespace {

void paged_attention(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                     Tensor block_tables, Tensor seq_lens, double scale, int64_t max_seq_len, int64_t window,
                     double softcap, std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                     std::optional<Tensor> value_scale, int64_t fixed_split, std::optional<Tensor> schedule,
                     std::optional<Tensor> workspace) {
  // No sequence is cut, and a row's sums depend on nothing but itself: that is what a fixed split promises.
  if (fixed_split < 0) fail_argument("fixed_split", "0 or more tokens", std::to_string(fixed_split));
  if (schedule) fail_argument("schedule", "none (the CUDA kernels cut no sequence yet)", shape_text(*schedule));
  if (workspace) fail_argument("workspace", "none (the CUDA kernels need no room yet)", shape_text(*workspace));
  attend_plainly(out, lse, query, key_cache, value_cache, block_tables, std::nullopt, seq_lens, sinks,
                 {scale, 1, max_seq_len, window, softcap}, key_scale, value_scale);
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_attention", TORCH_BOX(&kvpager::cuda::paged_attention));
}

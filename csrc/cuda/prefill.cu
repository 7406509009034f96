// The CUDA entry point of prefill attention: which kernel takes a call.
#include "attention.h"

namespace kvpager::cuda {
namespace {

void paged_prefill(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                   Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, double scale, int64_t max_query_len,
                   int64_t max_seq_len, int64_t window, double softcap, std::optional<Tensor> sinks,
                   std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  attend_plainly(out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks,
                 {scale, max_query_len, max_seq_len, window, softcap}, key_scale, value_scale);
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_prefill", TORCH_BOX(&kvpager::cuda::paged_prefill));
}

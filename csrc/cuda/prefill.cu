// The CUDA entry point of prefill attention: which kernel takes a call.
//
// prefill.cuh (tensor cores) where `takes_tensor_cores` says so: 16-bit queries, a head dim of at most 256 that 16-byte
// accesses divide, aligned memory. Where a sequence has at most 8 query tokens, as with drafts to verify, its variant for
// few rows. Else attention.cuh, which takes everything.
#include "attention.h"
#include "prefill_launch.h"
#include "units.h"

namespace kvpager::cuda {
namespace {

constexpr int64_t kFewTokens = 8, kLargestHeadDim = 256;

template <class T, class C>
bool takes_tensor_cores(const AttentionParams<T, C>& params) {
  const int64_t row_bytes = params.pool.head_dim * static_cast<int64_t>(sizeof(C));
  const Alignment read = Alignment()
                             .rows(params.query, sizeof(T))
                             .cache(params.key_cache, sizeof(C))
                             .cache(params.value_cache, sizeof(C))
                             .offset(row_bytes);
  return params.pool.head_dim <= kLargestHeadDim && read.fits(16) && Alignment().rows(params.out, sizeof(T)).fits(4);
}

// False if the tensor cores do not take this call.
template <class T, class C>
bool attend_on_tensor_cores(const AttentionParams<T, C>& params, const Tensor& beside) {
  if constexpr (sizeof(T) == 2) {
    if (!takes_tensor_cores(params)) return false;
    if (params.num_tokens == 0) return true;
    launch_prefill(params, params.max_query_len <= kFewTokens, beside, LaunchScope(beside));
    return true;
  }
  return false;
}

void paged_prefill(Tensor out, std::optional<Tensor> lse, Tensor query, Tensor key_cache, Tensor value_cache,
                   Tensor block_tables, Tensor query_start_loc, Tensor seq_lens, double scale, int64_t max_query_len,
                   int64_t max_seq_len, int64_t window, double softcap, std::optional<Tensor> sinks,
                   std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  const AttentionOptions options{scale, max_query_len, max_seq_len, window, softcap};
  bool done = false;
  with_cache_types("query", query, key_cache, [&](auto number, auto code) {
    done = attend_on_tensor_cores(attention_params<decltype(number), decltype(code)>(
                                      out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens,
                                      sinks, options, key_scale, value_scale),
                                  key_cache);
  });
  if (!done)
    attend_plainly(out, lse, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks, options,
                   key_scale, value_scale);
}

}  // namespace
}  // namespace kvpager::cuda

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_prefill", TORCH_BOX(&kvpager::cuda::paged_prefill));
}

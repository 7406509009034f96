// The CUDA op `paged_prefill`: which kernel takes a call.
//
// kernel.cuh (tensor cores) where `takes_tensor_cores` says so: 16-bit queries, a head dim of at most 256 that 16-byte
// accesses divide, aligned memory. Where a sequence has at most 8 query tokens, as with drafts to verify, its variant
// for few rows. Else ../attention/plain.cuh, which takes everything.
#include "../../attention/checks.h"
#include "../attention/plain.h"
#include "../device/scope.h"
#include "../device/units.h"
#include "launch.h"

namespace kvpager::cuda::prefill {
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

template <class T, class C>
void attend_on_tensor_cores(const AttentionParams<T, C>& params, const Tensor& beside, const Launch& launch) {
  if (params.num_tokens == 0) return;
  const PrefillPlan plan(params, params.max_query_len <= kFewTokens);
  std::optional<Tensor> room;  // kept until the kernel is launched: torch reuses it in stream order
  if (plan.workspace_floats > 0) room = torch::stable::new_zeros(beside, {plan.workspace_floats}, ScalarType::Float);
  launch_prefill(params, plan, room ? static_cast<float*>(room->mutable_data_ptr()) : nullptr, launch);
}

void attend(const AttentionArguments& arguments) {
  with_cache_types("query", arguments.query, arguments.key_cache, [&](auto number, auto code) {
    const auto params = attention_params<decltype(number), decltype(code)>(arguments);
    const LaunchScope scope(arguments.key_cache);
    if constexpr (sizeof(number) == 2)
      if (takes_tensor_cores(params)) return attend_on_tensor_cores(params, arguments.key_cache, scope);
    plain::attend(params, scope);
  });
}

}  // namespace
}  // namespace kvpager::cuda::prefill

STABLE_TORCH_LIBRARY_IMPL(KVPAGER_NAMESPACE, KVPAGER_KEY, library) {
  library.impl("paged_prefill", TORCH_BOX((&kvpager::paged_prefill<&kvpager::cuda::prefill::attend>)));
}

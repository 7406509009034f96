// Merging two partial attention results on the CPU: spreads tokens over threads; float64 is merged here, plainly.
#include "merge.h"

#include <algorithm>

#include "../checks.h"
#include "kernels.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 15;  // of an output: fewer are not worth waking a thread for

void merge_plainly(const MergeParams<double>& p, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < p.num_heads; ++head) {
      const auto weights = merge_weights<double>(p.lse_a.at(token, head), p.lse_b.at(token, head));
      // In bounds: all rows are [num_tokens, num_heads, head_dim], checked by merge_params.
      const double *a = p.out_a.at(token, head), *b = p.out_b.at(token, head);
      double* out = p.out.at(token, head);
      for (int64_t d = 0; d < p.head_dim; ++d)  // an empty part is not read: it may hold NaN
        out[d] = (weights.a != 0 ? weights.a * a[d] : 0.0) + (weights.b != 0 ? weights.b * b[d] : 0.0);
      if (p.lse.data) p.lse.at(token, head) = weights.lse;
    }
}

}  // namespace

template <class T>
void merge_attention(const MergeParams<T>& p) {
  const int64_t grain = std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, p.num_heads * p.head_dim));
  if constexpr (std::is_same_v<T, double>) {
    torch::stable::parallel_for(0, p.num_tokens, grain,
                                [&](int64_t begin, int64_t end) { merge_plainly(p, begin, end); });
  } else {
    const auto merge = KVPAGER_ACTIVE(merge_tokens<T>);
    torch::stable::parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) { merge(p, begin, end); });
  }
}

template void merge_attention(const MergeParams<float>&);
template void merge_attention(const MergeParams<double>&);
template void merge_attention(const MergeParams<float16>&);
template void merge_attention(const MergeParams<bfloat16>&);

}  // namespace kvpager::cpu

// The CPU op `merge_attention`: spreads tokens over threads. float64 is merged here, plainly.
#include "../../attention/checks.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::attention {

// Merges tokens begin ... end - 1, all heads.
KVPAGER_DECLARE_PER_ISA(template <class T> void merge_tokens(const MergeParams<T>& params, int64_t begin, int64_t end))

namespace {

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

void merge_attention(Tensor out, std::optional<Tensor> lse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  with_number_type("out", out.scalar_type(), [&](auto number) {
    using T = decltype(number);
    const MergeParams<T> p = merge_params<T>(out, lse, out_a, lse_a, out_b, lse_b);
    torch::stable::parallel_for(0, p.num_tokens, grain_of(p.num_heads * p.head_dim / 2),
                                [&](int64_t begin, int64_t end) {
                                  if constexpr (std::is_same_v<T, double>) {
                                    merge_plainly(p, begin, end);
                                  } else {
                                    KVPAGER_ACTIVE(merge_tokens<T>)(p, begin, end);
                                  }
                                });
  });
}

}  // namespace
}  // namespace kvpager::cpu::attention

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("merge_attention", TORCH_BOX(&kvpager::cpu::attention::merge_attention));
}

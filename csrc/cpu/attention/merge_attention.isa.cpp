// Merging two partial results by log-sum-exp: the weights of kWidth heads at once, then the rows of those heads.
//
// Bound by memory: two rows read and one written for each head. A result of weight 0 is not read: it may hold NaN.
#include "../../attention/params.h"
#include "../vec/transpose.h"

namespace kvpager::cpu::attention::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/
namespace {

// weight_a * a + weight_b * b, D elements; the row of an empty result is not read.
template <class T>
void merge_row(const T* a, float weight_a, const T* b, float weight_b, int64_t D, T* out) {
  const auto weighed = [](const T* row, float weight, int64_t d, int64_t count) {
    if (!(weight != 0)) return zero();
    return mul(splat(weight), count < kWidth ? load_partial(row + d, count) : load(row + d));
  };
  for (int64_t d = 0; d < D; d += kWidth) {
    const int64_t count = D - d < kWidth ? D - d : kWidth;
    const Vec sum = add(weighed(a, weight_a, d, count), weighed(b, weight_b, d, count));
    count < kWidth ? store_narrow_partial(out + d, sum, count) : store_narrow(out + d, sum);
  }
}

}  // namespace

template <class T>
void merge_tokens(const MergeParams<T>& p, int64_t begin, int64_t end) {
  float lse_a[kWidth] = {}, lse_b[kWidth] = {}, weight_a[kWidth], weight_b[kWidth], sum[kWidth];
  for (int64_t token = begin; token < end; ++token)
    for (int64_t first = 0; first < p.num_heads; first += kWidth) {
      const int64_t count = p.num_heads - first < kWidth ? p.num_heads - first : kWidth;
      // In bounds: token < num_tokens and first + count <= num_heads; all tensors are [num_tokens, num_heads, ...].
      for (int64_t i = 0; i < count; ++i) {
        lse_a[i] = counted_lse(p.lse_a.at(token, first + i));
        lse_b[i] = counted_lse(p.lse_b.at(token, first + i));
      }
      const Vec top = maximum(load(lse_a), load(lse_b));
      const Vec base = clamp_low(top, -3.0e38f);  // both empty: exp(-inf - base) = 0, not exp(-inf - -inf)
      const Vec a = exp(sub(load(lse_a), base)), b = exp(sub(load(lse_b), base)), total = add(a, b);
      const Vec divisor = select_below(total, 0.5f, splat(1.0f), total);  // 0, or 1 to 2
      store(weight_a, div(a, divisor));
      store(weight_b, div(b, divisor));
      store(sum, total);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t head = first + i;
        merge_row(p.out_a.at(token, head), weight_a[i], p.out_b.at(token, head), weight_b[i], p.head_dim,
                  p.out.at(token, head));
        if (p.lse.data) {
          const float larger = lse_a[i] > lse_b[i] ? lse_a[i] : lse_b[i];
          p.lse.at(token, head) = sum[i] == 0 ? -INFINITY : larger + __builtin_logf(sum[i]);
        }
      }
    }
}

template void merge_tokens(const MergeParams<float>&, int64_t, int64_t);
template void merge_tokens(const MergeParams<float16>&, int64_t, int64_t);
template void merge_tokens(const MergeParams<bfloat16>&, int64_t, int64_t);

}  // namespace kvpager::cpu::attention::KVPAGER_ISA

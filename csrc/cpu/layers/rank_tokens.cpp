// The CPU op `rank_tokens`: checks, spreads rows over threads. float64 is computed here, plainly.
#include "../../layers/checks.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::layers {

// Adds how many of `count` scores are above `own` to `rank`, and returns the log-sum-exp of all.
KVPAGER_DECLARE_PER_ISA(template <class T> float rank_row(const T* scores, int64_t count, float own, int64_t& rank))

namespace {

double rank_plainly(const double* scores, int64_t count, double own, int64_t& rank) {
  double top = -INFINITY, total = 0;
  for (int64_t at = 0; at < count; ++at) {
    top = std::max(top, scores[at]);
    rank += scores[at] > own;
  }
  if (std::isinf(top)) top = 0;  // inf - inf would be NaN
  for (int64_t at = 0; at < count; ++at) total += std::exp(scores[at] - top);
  return top + std::log(total);
}

void rank_tokens(Tensor lse, Tensor ranks, Tensor scores, Tensor token_ids) {
  with_number_type("scores", scores.scalar_type(), [&](auto number) {
    using T = decltype(number);
    using A = accumulate_t<T>;
    check_matrix("scores", scores, scores, -1, -1);
    const int64_t num_rows = scores.size(0), width = scores.size(1), stride = scores.stride(0);
    check_tensor("lse", lse, accumulate_dtype(scores.scalar_type()), scores, {num_rows});
    check_tensor("ranks", ranks, ScalarType::Long, scores, {num_rows});
    check_tensor("token_ids", token_ids, ScalarType::Long, scores, {num_rows});
    check_written("lse", lse);
    check_written("ranks", ranks);
    const auto tokens = list_of<int64_t>(token_ids);
    for (int64_t row = 0; row < num_rows; ++row)
      if (tokens[row] < 0 || tokens[row] >= width)
        fail_argument("token_ids", "tokens below " + std::to_string(width),
                      std::to_string(tokens[row]) + " at row " + std::to_string(row));
    // In bounds: row < num_rows, and a row has `width` scores, its token's among them.
    const auto* first = static_cast<const T*>(scores.const_data_ptr());
    auto* sums = static_cast<A*>(lse.mutable_data_ptr());
    auto* places = static_cast<int64_t*>(ranks.mutable_data_ptr());
    torch::stable::parallel_for(0, num_rows, grain_of(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* of_row = first + row * stride;
        const A own = widen(of_row[tokens[row]]);
        int64_t rank = 1;
        if constexpr (std::is_same_v<T, double>) {
          sums[row * lse.stride(0)] = rank_plainly(of_row, width, own, rank);
        } else {
          sums[row * lse.stride(0)] = KVPAGER_ACTIVE(rank_row<T>)(of_row, width, own, rank);
        }
        places[row * ranks.stride(0)] = rank;
      }
    });
  });
}

}  // namespace
}  // namespace kvpager::cpu::layers

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("rank_tokens", TORCH_BOX(&kvpager::cpu::layers::rank_tokens));
}

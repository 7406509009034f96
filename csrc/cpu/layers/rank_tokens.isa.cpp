// The rank of a token among a row's scores and the row's log-sum-exp, in two passes: one counts what is above the
// token and finds the largest score, one sums e^(score - largest). Nothing is kept between the passes, so a row of any
// width takes no memory.
#include "../vec/rows.h"

namespace kvpager::cpu::layers::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

// Scores that one vector of floats counts or sums before it goes to a wider total: a vocabulary is too long for floats.
constexpr int64_t kChunk = 64 * kWidth;

template <class T>
float rank_row(const T* scores, int64_t count, float own, int64_t& rank) {
  const int64_t whole = count / kWidth * kWidth;  // what whole vectors hold; the rest is taken one by one
  Vec tops = splat(-INFINITY);
  for (int64_t begin = 0; begin < whole; begin += kChunk) {
    Vec above = zero();
    const int64_t end = least(whole, begin + kChunk);
    for (int64_t at = begin; at < end; at += kWidth) {
      const Vec numbers = load(scores + at);
      tops = maximum(tops, numbers);
      above = add(above, select_below(sub(splat(own), numbers), 0.0f, splat(1.0f), zero()));
    }
    rank += static_cast<int64_t>(reduce_add(above));
  }
  float top = reduce_max(tops);
  for (int64_t at = whole; at < count; ++at) {
    const float score = widen(scores[at]);
    top = score > top ? score : top;
    rank += score > own;
  }
  if (top == INFINITY) {  // NaN only if there is one beside it: inf - inf below would be NaN always
    float sum = 0;
    for (int64_t at = 0; at < count; ++at) {
      const float score = widen(scores[at]);
      sum += score == score ? 0.0f : score;
    }
    return sum == sum ? INFINITY : sum;
  }
  const Vec base = splat(top == -INFINITY ? 0.0f : top);
  double total = 0;
  for (int64_t begin = 0; begin < whole; begin += kChunk) {
    Vec sum = zero();
    const int64_t end = least(whole, begin + kChunk);
    for (int64_t at = begin; at < end; at += kWidth) sum = add(sum, exp(sub(load(scores + at), base)));
    total += reduce_add(sum);
  }
  for (int64_t at = whole; at < count; ++at) total += first_of(exp(sub(splat(widen(scores[at])), base)));
  return static_cast<float>(first_of(base) + __builtin_log(total));
}

template float rank_row(const float*, int64_t, float, int64_t&);
template float rank_row(const float16*, int64_t, float, int64_t&);
template float rank_row(const bfloat16*, int64_t, float, int64_t&);

}  // namespace kvpager::cpu::layers::KVPAGER_ISA

// What the attention kernels are given, and the one rule for how a score is made: AttentionOptions.
#pragma once
#include "../views.h"

namespace kvpager {

// Which score: that of query head `head`, whose token stands at `position`, and of the key at `key_position`.
struct ScorePlace {
  int64_t head, position, key_position;
};

// How the product of a query and a key becomes a logit, and which positions a query sees. A: type of the arithmetic.
// The plain kernels call `logit`. The others do the same on vectors and fragments, each in one place: `soften` and
// `weigh` of the CPU kernels (cpu/decode, cpu/prefill), `finish_scores` and `add_alibi` of the CUDA kernels
// (cuda/decode/piece.cuh, cuda/prefill/lane.cuh).
template <class A>
struct AttentionOptions {
  A scale;
  A softcap;             // logits are softcap * tanh(logit / softcap); 0 = none
  int64_t window;        // a query sees its own position and window - 1 before it; 0 = all
  List<A> sinks;         // [H]: logits without a value; data is null if there are none
  List<A> alibi_slopes;  // [H]: what a logit grows by from one key to the next; data is null if there are none

  // First position that a query at `position` sees.
  KVPAGER_HD int64_t first_visible(int64_t position) const {
    return window > 0 && position + 1 > window ? position + 1 - window : 0;
  }

  // -inf if the head has no sink.
  KVPAGER_HD A sink(int64_t head) const {
    return sinks.data != nullptr && sinks[head] > -INFINITY ? sinks[head] : -INFINITY;
  }

  // `product`: of a key and a query that was multiplied by `scale`. The query sees the key.
  KVPAGER_HD A logit(A product, const ScorePlace& place) const {
    using std::tanh;
    const A score = softcap > 0 ? softcap * tanh(product / softcap) : product;
    return alibi_slopes.data == nullptr ? score
                                        : score + alibi_slopes[place.head] * A(place.key_position - place.position);
  }
};

// Kernels that exponentiate in base 2 count logits in units of log 2.
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// T: type of query and out. C: type of the caches, T itself or codes.
template <class T, class C = T>
struct AttentionParams {
  Rows<T> out;                // [num_tokens, H, D]
  Grid<accumulate_t<T>> lse;  // [num_tokens, H]; data is null if not wanted
  Rows<const T> query;        // [num_tokens, H, D]
  Cache<const C> key_cache, value_cache;
  Scales<const float> key_scale, value_scale;
  Grid<const int32_t> block_tables;  // [num_sequences, max_blocks]
  List<int32_t> query_start_loc;     // [num_sequences + 1]; data is null if row b is the one query of sequence b
  List<int32_t> seq_lens;            // [num_sequences]
  int64_t num_tokens, num_sequences, num_heads, max_blocks;
  int64_t max_query_len, max_seq_len;
  PoolShape pool;
  AttentionOptions<accumulate_t<T>> options;

  // Whether a sequence may be that long: its table is wide enough, and the caller's bound holds.
  KVPAGER_HD bool length_is_valid(int64_t length) const {
    return length >= 0 && length <= max_blocks * pool.block_size && length <= max_seq_len;
  }
};

// Two partial results over disjoint positions, a and b, to be merged.
template <class T>
struct MergeParams {
  Rows<T> out;                // [num_tokens, H, D]; may be out_a or out_b
  Grid<accumulate_t<T>> lse;  // [num_tokens, H]; data is null if not wanted; may be lse_a or lse_b
  Rows<const T> out_a, out_b;
  Grid<const accumulate_t<T>> lse_a, lse_b;
  int64_t num_tokens, num_heads, head_dim;
};

// The log-sum-exp that a partial result counts with. Over no positions it is -inf; FlashAttention-2 reports it as +inf.
template <class A>
KVPAGER_HD A counted_lse(A lse) {
  return lse == INFINITY ? -INFINITY : lse;
}

// What both results weigh in their merge by log-sum-exp, and the lse of the merge. An empty result weighs 0.
template <class A>
struct MergeWeights {
  A a, b, lse;
};

template <class A>
KVPAGER_HD MergeWeights<A> merge_weights(A lse_a, A lse_b) {
  lse_a = counted_lse(lse_a), lse_b = counted_lse(lse_b);
  const A top = lse_a > lse_b ? lse_a : lse_b;
  if (top == -INFINITY) return {A(0), A(0), top};  // both empty: -inf - -inf would be NaN
  using std::exp;
  using std::log;
  const A a = exp(lse_a - top), b = exp(lse_b - top), sum = a + b;
  return {a / sum, b / sum, top + log(sum)};
}

}  // namespace kvpager

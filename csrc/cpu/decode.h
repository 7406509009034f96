// Decode attention, between the driver (decode.cpp: checks, cuts, merges) and the kernels (decode.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// What the softmax over some positions leaves for each of H query heads: the largest logit, the sum of
// exp(logit - top), and the values weighted by exp(logit - top). Lies in `partial_floats` floats.
struct Partial {
  float *tops, *totals, *accs;  // [H], [H], [H, D]
};

inline int64_t partial_floats(int64_t num_heads, int64_t head_dim) { return num_heads * (head_dim + 2); }

inline Partial partial_at(float* data, int64_t num_heads) { return {data, data + num_heads, data + 2 * num_heads}; }

constexpr int64_t kMaxChunk = 128;  // positions that attend_span takes at once at most; a multiple of every kPair

// Working memory of attend_span, in floats: for each head a query and sums, padded to the widest Pair, the weights of a
// chunk, and four numbers.
inline int64_t scratch_floats(int64_t num_heads, int64_t head_dim) {
  constexpr int64_t kWidestPair = 32;
  return num_heads * (2 * ((head_dim + kWidestPair - 1) / kWidestPair * kWidestPair) + kMaxChunk + 4);
}

// Positions begin ... end - 1 of one sequence, all heads. Not empty; within the sequence's checked length.
struct Span {
  int64_t row, begin, end;
};

// Attends the query of span.row to the span, into `result` (without sinks). `scratch` has scratch_floats floats, at an
// address that is a multiple of 64.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void attend_span(const AttentionParams<T, C>& params,
                                                                     const Span& span, float* scratch,
                                                                     const Partial& result))

}  // namespace kvpager::cpu

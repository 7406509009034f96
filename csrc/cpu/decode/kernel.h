// Decode attention, between the op (paged_attention.cpp checks, cuts and merges) and the kernel (kernel.isa.cpp).
#pragma once
#include "../../attention/params.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::decode {

// A partial result: what the softmax over some positions leaves for each of H query heads. That is the largest logit,
// the sum of exp(logit - top), and the values weighted by exp(logit - top). It lies in `partial_floats` floats.
struct Partial {
  float *tops, *totals, *accs;  // [H], [H], [H, D]
};

inline int64_t partial_floats(int64_t num_heads, int64_t head_dim) { return num_heads * (head_dim + 2); }

inline Partial partial_at(float* data, int64_t num_heads) { return {data, data + num_heads, data + 2 * num_heads}; }

constexpr int64_t kMaxChunk = 128;  // positions that attend_piece takes at once at most; a multiple of every kPair

// Working memory of attend_piece, in floats: for each head a query and sums, padded to the widest Pair, the weights of
// a chunk, and four numbers.
inline int64_t scratch_floats(int64_t num_heads, int64_t head_dim) {
  constexpr int64_t kWidestPair = 32;
  return num_heads * (2 * ((head_dim + kWidestPair - 1) / kWidestPair * kWidestPair) + kMaxChunk + 4);
}

// Positions begin ... end - 1 of one sequence, all heads. Not empty; within the sequence's checked length.
struct Piece {
  int64_t row, begin, end;
};

// Attends the query of piece.row to the piece, into `result` (without sinks). `scratch` has scratch_floats floats, at
// an address that is a multiple of 64.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void attend_piece(const AttentionParams<T, C>& params,
                                                                      const Piece& piece, float* scratch,
                                                                      const Partial& result))

}  // namespace kvpager::cpu::decode

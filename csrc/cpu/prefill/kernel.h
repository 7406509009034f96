// Prefill attention, between the op (paged_prefill.cpp checks, cuts the queries into tiles and spreads them over
// threads) and the kernel (kernel.isa.cpp attends one tile to all positions that it sees).
#pragma once
#include "../../attention/params.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::prefill {

// Consecutive query tokens of one sequence, and consecutive members of each group of query heads; the token at
// first_token stands at first_position.
struct Tile {
  int64_t sequence, first_token, num_tokens, first_position, first_member, num_members;
};

constexpr int64_t kChunk = 128;       // positions whose K and V are packed at once
constexpr int64_t kMaxRowBlock = 12;  // rows that the kernel multiplies at once at most

// Working memory of attend_tile, in floats: queries and sums of max_rows rows (a token times a query head of the
// group), one chunk of K and V, the scores and weights of a block of rows; D padded to the widest vectors.
inline int64_t scratch_floats(int64_t max_rows, int64_t head_dim) {
  const int64_t padded = (head_dim + 31) / 32 * 32;
  return 2 * (max_rows + kChunk) * padded + 2 * kMaxRowBlock * (kChunk + 16) + 3 * (max_rows + 16);
}

// Attends the queries of a tile, those of one kv head, and writes out and lse. `scratch` has scratch_floats
// floats for at least the tile's rows, at an address that is a multiple of 64.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void attend_tile(const AttentionParams<T, C>& params,
                                                                     const Tile& tile, int64_t kv_head, float* scratch))

}  // namespace kvpager::cpu::prefill

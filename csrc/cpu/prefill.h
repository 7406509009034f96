// Prefill attention, between the driver (prefill.cpp: checks, cuts, spreads over threads) and the kernel
// (prefill.isa.cpp: one tile of queries over all positions that it sees).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Consecutive query tokens of one sequence, and consecutive members of each group of query heads; the token at
// first_token stands at first_position.
struct PrefillTile {
  int64_t sequence, first_token, num_tokens, first_position, first_member, num_members;
};

constexpr int64_t kPrefillChunk = 128;  // positions whose K and V are packed at once
constexpr int64_t kPrefillRowBlock = 12;

// Working memory of attend_tile, in floats: queries and sums of max_rows rows (a token times a query head of the
// group), one chunk of K and V, the scores and weights of a block of rows; D padded to the widest vectors.
inline int64_t prefill_scratch_floats(int64_t max_rows, int64_t head_dim) {
  const int64_t padded = (head_dim + 31) / 32 * 32;
  return 2 * (max_rows + kPrefillChunk) * padded + 2 * kPrefillRowBlock * (kPrefillChunk + 16) + 3 * (max_rows + 16);
}

// Attends the queries of a tile, those of one kv head, and writes out and lse. `scratch` has prefill_scratch_floats
// floats for at least the tile's rows, at an address that is a multiple of 64.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void attend_tile(const AttentionParams<T, C>& params,
                                                                     const PrefillTile& tile, int64_t kv_head,
                                                                     float* scratch))

}  // namespace kvpager::cpu

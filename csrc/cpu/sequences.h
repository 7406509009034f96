// What every attention kernel of the CPU checks of a sequence's values before anything is written.
#pragma once
#include <algorithm>

#include "../checks.h"

namespace kvpager::cpu {

// Lengths of the sequence's table and bound, and every table entry that its queries will read, are valid.
template <class T, class C>
void check_sequence(const AttentionParams<T, C>& p, int64_t row, int64_t length, int64_t query_len) {
  const int64_t longest = std::min(p.max_blocks * p.pool.block_size, p.max_seq_len);
  if (length < 0 || length > longest)
    fail_argument("seq_lens",
                  "lengths of 0 to " + std::to_string(longest) + " (" + std::to_string(p.max_blocks) + " blocks of " +
                      std::to_string(p.pool.block_size) + ", `max_seq_len` " + std::to_string(p.max_seq_len) + ")",
                  std::to_string(length) + " in row " + std::to_string(row));
  if (length == 0 || query_len == 0) return;
  const int64_t first = p.first_visible(length - query_len) / p.pool.block_size;
  const int64_t last = (length - 1) / p.pool.block_size;  // < max_blocks, since length <= longest
  for (int64_t column = first; column <= last; ++column) {
    const int32_t block = p.block_tables.at(row, column);
    if (block < 0 || block >= p.pool.num_blocks)
      fail_slot("block_tables", "a block id of 0 to " + std::to_string(p.pool.num_blocks - 1),
                std::to_string(block) + " at row " + std::to_string(row) + ", column " + std::to_string(column));
  }
}

// Slots are -1 or lie in the pool.
inline void check_slots(const List<int64_t>& slot_mapping, int64_t num_tokens, const PoolShape& pool) {
  const int64_t num_slots = pool.num_blocks * pool.block_size;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int64_t slot = slot_mapping[token];
    if (slot < -1 || slot >= num_slots)
      fail_slot("slot_mapping", "-1 or a slot below " + std::to_string(num_slots),
                std::to_string(slot) + " at token " + std::to_string(token));
  }
}

// Zeros and lse -inf for query tokens first ... stop - 1, which see nothing.
template <class T, class C>
void write_empty(const AttentionParams<T, C>& p, int64_t first, int64_t stop) {
  for (int64_t token = first; token < stop; ++token)
    for (int64_t head = 0; head < p.num_heads; ++head) {
      std::fill_n(p.out.at(token, head), p.pool.head_dim, T{});
      if (p.lse.data) p.lse.at(token, head) = -INFINITY;
    }
}

}  // namespace kvpager::cpu

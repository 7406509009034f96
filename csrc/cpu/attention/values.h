// What the attention ops of the CPU check of the values in their tensors before anything is written.
#pragma once
#include <algorithm>

#include "../../attention/params.h"
#include "../../errors.h"

namespace kvpager::cpu {

// A row's length fits its table and the bound, and every table entry of positions first ... length - 1 names a block.
inline void check_sequence(const Grid<const int32_t>& block_tables, int64_t max_blocks, int64_t max_seq_len,
                           const PoolShape& pool, int64_t row, int64_t length, int64_t first) {
  const int64_t longest = std::min(max_blocks * pool.block_size, max_seq_len);
  if (length < 0 || length > longest)
    fail_argument("seq_lens",
                  "lengths of 0 to " + std::to_string(longest) + " (" + std::to_string(max_blocks) + " blocks of " +
                      std::to_string(pool.block_size) + ", `max_seq_len` " + std::to_string(max_seq_len) + ")",
                  std::to_string(length) + " in row " + std::to_string(row));
  if (first >= length) return;
  const int64_t last_column = (length - 1) / pool.block_size;  // < max_blocks, since length <= longest
  for (int64_t column = first / pool.block_size; column <= last_column; ++column) {
    const int32_t block = block_tables.at(row, column);
    if (block < 0 || block >= pool.num_blocks)
      fail_slot("block_tables", "a block id of 0 to " + std::to_string(pool.num_blocks - 1),
                std::to_string(block) + " at row " + std::to_string(row) + ", column " + std::to_string(column));
  }
}

// The same for all that the last `query_len` tokens of a row see.
template <class T, class C>
void check_sequence(const AttentionParams<T, C>& p, int64_t row, int64_t query_len) {
  const int64_t length = p.seq_lens[row];
  check_sequence(p.block_tables, p.max_blocks, p.max_seq_len, p.pool, row, length,
                 query_len == 0 ? length : p.options.first_visible(length - query_len));
}

// Every row of a decode call: its query is its last token.
template <class T, class C>
void check_sequences(const AttentionParams<T, C>& p) {
  for (int64_t row = 0; row < p.num_sequences; ++row) check_sequence(p, row, 1);
}

// Every row of a prefill call, and where its queries lie.
template <class T, class C>
void check_queries(const AttentionParams<T, C>& p) {
  if (p.query_start_loc[0] != 0)
    fail_argument("query_start_loc", "0 as first entry", std::to_string(p.query_start_loc[0]));
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t query_len = int64_t{p.query_start_loc[row + 1]} - p.query_start_loc[row];
    if (query_len < 0 || query_len > p.max_query_len)
      fail_argument("query_start_loc", "steps of 0 to " + std::to_string(p.max_query_len) + " (`max_query_len`)",
                    std::to_string(query_len) + " at row " + std::to_string(row));
    if (p.seq_lens[row] >= 0 && query_len > p.seq_lens[row])  // a negative length is check_sequence's to refuse
      fail_argument("query_start_loc", "no more query tokens than the sequence is long",
                    std::to_string(query_len) + " queries for length " + std::to_string(p.seq_lens[row]) + " at row " +
                        std::to_string(row));
    check_sequence(p, row, query_len);
  }
  // The starts rise, so a last one within the query bounds them all.
  if (p.query_start_loc[p.num_sequences] > p.num_tokens)
    fail_argument("query_start_loc", "a last entry of at most " + std::to_string(p.num_tokens) + " (query rows)",
                  std::to_string(p.query_start_loc[p.num_sequences]));
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

// A scale that is only read must be a positive number: nothing else can be divided by. `P`: params with both scales.
template <class P>
void check_fixed_scales(const P& params) {
  const auto check = [](const char* argument, const auto& scale) {
    if (!scale.fixed || (*scale.data > 0 && std::isfinite(*scale.data))) return;
    fail_argument(argument, "a positive number as the one scale", std::to_string(*scale.data));
  };
  check("key_scale", params.key_scale);
  check("value_scale", params.value_scale);
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

// Which query rows a block of prefill computes, and whether the values that say so fit.
#pragma once
#include "../attention/queries.cuh"

namespace kvpager::cuda::prefill {

constexpr int kPrefillThreads = 128;
constexpr int kPrefillWarps = kPrefillThreads / 32;

// The rows that a block computes. Row i of them is row first_row + i of a sequence: query token (first_row + i) /
// group, query head (first_row + i) % group of the kv head.
struct PrefillRows {
  int64_t sequence, first_token;  // of the sequence
  int32_t length, query_len, first_row, num_rows;
  int32_t first_position, last_position;  // of the first and the last row
  int32_t first_seen;                     // by the first row
};

// A block's rows; num_rows is 0 if it has none, or if a value does not fit (check_query_starts reports it). The same
// answer in every thread.
template <int kRows, class T, class C>
__device__ PrefillRows prefill_rows(const AttentionParams<T, C>& p, int64_t block) {
  const int64_t group = p.num_heads / p.pool.num_kv_heads, B = p.num_sequences;
  const auto first_block = [&](int64_t b) { return int64_t{p.query_start_loc[b]} * group / kRows + b; };
  int64_t low = 0, high = B + 1;  // the last sequence whose blocks begin at or before this one; B = past them all
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_block(middle) <= block ? low : high) = middle;
  }
  const int64_t start = p.query_start_loc[low], stop = low < B ? p.query_start_loc[low + 1] : p.num_tokens;
  const int64_t length = low < B ? p.seq_lens[low] : 0, query_len = stop - start;
  const int64_t first_row = (block - first_block(low)) * kRows, rows = query_len * group - first_row;
  PrefillRows none{};
  if (start < 0 || stop > p.num_tokens || first_row < 0 || rows <= 0) return none;
  if (low < B && (!p.length_is_valid(length) || query_len > length || query_len > p.max_query_len)) return none;
  const int32_t num_rows = static_cast<int32_t>(rows < kRows ? rows : kRows);
  const int64_t position = length - query_len;  // of the sequence's first query
  const int64_t first = position + first_row / group;
  return {low,
          start,
          static_cast<int32_t>(length),
          static_cast<int32_t>(query_len),
          static_cast<int32_t>(first_row),
          num_rows,
          static_cast<int32_t>(first),
          static_cast<int32_t>(position + (first_row + num_rows - 1) / group),
          static_cast<int32_t>(length > 0 ? p.options.first_visible(first) : 0)};
}

// Whether every table entry that the rows read names a block; the same in every thread, reported by the first.
template <class T, class C>
__device__ bool table_is_valid(const AttentionParams<T, C>& p, const PrefillRows& rows, unsigned* errors) {
  const int64_t S = p.pool.block_size;
  bool bad = false;
  // In bounds: last_position < length <= max_blocks * S.
  for (int64_t column = rows.first_seen / S + threadIdx.x; column <= rows.last_position / S;
       column += kPrefillThreads) {
    const int32_t block = p.block_tables.at(rows.sequence, column);
    bad |= block < 0 || block >= p.pool.num_blocks;
  }
  if (!__syncthreads_or(bad)) return true;
  if (threadIdx.x == 0) report(errors, kBlockTables);
  return false;
}

}  // namespace kvpager::cuda::prefill

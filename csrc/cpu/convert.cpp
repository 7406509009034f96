// Quantised writes and gathers on the CPU: checks the values, then spreads tokens over threads.
#include "convert.h"

#include <cmath>
#include <memory>

#include "kernels.h"
#include "sequences.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // elements a thread should convert at least

template <class P>
int64_t grain_tokens(const P& p) {
  return std::max<int64_t>(1, kGrainElements / (2 * p.pool.num_kv_heads * p.pool.head_dim));
}

template <class T, class C>
void check_gather(const GatherParams<T, C>& p) {
  AttentionParams<T, C> lengths{};  // what check_sequence looks at
  lengths.block_tables = p.block_tables;
  lengths.max_blocks = p.max_blocks;
  lengths.max_seq_len = p.max_blocks * p.pool.block_size;
  lengths.pool = p.pool;
  int64_t written = 0;
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t length = p.seq_lens[row], start = p.seq_start_loc[row];
    check_sequence(lengths, row, length, length);
    if (start < written || p.seq_start_loc[row + 1] < start + length)
      fail_argument("seq_start_loc", "rising starts, each at least the sequence's length apart",
                    std::to_string(start) + " to " + std::to_string(p.seq_start_loc[row + 1]) + " for length " +
                        std::to_string(length) + " at row " + std::to_string(row));
    written = start + length;
  }
  if (p.seq_start_loc[p.num_sequences] > p.num_rows)
    fail_argument("seq_start_loc", "a last entry of at most " + std::to_string(p.num_rows) + " (rows of `key`)",
                  std::to_string(p.seq_start_loc[p.num_sequences]));
}

}  // namespace

void check_fixed_scale(const char* argument, const Scales<const float>& scale) {
  if (!scale.fixed || (*scale.data > 0 && std::isfinite(*scale.data))) return;
  fail_argument(argument, "a positive number as the one scale", std::to_string(*scale.data));
}

template <class T, class C>
void write_quantised_kv(const QuantisedWriteParams<T, C>& p) {
  check_slots(p.slot_mapping, p.num_tokens, p.pool);
  const auto quantise = KVPAGER_ACTIVE(quantise_tokens<T, C>);
  torch::stable::parallel_for(0, p.num_tokens, grain_tokens(p), [&](int64_t begin, int64_t end) {
    const auto row = std::make_unique_for_overwrite<float[]>(p.pool.head_dim);
    quantise(p, begin, end, row.get());
  });
}

template <class T, class C>
void gather_kv(const GatherParams<T, C>& p) {
  check_gather(p);
  const auto gather = KVPAGER_ACTIVE(gather_rows<T, C>);
  for (int64_t row = 0; row < p.num_sequences; ++row)
    torch::stable::parallel_for(0, p.seq_lens[row], grain_tokens(p), [&](int64_t begin, int64_t end) {
      gather(p, row, begin, end, p.seq_start_loc[row] + begin);
    });
}

#define KVPAGER_INSTANTIATE_GATHER(T, C) template void gather_kv(const GatherParams<T, C>&);
#define KVPAGER_INSTANTIATE(T, C)                                      \
  template void write_quantised_kv(const QuantisedWriteParams<T, C>&); \
  KVPAGER_INSTANTIATE_GATHER(T, C)
KVPAGER_INSTANTIATE(float, int8_code)
KVPAGER_INSTANTIATE(float16, int8_code)
KVPAGER_INSTANTIATE(bfloat16, int8_code)
KVPAGER_INSTANTIATE(float, fp8_e4m3)
KVPAGER_INSTANTIATE(float16, fp8_e4m3)
KVPAGER_INSTANTIATE(bfloat16, fp8_e4m3)
KVPAGER_INSTANTIATE_GATHER(float, float)
KVPAGER_INSTANTIATE_GATHER(double, double)
KVPAGER_INSTANTIATE_GATHER(float16, float16)
KVPAGER_INSTANTIATE_GATHER(bfloat16, bfloat16)

}  // namespace kvpager::cpu

// The CPU op `gather_kv`: checks the values, then spreads the rows of each sequence over threads.
#include "../../moves/checks.h"
#include "../attention/values.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::moves {

// Widens positions begin ... end - 1 of a sequence into rows of key and value from first_row on.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void gather_rows(const GatherParams<T, C>& params, int64_t sequence,
                                                                     int64_t begin, int64_t end, int64_t first_row))

namespace {

template <class T, class C>
void check_gather(const GatherParams<T, C>& p) {
  int64_t written = 0;
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t length = p.seq_lens[row], start = p.seq_start_loc[row];
    check_sequence(p.block_tables, p.max_blocks, p.max_blocks * p.pool.block_size, p.pool, row, length, 0);
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

template <class T, class C>
void gather(const GatherParams<T, C>& p) {
  check_fixed_scales(p);
  check_gather(p);
  const auto gather_some = KVPAGER_ACTIVE(gather_rows<T, C>);
  const int64_t grain = grain_of(2 * p.pool.num_kv_heads * p.pool.head_dim);
  for (int64_t row = 0; row < p.num_sequences; ++row)
    torch::stable::parallel_for(0, p.seq_lens[row], grain, [&](int64_t begin, int64_t end) {
      gather_some(p, row, begin, end, p.seq_start_loc[row] + begin);
    });
}

void gather_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens,
               Tensor seq_start_loc, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("key", key, key_cache, [&](auto number, auto code) {
    gather(gather_params<decltype(number), decltype(code)>(key, value, key_cache, value_cache, block_tables, seq_lens,
                                                           seq_start_loc, key_scale, value_scale));
  });
}

}  // namespace
}  // namespace kvpager::cpu::moves

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("gather_kv", TORCH_BOX(&kvpager::cpu::moves::gather_kv));
}

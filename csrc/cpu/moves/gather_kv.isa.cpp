// Gathering a sequence's rows out of a cache of any type: numbers as they are, codes as numbers.
//
// Cost: one read and one write of each row.
#include "../../moves/params.h"
#include "../vec/vec.h"

namespace kvpager::cpu::moves::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/
namespace {

// One row [D] of the cache as T.
template <class T, class C>
void widen_row(const C* source, int64_t D, const Scales<const float>& scales, int64_t block, int64_t head,
               int64_t offset, T* target) {
  if constexpr (is_quantised<C>) {
    const float scale = *scales.at(block, head, offset);
    for (int64_t d = 0; d < D; ++d) target[d] = narrow<T>(widen(source[d]) * scale);
  } else {
    memcpy(target, source, D * sizeof(T));
  }
}

}  // namespace

template <class T, class C>
void gather_rows(const GatherParams<T, C>& p, int64_t sequence, int64_t begin, int64_t end, int64_t first_row) {
  const int64_t K = p.pool.num_kv_heads, D = p.pool.head_dim, S = p.pool.block_size;
  for (int64_t position = begin; position < end; ++position) {
    // In bounds: position < length, so the driver has seen this column and found a block; the row is one of key's.
    const int64_t block = p.block_tables.at(sequence, position / S), offset = position % S;
    const int64_t row = first_row + position - begin;
    for (int64_t head = 0; head < K; ++head) {
      widen_row(p.key_cache.at(block, head, offset), D, p.key_scale, block, head, offset, p.key.at(row, head));
      widen_row(p.value_cache.at(block, head, offset), D, p.value_scale, block, head, offset, p.value.at(row, head));
    }
  }
}

#define KVPAGER_INSTANTIATE(T, C) \
  template void gather_rows(const GatherParams<T, C>&, int64_t, int64_t, int64_t, int64_t);
KVPAGER_FOR_CACHES(KVPAGER_INSTANTIATE)
KVPAGER_INSTANTIATE(double, double)

}  // namespace kvpager::cpu::moves::KVPAGER_ISA

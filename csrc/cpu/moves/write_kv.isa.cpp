// Writing tokens into a quantised cache.
//
// Cost: one read and one write of each row; a row is widened into the first cache before its scale is known.
#include "../../moves/params.h"
#include "../vec/quantise.h"

namespace kvpager::cpu::moves::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/
namespace {

// One row [D] of T into codes, with its own scale, which it writes, or with the one scale of the cache.
template <class T, class C>
void quantise(const T* source, int64_t D, const Scales<float>& scales, int64_t block, int64_t head, int64_t offset,
              float* row, C* codes) {
  for (int64_t d = 0; d < D; d += kWidth) {
    const int64_t count = least(kWidth, D - d);
    count < kWidth ? store_partial(row + d, load_partial(source + d, count), count) : store(row + d, load(source + d));
  }
  if (scales.fixed) {
    store_codes(row, D, 1.0f / *scales.data, codes);
  } else {
    *scales.at(block, head, offset) = quantise_row(row, D, codes);
  }
}

}  // namespace

template <class T, class C>
void quantise_tokens(const WriteParams<T, C>& p, int64_t begin, int64_t end, float* row) {
  const int64_t K = p.pool.num_kv_heads, D = p.pool.head_dim, S = p.pool.block_size;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = p.slot_mapping[token];
    if (slot < 0) continue;
    // In bounds: the driver has found slot < N * S, so block < N and offset < S; token < num_tokens <= rows of key.
    const int64_t block = slot / S, offset = slot % S;
    for (int64_t head = 0; head < K; ++head) {
      quantise(p.key.at(token, head), D, p.key_scale, block, head, offset, row, p.key_cache.at(block, head, offset));
      quantise(p.value.at(token, head), D, p.value_scale, block, head, offset, row,
               p.value_cache.at(block, head, offset));
    }
  }
}

#define KVPAGER_INSTANTIATE(C, dtype, name, T) \
  template void quantise_tokens(const WriteParams<T, C>&, int64_t, int64_t, float*);
KVPAGER_FOR_CODES(KVPAGER_INSTANTIATE, float)
KVPAGER_FOR_CODES(KVPAGER_INSTANTIATE, float16)
KVPAGER_FOR_CODES(KVPAGER_INSTANTIATE, bfloat16)

}  // namespace kvpager::cpu::moves::KVPAGER_ISA

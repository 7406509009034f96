// Writing tokens into a quantised cache, and gathering a sequence's rows out of a cache of any type.
//
// Cost: one read and one write of each row; a row is widened into the first cache before its scale is known.
#include "convert.h"

#include "vec/quantise.h"

namespace kvpager::cpu::KVPAGER_ISA {
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
void quantise_tokens(const QuantisedWriteParams<T, C>& p, int64_t begin, int64_t end, float* row) {
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

#define KVPAGER_INSTANTIATE_GATHER(T, C) \
  template void gather_rows(const GatherParams<T, C>&, int64_t, int64_t, int64_t, int64_t);
#define KVPAGER_INSTANTIATE(T, C)                                                             \
  template void quantise_tokens(const QuantisedWriteParams<T, C>&, int64_t, int64_t, float*); \
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

}  // namespace kvpager::cpu::KVPAGER_ISA

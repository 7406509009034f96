// Where the rows of a chunk of positions lie, in which order decode takes them, and which it prefetches.
//
// Rows are taken from the four quarters of the chunk in turns, so from four pages: a core reads four streams at once
// faster than one. Blocks lie anywhere, and the block_size * head_dim elements of a head in one block are too few for
// the hardware to recognise a stream.
#pragma once
#include "../vec/vec.h"
#include "kernel.h"

namespace kvpager::cpu::decode::KVPAGER_ISA {
using namespace ::kvpager::cpu::KVPAGER_ISA;  // vec/

constexpr int64_t kStreams = 4;  // quarters of a chunk that rows are taken from in turns
constexpr int64_t kAgain = 32;   // so many rows ahead are prefetched a second time
constexpr int64_t kLine = 64;    // bytes

// Positions of a chunk: a stream is one block, where that is not too short or too long.
inline int64_t chunk_length(int64_t block_size) {
  const int64_t blocks = kStreams * block_size;
  return blocks < kMaxChunk / 2 ? kMaxChunk / 2 : least(blocks, kMaxChunk);
}

// Where the rows of a chunk lie, for kv head 0, in the order of `weave`; entries past them repeat the last row. A run
// is a part of one block, in the order of positions: its scales lie slot_stride apart.
template <class C>
struct Chunk {
  int64_t count = 0, num_runs = 0;  // positions, up to kMaxChunk
  const C *keys[kMaxChunk], *values[kMaxChunk];
  int64_t run_starts[kMaxChunk + 1];  // of a quantised cache: run r is run_starts[r] ... [r + 1] - 1
  const float *key_scales[kMaxChunk], *value_scales[kMaxChunk];  // of each run's first position
};

// [kStreams, quarter] in the order of positions -> woven [quarter, kStreams]; what is left over stays behind.
template <class E>
void weave(const E* ordered, int64_t count, E* woven) {
  const int64_t quarter = count / kStreams;
  for (int64_t step = 0; step < quarter; ++step)
#pragma GCC unroll 4
    for (int64_t stream = 0; stream < kStreams; ++stream)
      woven[kStreams * step + stream] = ordered[stream * quarter + step];
  for (int64_t i = kStreams * quarter; i < count; ++i) woven[i] = ordered[i];
}

// The rows of positions begin ... end - 1, but at most `length` of them.
template <class T, class C>
void find_rows(const AttentionParams<T, C>& p, int64_t row, int64_t begin, int64_t end, int64_t length,
               Chunk<C>& chunk) {
  const int64_t S = p.pool.block_size;
  const C *keys[kMaxChunk], *values[kMaxChunk];
  chunk.count = chunk.num_runs = 0;
  for (int64_t position = begin; position < end && chunk.count < length;) {
    // In bounds: position < length, so the driver has seen this column and found a block of the pool.
    const int64_t block = p.block_tables.at(row, position / S);
    int64_t offset = position % S;
    if constexpr (is_quantised<C>) {
      chunk.run_starts[chunk.num_runs] = chunk.count;
      chunk.key_scales[chunk.num_runs] = p.key_scale.at(block, 0, offset);
      chunk.value_scales[chunk.num_runs++] = p.value_scale.at(block, 0, offset);
    }
    for (; offset < S && position < end && chunk.count < length; ++offset, ++position, ++chunk.count) {
      keys[chunk.count] = p.key_cache.at(block, 0, offset);
      values[chunk.count] = p.value_cache.at(block, 0, offset);
    }
  }
  if constexpr (is_quantised<C>) chunk.run_starts[chunk.num_runs] = chunk.count;
  if (chunk.count == 0) return;
  weave(keys, chunk.count, chunk.keys);
  weave(values, chunk.count, chunk.values);
  for (int64_t i = chunk.count; i < kMaxChunk; ++i) {
    chunk.keys[i] = chunk.keys[chunk.count - 1];
    chunk.values[i] = chunk.values[chunk.count - 1];
  }
}

// The scales of one kv head's rows, in their order, `runs` being those of head 0.
template <class C>
void copy_scales(const Chunk<C>& chunk, const float* const* runs, const Scales<const float>& scales, int64_t kv_head,
                 float* woven) {
  float target[kMaxChunk];
  for (int64_t run = 0; run < chunk.num_runs; ++run) {
    const float* source = runs[run] + kv_head * scales.head_stride;
    const int64_t start = chunk.run_starts[run], stop = chunk.run_starts[run + 1];
    if (scales.slot_stride == 1) {
      memcpy(target + start, source, (stop - start) * sizeof(float));
    } else {
      for (int64_t i = start; i < stop; ++i) target[i] = source[(i - start) * scales.slot_stride];
    }
  }
  weave(target, chunk.count, woven);
  for (int64_t i = chunk.count; i < kMaxChunk; ++i) woven[i] = 0;  // a NaN would spread over the chunk
}

// The rows of one kv head: those of head 0, `offset` elements on.
template <class C>
struct HeadRows {
  const C* const* rows;
  int64_t offset;
  KVPAGER_INLINE const C* row(int64_t i) const { return rows[i] + offset; }
};

// Prefetches a line into the second-level cache: the first has too few misses in flight.
KVPAGER_INLINE void prefetch_line(const void* at) { __builtin_prefetch(at, 0, 2); }

// Prefetches kCount elements that are needed one head later, and once more those that are needed kAgain rows later. A
// core drops prefetches when too many are outstanding (about one in three when the loop is bound by memory), so each
// line is requested twice. Quantised caches are bound by arithmetic; once is enough for them.
template <int64_t kCount, class C>
KVPAGER_INLINE void prefetch(const C* coming, const C* soon) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kCount; i += kLine / static_cast<int64_t>(sizeof(C))) {
    prefetch_line(coming + i);
    if constexpr (!is_quantised<C>) prefetch_line(soon + i);
  }
}

}  // namespace kvpager::cpu::decode::KVPAGER_ISA

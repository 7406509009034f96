// The decode kernel: one query token a sequence, one pass over its K and V for all query heads.
//
// A chunk of kChunk positions is attended kv head by kv head. Its rows are taken from kStreams parts of the chunk in
// turns, from as many pages: a core reads four streams at once faster than one (blocks lie anywhere, and a slab of
// block_size * head_dim elements is too short for the hardware to see a stream in it). On the way, line by line, the rows
// that come next are prefetched: those of V while K is multiplied, the next head's or chunk's K while V is. Query heads
// of a kv head go through the chunk in groups of up to kGroup, so that K and V come from memory once and from the first
// cache for the rest. Rows of K times queries: a few tokens at once, sums kept in vectors and reduced four at a time.
// Weights times rows of V: a tile of the head dim stays in registers over the chunk. The online softmax rescales once a
// chunk.
#include "decode.h"
#include "vec/vec.h"

namespace kvpager::cpu::KVPAGER_ISA {
namespace {

constexpr int kChunk = 64;                           // positions; at least kWidth of every set
constexpr int kGroup = kNumRegisters >= 32 ? 4 : 2;  // query heads that share a load of K or V
constexpr int kMaxTokens = 8;                        // tokens that share a load of the query, at most
constexpr int64_t kStreams = 4;                      // parts of a chunk that rows are taken from in turns
constexpr int64_t kLine = 64;                        // bytes

// Where the rows of a chunk lie, for kv head 0, in the order of `weave`; entries past them repeat the last row. A run is
// a part of one block, in the order of positions: its scales lie slot_stride apart.
template <class C>
struct Chunk {
  int64_t count = 0, num_runs = 0;  // positions, up to kChunk
  const C *keys[kChunk], *values[kChunk];
  int64_t run_starts[kChunk + 1];  // of a quantised cache: run r is run_starts[r] ... [r + 1] - 1
  const float *key_scales[kChunk], *value_scales[kChunk];  // of each run's first position
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

template <class T, class C>
void find_rows(const AttentionParams<T, C>& p, int64_t row, int64_t begin, int64_t end, Chunk<C>& chunk) {
  const int64_t S = p.pool.block_size;
  const C *keys[kChunk], *values[kChunk];
  chunk.count = chunk.num_runs = 0;
  for (int64_t position = begin; position < end && chunk.count < kChunk;) {
    // In bounds: position < length, so the driver has seen this column and found a block of the pool.
    const int64_t block = p.block_tables.at(row, position / S);
    int64_t offset = position % S;
    if constexpr (is_quantised<C>) {
      chunk.run_starts[chunk.num_runs] = chunk.count;
      chunk.key_scales[chunk.num_runs] = p.key_scale.at(block, 0, offset);
      chunk.value_scales[chunk.num_runs++] = p.value_scale.at(block, 0, offset);
    }
    for (; offset < S && position < end && chunk.count < kChunk; ++offset, ++position, ++chunk.count) {
      keys[chunk.count] = p.key_cache.at(block, 0, offset);
      values[chunk.count] = p.value_cache.at(block, 0, offset);
    }
  }
  if constexpr (is_quantised<C>) chunk.run_starts[chunk.num_runs] = chunk.count;
  if (chunk.count == 0) return;
  weave(keys, chunk.count, chunk.keys);
  weave(values, chunk.count, chunk.values);
  for (int64_t i = chunk.count; i < kChunk; ++i) {
    chunk.keys[i] = chunk.keys[chunk.count - 1];
    chunk.values[i] = chunk.values[chunk.count - 1];
  }
}

// The scales of one kv head's rows, in their order, `runs` being those of head 0.
template <class C>
void copy_scales(const Chunk<C>& chunk, const float* const* runs, const Scales<const float>& scales, int64_t kv_head,
                 float* woven) {
  float target[kChunk];
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
}

// The rows to have in the cache next, as many as are worked on now: row i of `rows`, `offset` elements on.
template <class C>
struct Upcoming {
  const C* const* rows;
  int64_t offset;
  KVPAGER_INLINE const C* row(int64_t i) const { return rows[i] + offset; }
};

// Asks for kCount elements, into the second cache: the first has too few misses in flight.
template <int64_t kCount, class C>
KVPAGER_INLINE void prefetch(const C* at) {
#pragma GCC unroll 8
  for (int64_t i = 0; i < kCount; i += kLine / static_cast<int64_t>(sizeof(C))) __builtin_prefetch(at + i, 0, 2);
}

// How rows of K meet the query: one Pair of elements at a time. A prepared query has rows of `padded` floats' room.
template <class C>
struct Dot {
  using Key = Pair;
  template <class T>
  static void prepare(const T* source, int64_t head_dim, float* target) {
    for (int64_t d = 0; d < head_dim; d += kPair) {
      float natural[kPair] = {};
      for (int64_t i = 0; i < kPair && d + i < head_dim; ++i) natural[i] = widen(source[d + i]);
      spread_pair<C>(natural, target + d);
    }
  }
  static KVPAGER_INLINE Key load(const C* key) { return load_pair(key); }
  static KVPAGER_INLINE Key load_partial(const C* key, int64_t count) { return load_pair_partial(key, count); }
  static KVPAGER_INLINE Vec add(Vec sum, const float* query, Key key) {
    return fma(key.second, KVPAGER_ISA::load(query + kWidth), fma(key.first, KVPAGER_ISA::load(query), sum));
  }
};

#if defined(KVPAGER_HAS_BF16_DOT)
// The query stays bfloat16: each Pair in the first half of the room of its floats.
template <>
struct Dot<bfloat16> {
  using Key = Bf16Vec;
  static void prepare(const bfloat16* source, int64_t head_dim, float* target) {
    for (int64_t d = 0; d < head_dim; d += kPair) {
      memset(target + d, 0, kPair * sizeof(float));
      memcpy(target + d, source + d, least(kPair, head_dim - d) * sizeof(bfloat16));
    }
  }
  static KVPAGER_INLINE Key load(const bfloat16* key) { return load_bf16(key); }
  static KVPAGER_INLINE Key load_partial(const bfloat16* key, int64_t count) { return load_bf16_partial(key, count); }
  static KVPAGER_INLINE Vec add(Vec sum, const float* query, Key key) {
    return dot_bf16(sum, load_bf16(reinterpret_cast<const bfloat16*>(query)), key);
  }
};
#endif

// scores[g * kChunk + i] = query g . key i for the chunk's tokens; up to kMaxTokens - 1 columns past them get nonsense.
template <class C, int G>
void dot_rows(const float* query, int64_t padded, const Chunk<C>& chunk, int64_t offset, int64_t head_dim,
              const Upcoming<C>& next, float* scores) {
  constexpr int kTokens = G == 1 ? 8 : 4;  // enough sums to wait for, few enough for the registers
  const int64_t whole = head_dim / kPair * kPair, rest = head_dim - whole;
  for (int64_t i = 0; i < chunk.count; i += kTokens) {
    Vec sums[G][kTokens];
    const C *keys[kTokens], *upcoming[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      keys[t] = chunk.keys[i + t] + offset;
      upcoming[t] = next.row(i + t);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][t] = zero();
    }
    const auto step = [&](int64_t d, const auto& load_key) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const auto key = load_key(keys[t] + d);
        if (d * static_cast<int64_t>(sizeof(C)) % kLine == 0) prefetch<kPair>(upcoming[t] + d);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[g][t] = Dot<C>::add(sums[g][t], query + g * padded + d, key);
      }
    };
    for (int64_t d = 0; d < whole; d += kPair) step(d, [](const C* key) { return Dot<C>::load(key); });
    if (rest > 0) step(whole, [rest](const C* key) { return Dot<C>::load_partial(key, rest); });
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int t = 0; t < kTokens; t += 4)
        reduce_add4(sums[g][t], sums[g][t + 1], sums[g][t + 2], sums[g][t + 3], scores + g * kChunk + i + t);
  }
}

// Scores of one head -> weights, relative to the largest logit so far; returns what the sums before shrink by.
template <class T, class C>
KVPAGER_INLINE float soften(const AttentionParams<T, C>& p, const Chunk<C>& chunk, const float* key_scales,
                            const float* value_scales, float* scores, float& top, float& total) {
  for (int i = 0; i < chunk.count; i += kWidth) {
    Vec logits = mul(load(scores + i), splat(p.scale));
    if constexpr (is_quantised<C>) logits = mul(logits, load(key_scales + i));
    if (p.softcap > 0) logits = mul(tanh(div(logits, splat(p.softcap))), splat(p.softcap));
    store(scores + i, logits);
  }
  for (int64_t i = chunk.count; i % kWidth != 0; ++i) scores[i] = -INFINITY;
  Vec tops = splat(top);
  for (int i = 0; i < chunk.count; i += kWidth) tops = maximum(load(scores + i), tops);
  const float new_top = reduce_max(tops);
  if (new_top == -INFINITY) {  // every score overflowed to -inf: no weight, and -inf - -inf would be NaN
    for (int i = 0; i < chunk.count; ++i) scores[i] = scores[i] == -INFINITY ? 0.0f : scores[i];
    return 1.0f;
  }
  const float shrink = first_of(exp(splat(top - new_top)));  // exp(-inf) = 0 for the first chunk
  Vec weight_sum = zero();
  for (int i = 0; i < chunk.count; i += kWidth) {
    Vec weights = exp(sub(load(scores + i), splat(new_top)));
    weight_sum = add(weight_sum, weights);
    if constexpr (is_quantised<C>) weights = mul(weights, load(value_scales + i));
    store(scores + i, weights);
  }
  top = new_top;
  total = total * shrink + reduce_add(weight_sum);
  return shrink;
}

// sums[g] = sums[g] * shrink[g] + sum over tokens of weight * value, for kPairs Pairs of the head dim from d on; the
// last one has `last` elements. Asks for the same part of the upcoming rows.
template <class C, int G, int kPairs>
KVPAGER_INLINE void add_values(const float* weights, const float* shrink, const Chunk<C>& chunk, int64_t offset,
                               int64_t padded, int64_t d, int64_t last, const Upcoming<C>& next, float* sums) {
  Pair tile[G][kPairs];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const Vec factor = splat(shrink[g]);
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) {
      tile[g][c].first = mul(load(sums + g * padded + d + c * kPair), factor);
      tile[g][c].second = mul(load(sums + g * padded + d + c * kPair + kWidth), factor);
    }
  }
  for (int64_t i = 0; i < chunk.count; ++i) {
    const C* value = chunk.values[i] + offset + d;
    prefetch<kPairs * kPair>(next.row(i) + d);
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) {
      const Pair loaded = kPairs == 1 && last < kPair ? load_pair_partial(value, last) : load_pair(value + c * kPair);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Vec weight = splat(weights[g * kChunk + i]);
        tile[g][c].first = fma(weight, loaded.first, tile[g][c].first);
        tile[g][c].second = fma(weight, loaded.second, tile[g][c].second);
      }
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) {
      store(sums + g * padded + d + c * kPair, tile[g][c].first);
      store(sums + g * padded + d + c * kPair + kWidth, tile[g][c].second);
    }
}

// What is being worked on: one kv head of one chunk, K before V, and the K that comes next.
template <class C>
struct Work {
  const Chunk<C>& chunk;
  int64_t key_offset;
  Upcoming<C> values, next_keys;
  const float *key_scales, *value_scales;
};

// G query heads over one chunk of their kv head. `query` and `sums` are rows of `padded` floats.
template <class T, class C, int G>
void attend_heads(const AttentionParams<T, C>& p, const Work<C>& work, const float* query, int64_t padded, float* tops,
                  float* totals, float* sums) {
  const int64_t D = p.pool.head_dim;
  alignas(64) float scores[G * kChunk];
  float shrink[G];
  dot_rows<C, G>(query, padded, work.chunk, work.key_offset, D, work.values, scores);
  for (int g = 0; g < G; ++g)
    shrink[g] = soften(p, work.chunk, work.key_scales, work.value_scales, scores + g * kChunk, tops[g], totals[g]);
  constexpr int kTile = kNumRegisters >= 32 ? (G <= 2 ? 4 : 2) : (G == 1 ? 4 : 2);
  int64_t d = 0;
  for (; d + kTile * kPair <= D; d += kTile * kPair)
    add_values<C, G, kTile>(scores, shrink, work.chunk, work.values.offset, padded, d, kPair, work.next_keys, sums);
  for (; d < D; d += kPair)
    add_values<C, G, 1>(scores, shrink, work.chunk, work.values.offset, padded, d, least(kPair, D - d), work.next_keys,
                        sums);
}

}  // namespace

template <class T, class C>
void attend_span(const AttentionParams<T, C>& p, const Span& span, float* scratch, const Partial& result) {
  const int64_t D = p.pool.head_dim, K = p.pool.num_kv_heads, H = p.num_heads, group = H / K;
  const int64_t padded = (D + kPair - 1) / kPair * kPair;  // <= the padding of scratch_floats
  float *query = scratch, *sums = scratch + H * padded;
  for (int64_t head = 0; head < H; ++head) {
    Dot<C>::prepare(p.query.at(span.row, head), D, query + head * padded);
    result.tops[head] = -INFINITY;
    result.totals[head] = 0;
  }
  memset(sums, 0, H * padded * sizeof(float));
  Chunk<C> chunks[2];  // the one being attended and the one after it, in turn
  find_rows(p, span.row, span.begin, span.end, chunks[0]);
  alignas(64) float key_scales[kChunk], value_scales[kChunk];
  int turn = 0;
  for (int64_t position = span.begin; position < span.end; position += kChunk, turn ^= 1) {
    const Chunk<C>&chunk = chunks[turn], &following = chunks[turn ^ 1];
    find_rows(p, span.row, position + kChunk, span.end, chunks[turn ^ 1]);
    for (int64_t kv_head = 0; kv_head < K; ++kv_head) {
      const bool last = kv_head + 1 == K;
      const Chunk<C>& next = last && following.count > 0 ? following : chunk;
      const int64_t next_head = last ? 0 : kv_head + 1;
      if constexpr (is_quantised<C>) {
        copy_scales(chunk, chunk.key_scales, p.key_scale, kv_head, key_scales);
        copy_scales(chunk, chunk.value_scales, p.value_scale, kv_head, value_scales);
      }
      Work<C> work{chunk,
                   kv_head * p.key_cache.head_stride,
                   {chunk.values, kv_head * p.value_cache.head_stride},
                   {next.keys, next_head * p.key_cache.head_stride},
                   key_scales,
                   value_scales};
      for (int64_t g = 0; g < group;) {
        const int64_t head = kv_head * group + g, count = least(kGroup, group - g);
        const auto run = [&](auto heads) {
          attend_heads<T, C, decltype(heads)::value>(p, work, query + head * padded, padded, result.tops + head,
                                                     result.totals + head, sums + head * padded);
        };
        if constexpr (kGroup >= 4) {
          if (count == 4) run(std::integral_constant<int, 4>{});
          if (count == 3) run(std::integral_constant<int, 3>{});
        }
        if (count == 2) run(std::integral_constant<int, 2>{});
        if (count == 1) run(std::integral_constant<int, 1>{});
        work.next_keys = {chunk.values, kv_head * p.value_cache.head_stride};  // asked for already: these are at hand
        g += count;
      }
    }
  }

  for (int64_t head = 0; head < H; ++head)
    for (int64_t d = 0; d < D; d += kPair) {
      float natural[kPair];
      gather_pair<C>(sums + head * padded + d, natural);
      memcpy(result.accs + head * D + d, natural, least(kPair, D - d) * sizeof(float));
    }
}

#define KVPAGER_INSTANTIATE(T, C) \
  template void attend_span(const AttentionParams<T, C>&, const Span&, float*, const Partial&);
KVPAGER_INSTANTIATE(float, float)
KVPAGER_INSTANTIATE(float16, float16)
KVPAGER_INSTANTIATE(bfloat16, bfloat16)
KVPAGER_INSTANTIATE(float, int8_code)
KVPAGER_INSTANTIATE(float16, int8_code)
KVPAGER_INSTANTIATE(bfloat16, int8_code)
KVPAGER_INSTANTIATE(float, fp8_e4m3)
KVPAGER_INSTANTIATE(float16, fp8_e4m3)
KVPAGER_INSTANTIATE(bfloat16, fp8_e4m3)

}  // namespace kvpager::cpu::KVPAGER_ISA

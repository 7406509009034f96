// The decode kernel: one query token a sequence, one pass over its K and V for all query heads.
//
// A chunk of positions is attended kv head by kv head, its rows in the order of decode_rows.h. On the way, line by line,
// the rows that come next are prefetched: those of V while K is multiplied, the next head's or chunk's K while V is.
// Query heads of a kv head go through the chunk in groups of up to kGroup, so that K and V come from memory once and from
// the caches for the rest. Rows of K times queries: a few tokens at once, sums kept in vectors and reduced four at a
// time. Weights times rows of V: a tile of the head dim stays in registers over the chunk. The online softmax rescales
// once a chunk. decode_product.h has the arithmetic.
#include "decode.h"
#include "decode_product.h"
#include "decode_rows.h"

namespace kvpager::cpu::KVPAGER_ISA {
namespace {

constexpr int kGroup = 4;  // query heads that share a load of K or V

// Some query heads of one kv head and what they have gathered so far: rows of `padded` floats, or one number each.
struct Heads {
  const float *queries, *factors;                // what KeyProduct prepared
  float *tops, *totals, *rounded_totals, *sums;  // rounded_totals: of the weights that values were multiplied by
  int64_t padded;
};

// What is being worked on: one kv head of one chunk, K before V, and the K that comes next.
template <class C>
struct Work {
  const Chunk<C>& chunk;
  int64_t key_offset;
  Upcoming<C> values, next_keys;
  const float *key_scales, *value_scales;
};

// scores[g * kChunk + i] = query g . key i for the chunk's tokens; up to 7 columns past them get nonsense.
template <class T, class C, int G>
void dot_rows(const Heads& heads, const Work<C>& work, int64_t head_dim, float* scores) {
  using Product = KeyProduct<T, C>;
  // Enough sums to wait for, few enough for the registers.
  constexpr int kTokens = G == 1 ? 8 : (G == 2 || kNumRegisters >= 32 ? 4 : 2);
  const int64_t whole = head_dim / kPair * kPair, rest = head_dim - whole, padded = heads.padded;
  const float* queries = heads.queries;
  for (int64_t i = 0; i < work.chunk.count; i += kTokens) {
    typename Product::Sum sums[G][kTokens];
    const C *keys[kTokens], *upcoming[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      keys[t] = work.chunk.keys[i + t] + work.key_offset;
      upcoming[t] = work.values.row(i + t);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][t] = Product::none();
    }
    const auto step = [&](int64_t d, const auto& load_key) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const auto key = load_key(keys[t] + d);
        if (d * static_cast<int64_t>(sizeof(C)) % kLine == 0) prefetch<kPair>(upcoming[t] + d);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) sums[g][t] = Product::add(sums[g][t], queries + g * padded + d, key);
      }
    };
    for (int64_t d = 0; d < whole; d += kPair) step(d, [](const C* key) { return Product::load(key); });
    if (rest > 0) step(whole, [rest](const C* key) { return Product::load_partial(key, rest); });
    if constexpr (kTokens == 2) {  // two heads at once
#pragma GCC unroll 2
      for (int g = 0; g < G; g += 2) {
        const int h = g + 1 < G ? g + 1 : g;
        float four[4];
        reduce_add4(Product::total(sums[g][0]), Product::total(sums[g][1]), Product::total(sums[h][0]),
                    Product::total(sums[h][1]), four);
        memcpy(scores + g * kChunk + i, four, 2 * sizeof(float));
        memcpy(scores + h * kChunk + i, four + 2, 2 * sizeof(float));
      }
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int t = 0; t < kTokens; t += 4)
          reduce_add4(Product::total(sums[g][t]), Product::total(sums[g][t + 1]), Product::total(sums[g][t + 2]),
                      Product::total(sums[g][t + 3]), scores + g * kChunk + i + t);
    }
  }
}

// Scores -> weights, relative to the largest logit so far, as ValueProduct wants them; `shrink`: what the sums before
// are to be multiplied by. All heads go through each stage together: one alone would wait for itself.
template <class T, class C, int G>
void soften(const AttentionParams<T, C>& p, const Heads& heads, const Work<C>& work, float* scores, float* shrink,
            float* value_factors) {
  const int64_t count = work.chunk.count, padded_count = (count + kPair - 1) / kPair * kPair;  // <= kChunk
  Vec factors[G], bases[G], weight_sums[G];
  for (int g = 0; g < G; ++g) factors[g] = splat(p.scale * heads.factors[g]);
  for (int64_t i = 0; i < count; i += kWidth)
    for (int g = 0; g < G; ++g) {
      Vec logits = mul(load(scores + g * kChunk + i), factors[g]);
      if constexpr (is_quantised<C>) logits = mul(logits, load(work.key_scales + i));
      if (p.softcap > 0) logits = mul(tanh(div(logits, splat(p.softcap))), splat(p.softcap));
      store(scores + g * kChunk + i, logits);
    }
  for (int g = 0; g < G; ++g) {
    for (int64_t i = count; i < padded_count; ++i) scores[g * kChunk + i] = -INFINITY;
    Vec tops = splat(heads.tops[g]);
    for (int64_t i = 0; i < count; i += kWidth) tops = maximum(load(scores + g * kChunk + i), tops);
    const float top = reduce_max(tops);
    const float base =
        top == -INFINITY ? 0.0f : top;  // every score overflowed: no weight, and -inf - -inf would be NaN
    shrink[g] = heads.tops[g] - base;   // -inf for the first chunk: exp gives 0
    heads.tops[g] = top;
    bases[g] = splat(base);
    weight_sums[g] = zero();
  }
  for (int64_t i = 0; i < padded_count; i += kWidth)
    for (int g = 0; g < G; ++g) {
      Vec weights = exp(sub(load(scores + g * kChunk + i), bases[g]));
      weight_sums[g] = add(weight_sums[g], weights);
      if constexpr (is_quantised<C>) weights = mul(weights, load(work.value_scales + i));
      store(scores + g * kChunk + i, weights);
    }
  for (int g = 0; g < G; ++g) {
    shrink[g] = first_of(exp(splat(shrink[g])));
    heads.totals[g] = heads.totals[g] * shrink[g] + reduce_add(weight_sums[g]);
    heads.rounded_totals[g] *= shrink[g];
    value_factors[g] = ValueProduct<T, C>::prepare(scores + g * kChunk, padded_count, heads.rounded_totals[g]);
  }
}

// For some of the head dim, kPairs Pairs from d on, the last one of `last` elements: sums = sums * shrink + sum over
// tokens of weight * value. Asks for the same part of the upcoming rows.
template <class T, class C, int G, int kPairs>
KVPAGER_INLINE void add_values(const Heads& heads, const Work<C>& work, const float* weights, const float* shrink,
                               const float* value_factors, int64_t d, int64_t last) {
  using Product = ValueProduct<T, C>;
  constexpr int64_t kTokens = Product::kTokens;
  const bool line_begins = d * static_cast<int64_t>(sizeof(C)) % kLine == 0;
  typename Product::Sum tile[2][G][kPairs];
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g)
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) tile[0][g][c] = tile[1][g][c] = Product::none();
  const auto step = [&](int64_t i, auto both) __attribute__((always_inline)) {
    constexpr bool kBoth = decltype(both)::value;
    const C *row = work.values.row(i) + d, *second = kBoth ? work.values.row(i + kTokens - 1) + d : nullptr;
    if (line_begins) {
      prefetch<kPairs * kPair>(work.next_keys.row(i) + d);
      if constexpr (kTokens > 1 && kBoth) prefetch<kPairs * kPair>(work.next_keys.row(i + 1) + d);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) {
      const auto values = kPairs == 1 && last < kPair
                              ? Product::template load<false, kBoth>(row, second, last)
                              : Product::template load<true, kBoth>(row + c * kPair, second + c * kPair, kPair);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Vec weight = Product::spread(weights + g * kChunk, i);
        tile[0][g][c] = Product::add(tile[0][g][c], weight, values.first);
        tile[1][g][c] = Product::add(tile[1][g][c], weight, values.second);
      }
    }
  };
  const int64_t count = work.chunk.count, whole = count / kTokens * kTokens;
  for (int64_t i = 0; i < whole; i += kTokens) step(i, std::true_type{});
  if (whole < count) step(whole, std::false_type{});
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const Vec factor = splat(shrink[g]), value_factor = splat(value_factors[g]);
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        float* target = heads.sums + g * heads.padded + d + c * kPair + half * kWidth;
        const Vec grown = Product::total(tile[half][g][c]);
        store(target, Product::kScales ? fma(grown, value_factor, mul(load(target), factor))
                                       : fma(load(target), factor, grown));
      }
  }
}

// G query heads over one chunk of their kv head.
template <class T, class C, int G>
void attend_heads(const AttentionParams<T, C>& p, const Work<C>& work, const Heads& heads) {
  const int64_t D = p.pool.head_dim;
  alignas(64) float scores[G * kChunk];
  float shrink[G], factors[G];
  dot_rows<T, C, G>(heads, work, D, scores);
  soften<T, C, G>(p, heads, work, scores, shrink, factors);
  constexpr int kTile = kNumRegisters >= 32 ? (G <= 2 ? 4 : 2) : (G == 1 ? 4 : G == 2 ? 2 : 1);
  int64_t d = 0;
  for (; d + kTile * kPair <= D; d += kTile * kPair)
    add_values<T, C, G, kTile>(heads, work, scores, shrink, factors, d, kPair);
  for (; d < D; d += kPair) add_values<T, C, G, 1>(heads, work, scores, shrink, factors, d, least(kPair, D - d));
}

}  // namespace

template <class T, class C>
void attend_span(const AttentionParams<T, C>& p, const Span& span, float* scratch, const Partial& result) {
  using Values = ValueProduct<T, C>;
  const int64_t D = p.pool.head_dim, K = p.pool.num_kv_heads, H = p.num_heads, group = H / K;
  const int64_t padded = (D + kPair - 1) / kPair * kPair;  // all within scratch_floats
  float *queries = scratch, *sums = queries + H * padded, *factors = sums + H * padded, *rounded_totals = factors + H;
  for (int64_t head = 0; head < H; ++head) {
    factors[head] = KeyProduct<T, C>::prepare(p.query.at(span.row, head), D, queries + head * padded);
    result.tops[head] = -INFINITY;
    result.totals[head] = rounded_totals[head] = 0;
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
        for (int64_t run = 0; run < next.num_runs; ++run) {
          prefetch<1>(next.key_scales[run] + next_head * p.key_scale.head_stride);
          prefetch<1>(next.value_scales[run] + next_head * p.value_scale.head_stride);
        }
      }
      Work<C> work{chunk,
                   kv_head * p.key_cache.head_stride,
                   {chunk.values, kv_head * p.value_cache.head_stride},
                   {next.keys, next_head * p.key_cache.head_stride},
                   key_scales,
                   value_scales};
      for (int64_t g = 0; g < group;) {
        const int64_t head = kv_head * group + g, count = least(kGroup, group - g);
        const Heads heads{
            queries + head * padded, factors + head, result.tops + head, result.totals + head, rounded_totals + head,
            sums + head * padded,    padded};
        const auto run = [&](auto size) { attend_heads<T, C, decltype(size)::value>(p, work, heads); };
        if constexpr (kGroup >= 4) {
          if (count == 4) run(std::integral_constant<int, 4>{});
          if (count == 3) run(std::integral_constant<int, 3>{});
        }
        if (count == 2) run(std::integral_constant<int, 2>{});
        if (count == 1) run(std::integral_constant<int, 1>{});
        work.next_keys = work.values;  // asked for already: these are at hand
        g += count;
      }
    }
  }

  for (int64_t head = 0; head < H; ++head) {
    // The result is divided by the exact total.
    const float correction =
        Values::kRounds && rounded_totals[head] > 0 ? result.totals[head] / rounded_totals[head] : 1;
    for (int64_t d = 0; d < D; d += kPair) {
      float natural[kPair];
      for (int lane = 0; lane < kPair; ++lane)
        natural[Values::place(lane)] = sums[head * padded + d + lane] * correction;
      memcpy(result.accs + head * D + d, natural, least(kPair, D - d) * sizeof(float));
    }
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

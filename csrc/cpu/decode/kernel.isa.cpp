// The decode kernel: one query token a sequence, one pass over its K and V for all query heads.
//
// A chunk of positions is attended in two sweeps: K for all kv heads, then V for all of them. Rows are taken in the
// order of rows.h, so that a core reads the whole K, or V, of a block in a few streams from many pages. While one head
// is worked on, the same rows of the next head are prefetched line by line. After the last head of K that is the first
// head of V, and after the last head of V the first head of the next chunk's K. The query heads of a kv head go through
// the chunk in groups of up to kGroup: K and V come from memory for the first group and from the caches for the others.
// The product of rows of K and queries takes a few tokens at once, with sums that stay in vectors and are reduced four
// at a time. The product of weights and rows of V keeps a tile of the head dim in registers over the whole chunk. The
// online softmax rescales once a chunk. product.h has the arithmetic.
//
// Longer than 300 lines, because both sweeps and the softmax between them share one walk over a chunk, with its groups
// and its prefetches.
#include "kernel.h"

#include "product.h"
#include "rows.h"

namespace kvpager::cpu::decode::KVPAGER_ISA {
namespace {

constexpr int kGroup = 4;  // query heads that share a load of K or V

// Some query heads of one kv head and what they have gathered so far: rows of `padded` floats, or one number each. Of
// the chunk at hand: rows of kMaxChunk scores, then weights, and what sums before and products are to be multiplied by.
struct Heads {
  const float *queries, *factors;                // what KeyProduct prepared
  float *tops, *totals, *rounded_totals, *sums;  // rounded_totals: of the weights that values were multiplied by
  float *weights, *shrinks, *value_factors;
  int64_t padded, first;  // first: of the H query heads

  Heads from(int64_t head) const {
    return {queries + head * padded,
            factors + head,
            tops + head,
            totals + head,
            rounded_totals + head,
            sums + head * padded,
            weights + head * kMaxChunk,
            shrinks + head,
            value_factors + head,
            padded,
            first + head};
  }
};

// The rows of one kv head in a chunk, of K or of V, and those that come next.
template <class C>
struct Rows {
  int64_t count;
  HeadRows<C> now, next;

  // The row after row i, kAgain rows on.
  KVPAGER_INLINE const C* soon(int64_t i) const {
    const int64_t at = i + kAgain;
    return at < count ? now.row(at) : next.row(at - count);  // at - count < kMaxChunk
  }
};

// scores = weights[g, i] = query g . key i for the chunk's tokens; up to 7 columns past them get nonsense.
template <class T, class C, int G>
void dot_rows(const Heads& heads, const Rows<C>& rows, int64_t head_dim) {
  using Product = KeyProduct<T, C>;
  // As many independent sums as the registers hold: a multiply-add takes several cycles, and each sum waits for its
  // last.
  constexpr int kTokens = G == 1 ? 8 : (G == 2 || kNumRegisters >= 32 ? 4 : 2);
  const int64_t whole = head_dim / kPair * kPair, rest = head_dim - whole, padded = heads.padded;
  const float* queries = heads.queries;
  float* scores = heads.weights;
  for (int64_t i = 0; i < rows.count; i += kTokens) {
    typename Product::Sum sums[G][kTokens];
    const C *keys[kTokens], *coming[kTokens], *soon[kTokens];
#pragma GCC unroll 8
    for (int t = 0; t < kTokens; ++t) {
      keys[t] = rows.now.row(i + t);
      coming[t] = rows.next.row(i + t);
      soon[t] = rows.soon(i + t);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) sums[g][t] = Product::none();
    }
    const auto step = [&](int64_t d, const auto& load_key) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int t = 0; t < kTokens; ++t) {
        const auto key = load_key(keys[t] + d);
        if (d * static_cast<int64_t>(sizeof(C)) % kLine == 0) prefetch<kPair>(coming[t] + d, soon[t] + d);
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
        memcpy(scores + g * kMaxChunk + i, four, 2 * sizeof(float));
        memcpy(scores + h * kMaxChunk + i, four + 2, 2 * sizeof(float));
      }
    } else {
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
        for (int t = 0; t < kTokens; t += 4)
          reduce_add4(Product::total(sums[g][t]), Product::total(sums[g][t + 1]), Product::total(sums[g][t + 2]),
                      Product::total(sums[g][t + 3]), scores + g * kMaxChunk + i + t);
    }
  }
}

// Scores -> weights, relative to the largest logit so far, as ValueProduct wants them. All heads go through each stage
// together: one alone would wait for itself. `distances`: of the tokens from the query, if there are slopes.
template <class T, class C, int G>
void soften(const AttentionParams<T, C>& p, const Heads& heads, int64_t count, const float* distances,
            const float* key_scales, const float* value_scales) {
  const int64_t padded_count = (count + kPair - 1) / kPair * kPair;  // <= kMaxChunk
  float* scores = heads.weights;
  Vec factors[G], bases[G], weight_sums[G];
  for (int g = 0; g < G; ++g) factors[g] = splat(p.options.scale * heads.factors[g]);
  for (int64_t i = 0; i < count; i += kWidth)
    for (int g = 0; g < G; ++g) {
      Vec logits = mul(load(scores + g * kMaxChunk + i), factors[g]);
      if constexpr (is_quantised<C>) logits = mul(logits, load(key_scales + i));
      if (p.options.softcap > 0) logits = mul(tanh(div(logits, splat(p.options.softcap))), splat(p.options.softcap));
      store(scores + g * kMaxChunk + i, logits);
    }
  if (p.options.alibi_slopes.data != nullptr)
    for (int g = 0; g < G; ++g)
      for (int64_t i = 0; i < count; i += kWidth) {
        float* const some = scores + g * kMaxChunk + i;
        store(some, fma(load(distances + i), splat(p.options.alibi_slopes[heads.first + g]), load(some)));
      }
  for (int g = 0; g < G; ++g) {
    for (int64_t i = count; i < padded_count; ++i) scores[g * kMaxChunk + i] = -INFINITY;
    Vec tops = splat(heads.tops[g]);
    for (int64_t i = 0; i < count; i += kWidth) tops = maximum(load(scores + g * kMaxChunk + i), tops);
    const float top = reduce_max(tops);
    const float base =
        top == -INFINITY ? 0.0f : top;        // every score overflowed: no weight, and -inf - -inf would be NaN
    heads.shrinks[g] = heads.tops[g] - base;  // -inf for the first chunk: exp gives 0
    heads.tops[g] = top;
    bases[g] = splat(base);
    weight_sums[g] = zero();
  }
  for (int64_t i = 0; i < padded_count; i += kWidth)
    for (int g = 0; g < G; ++g) {
      Vec weights = exp(sub(load(scores + g * kMaxChunk + i), bases[g]));
      weight_sums[g] = add(weight_sums[g], weights);
      if constexpr (is_quantised<C>) weights = mul(weights, load(value_scales + i));
      store(scores + g * kMaxChunk + i, weights);
    }
  for (int g = 0; g < G; ++g) {
    const float shrink = first_of(exp(splat(heads.shrinks[g])));
    heads.shrinks[g] = shrink;
    heads.totals[g] = heads.totals[g] * shrink + reduce_add(weight_sums[g]);
    heads.rounded_totals[g] *= shrink;
    heads.value_factors[g] = ValueProduct<T, C>::prepare(scores + g * kMaxChunk, padded_count, heads.rounded_totals[g]);
  }
}

// For some of the head dim, kPairs Pairs from d on, the last one of `last` elements: sums = sums * shrink + sum over
// tokens of weight * value. Asks for the same part of the next rows.
template <class T, class C, int G, int kPairs>
KVPAGER_INLINE void add_tile(const Heads& heads, const Rows<C>& rows, int64_t d, int64_t last) {
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
    const C *row = rows.now.row(i) + d, *second = kBoth ? rows.now.row(i + kTokens - 1) + d : nullptr;
    if (line_begins) {
      prefetch<kPairs * kPair>(rows.next.row(i) + d, rows.soon(i) + d);
      if constexpr (kTokens > 1 && kBoth) prefetch<kPairs * kPair>(rows.next.row(i + 1) + d, rows.soon(i + 1) + d);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPairs; ++c) {
      const auto values = kPairs == 1 && last < kPair
                              ? Product::template load<false, kBoth>(row, second, last)
                              : Product::template load<true, kBoth>(row + c * kPair, second + c * kPair, kPair);
#pragma GCC unroll 4
      for (int g = 0; g < G; ++g) {
        const Vec weight = Product::spread(heads.weights + g * kMaxChunk, i);
        tile[0][g][c] = Product::add(tile[0][g][c], weight, values.first);
        tile[1][g][c] = Product::add(tile[1][g][c], weight, values.second);
      }
    }
  };
  const int64_t whole = rows.count / kTokens * kTokens;
  for (int64_t i = 0; i < whole; i += kTokens) step(i, std::true_type{});
  if (whole < rows.count) step(whole, std::false_type{});
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const Vec factor = splat(heads.shrinks[g]), value_factor = splat(heads.value_factors[g]);
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

template <class T, class C, int G>
void add_rows(const Heads& heads, const Rows<C>& rows, int64_t head_dim) {
  constexpr int kTile = kNumRegisters >= 32 ? (G <= 2 ? 4 : 2) : (G == 1 ? 4 : G == 2 ? 2 : 1);
  int64_t d = 0;
  for (; d + kTile * kPair <= head_dim; d += kTile * kPair) add_tile<T, C, G, kTile>(heads, rows, d, kPair);
  for (; d < head_dim; d += kPair) add_tile<T, C, G, 1>(heads, rows, d, least(kPair, head_dim - d));
}

// Calls run(size, heads) for the query heads of kv head `kv_head`, up to kGroup at once, `size` being how many.
template <class Run>
KVPAGER_INLINE void for_groups(const Heads& all, int64_t kv_head, int64_t group, const Run& run) {
  for (int64_t g = 0; g < group; g += kGroup) {
    const Heads heads = all.from(kv_head * group + g);
    switch (least(kGroup, group - g)) {
      case 4: run(std::integral_constant<int, 4>{}, heads); break;
      case 3: run(std::integral_constant<int, 3>{}, heads); break;
      case 2: run(std::integral_constant<int, 2>{}, heads); break;
      default: run(std::integral_constant<int, 1>{}, heads);
    }
  }
}

// Of `count` tokens from position `begin` on from the query at `position`, in the order of a chunk's rows.
inline void find_distances(int64_t begin, int64_t count, int64_t position, float* woven) {
  float distances[kMaxChunk];
  for (int64_t i = 0; i < count; ++i) distances[i] = static_cast<float>(begin + i - position);
  weave(distances, count, woven);
}

// Weights of one chunk for all heads.
template <class T, class C>
void sweep_keys(const AttentionParams<T, C>& p, const Chunk<C>& chunk, const Chunk<C>& following,
                const float* distances, const Heads& all) {
  const int64_t K = p.pool.num_kv_heads, group = p.num_heads / K;
  alignas(64) float key_scales[kMaxChunk], value_scales[kMaxChunk];
  for (int64_t kv_head = 0; kv_head < K; ++kv_head) {
    const bool last = kv_head + 1 == K;
    if constexpr (is_quantised<C>) {
      const Chunk<C>& next = last ? following : chunk;
      copy_scales(chunk, chunk.key_scales, p.key_scale, kv_head, key_scales);
      copy_scales(chunk, chunk.value_scales, p.value_scale, kv_head, value_scales);
      for (int64_t run = 0; run < next.num_runs; ++run) {
        prefetch_line(next.key_scales[run] + (last ? 0 : kv_head + 1) * p.key_scale.head_stride);
        prefetch_line(next.value_scales[run] + (last ? 0 : kv_head + 1) * p.value_scale.head_stride);
      }
    }
    Rows<C> rows{chunk.count, {chunk.keys, kv_head * p.key_cache.head_stride}, {}};
    rows.next = last ? HeadRows<C>{chunk.values, 0} : HeadRows<C>{chunk.keys, (kv_head + 1) * p.key_cache.head_stride};
    for_groups(all, kv_head, group, [&](auto size, const Heads& heads) {
      dot_rows<T, C, decltype(size)::value>(heads, rows, p.pool.head_dim);
      soften<T, C, decltype(size)::value>(p, heads, chunk.count, distances, key_scales, value_scales);
      rows.next = rows.now;  // asked for already: these are at hand
    });
  }
}

// Sums of one chunk's values for all heads.
template <class T, class C>
void sweep_values(const AttentionParams<T, C>& p, const Chunk<C>& chunk, const Chunk<C>& following, const Heads& all) {
  const int64_t K = p.pool.num_kv_heads, group = p.num_heads / K;
  for (int64_t kv_head = 0; kv_head < K; ++kv_head) {
    Rows<C> rows{chunk.count, {chunk.values, kv_head * p.value_cache.head_stride}, {}};
    rows.next = kv_head + 1 < K       ? HeadRows<C>{chunk.values, (kv_head + 1) * p.value_cache.head_stride}
                : following.count > 0 ? HeadRows<C>{following.keys, 0}
                                      : rows.now;
    for_groups(all, kv_head, group, [&](auto size, const Heads& heads) {
      add_rows<T, C, decltype(size)::value>(heads, rows, p.pool.head_dim);
      rows.next = rows.now;
    });
  }
}

}  // namespace

template <class T, class C>
void attend_piece(const AttentionParams<T, C>& p, const Piece& piece, float* scratch, const Partial& result) {
  using Values = ValueProduct<T, C>;
  const int64_t D = p.pool.head_dim, H = p.num_heads;
  const int64_t padded = (D + kPair - 1) / kPair * kPair;  // all within scratch_floats
  float *queries = scratch, *sums = queries + H * padded, *weights = sums + H * padded,
        *numbers = weights + H * kMaxChunk;
  float *factors = numbers, *rounded_totals = factors + H, *shrinks = rounded_totals + H, *value_factors = shrinks + H;
  for (int64_t head = 0; head < H; ++head) {
    factors[head] = KeyProduct<T, C>::prepare(p.query.at(piece.row, head), D, queries + head * padded);
    result.tops[head] = -INFINITY;
    result.totals[head] = rounded_totals[head] = 0;
  }
  memset(sums, 0, H * padded * sizeof(float));
  const Heads heads{queries, factors, result.tops, result.totals, rounded_totals, sums, weights, shrinks, value_factors,
                    padded,  0};
  const int64_t length = chunk_length(p.pool.block_size);
  Chunk<C> chunks[2];  // the one being attended and the one after it, in turn
  alignas(64) float distances[kMaxChunk] = {};
  find_rows(p, piece.row, piece.begin, piece.end, length, chunks[0]);
  int turn = 0;
  for (int64_t position = piece.begin; position < piece.end; position += length, turn ^= 1) {
    const Chunk<C>&chunk = chunks[turn], &following = chunks[turn ^ 1];
    find_rows(p, piece.row, position + length, piece.end, length, chunks[turn ^ 1]);
    if (p.options.alibi_slopes.data != nullptr)
      find_distances(position, chunk.count, p.seq_lens[piece.row] - 1, distances);
    sweep_keys(p, chunk, following, distances, heads);
    sweep_values(p, chunk, following, heads);
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
  template void attend_piece(const AttentionParams<T, C>&, const Piece&, float*, const Partial&);
KVPAGER_FOR_CACHES(KVPAGER_INSTANTIATE)

}  // namespace kvpager::cpu::decode::KVPAGER_ISA

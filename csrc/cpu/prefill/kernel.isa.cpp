// The prefill kernel: a tile of query rows attends to all positions that it sees, by two packed matrix products a
// chunk.
//
// A row is one query token and one query head of the kv head's group, tokens outermost, so a group shares every load of
// K and V. Chunks of kChunk positions lie at absolute multiples of kChunk. For each the tile packs K, transposed, and V
// in panels of kPanel columns: widened, dequantised, and with zeros in place of positions outside first ... stop - 1,
// which are never read. Then for kRowBlock rows at a time: scores = Q K^T, online softmax, sums = sums * shrink + P V,
// without the columns that none of the rows sees. A row's numbers depend only on its own position and on where chunks
// lie, so a token gets the same bits in any chunk of a prompt, tile or batch. bfloat16 queries over a bfloat16 cache
// multiply in pairs where the set has the instruction: K, Q and V exact, the weights rounded to bfloat16 and divided by
// the sum of the rounded ones; lse is from the exact sum.
// Cost: packing is one transpose per element of K and one copy per element of V for each tile of up to 192 rows.
#include "kernel.h"

#include "../vec/transpose.h"
#include "product.h"

namespace kvpager::cpu::prefill::KVPAGER_ISA {
namespace {

static_assert(kChunk % kPanel == 0 && kRowBlock <= kMaxRowBlock);

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

#if defined(KVPAGER_HAS_BF16_DOT)
constexpr bool kHasPairs = true;
// Two rows of bfloat16 as floats -> words of (even, odd) pairs.
KVPAGER_INLINE Vec pair_rows(Vec even, Vec odd) {
  return (Vec)_mm512_or_si512((__m512i)odd, _mm512_srli_epi32((__m512i)even, 16));
}
// 32 floats, rounded, as 16 words in order.
KVPAGER_INLINE Vec round_pairs(Vec low, Vec high) { return (Vec)_mm512_cvtne2ps_pbh(high, low); }
// sums + both elements of each word.
KVPAGER_INLINE Vec add_pairs(Vec sums, Vec words) {
  return dot_bf16(sums, (Bf16Vec)words, (Bf16Vec)_mm512_set1_epi16(0x3f80));
}
#else
constexpr bool kHasPairs = false;
KVPAGER_INLINE Vec pair_rows(Vec even, Vec) { return even; }  // these are compiled but never called
KVPAGER_INLINE Vec round_pairs(Vec low, Vec) { return low; }
KVPAGER_INLINE Vec add_pairs(Vec sums, Vec) { return sums; }
#endif

template <class T, class C>
class TileWorker {
  static constexpr bool kPairs = kHasPairs && std::is_same_v<T, bfloat16> && std::is_same_v<C, bfloat16>;
  static constexpr int kPer = kPairs ? 2 : 1;  // elements of a word

 public:
  TileWorker(const AttentionParams<T, C>& params, const Tile& work, int64_t head, float* scratch)
      : p(params), tile(work), kv_head(head), D(p.pool.head_dim), members(tile.num_members),
        rows(tile.num_tokens * members), depth(round_up(D, kPer * kWidth) / kPer), width(round_up(D, kWidth)) {
    // Within scratch_floats: depth, width <= D rounded up to 32.
    const auto take = [&](int64_t floats) {
      float* const begin = scratch;
      scratch += round_up(floats, 16);
      return begin;
    };
    query = take(rows * depth);
    sums = take(rows * width);
    keys = take(kChunk * depth);
    values = take(kChunk / kPer * width);
    scores = take(kRowBlock * kChunk);
    weights = kPairs ? take(kRowBlock * kChunk / kPer) : scores;
    tops = take(rows);
    totals = take(rows);
    weight_totals = take(rows);
  }

  void run() {
    start();
    first = p.options.first_visible(tile.first_position);
    stop = tile.first_position + tile.num_tokens;
    for (chunk = first / kChunk * kChunk; chunk < stop; chunk += kChunk) {
      const int64_t end = chunk + kChunk < stop ? kChunk : stop - chunk;
      for (int64_t column = 0; column < end; column += kPanel) pack(column);
      for (int64_t row = 0; row < rows; row += kRowBlock) attend(row, rows - row < kRowBlock ? rows - row : kRowBlock);
    }
    finish();
  }

 private:
  int64_t token_of(int64_t row) const { return tile.first_token + row / members; }
  int64_t head_of(int64_t row) const {
    return kv_head * (p.num_heads / p.pool.num_kv_heads) + tile.first_member + row % members;
  }
  int64_t position_of(int64_t row) const { return tile.first_position + row / members; }

  // Words `word` ... of a row of D elements, zeros past its end.
  template <class E>
  KVPAGER_INLINE Vec words_of(const E* row, int64_t word) const {
    if constexpr (kPairs) {
      if ((word + kWidth) * 2 <= D) return load(reinterpret_cast<const float*>(row + word * 2));
      E padded[2 * kWidth] = {};
      if (word * 2 < D) memcpy(padded, row + word * 2, (D - word * 2) * sizeof(E));
      return load(reinterpret_cast<const float*>(padded));
    } else {
      return word + kWidth <= D ? load(row + word) : load_partial(row + word, D - word);
    }
  }

  void start() {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = head_of(row);                  // < H
      const T* source = p.query.at(token_of(row), head);  // tokens of a tile are < num_tokens
      for (int64_t word = 0; word < depth; word += kWidth) store(query + row * depth + word, words_of(source, word));
      memset(sums + row * width, 0, width * sizeof(float));
      tops[row] = p.options.sink(head);
      totals[row] = weight_totals[row] = tops[row] > -INFINITY ? 1 : 0;  // a sink is a logit without a value
    }
  }

  // Rows of K and V at a position; null outside first ... stop - 1.
  struct CacheRow {
    const C *key = nullptr, *value = nullptr;
    float key_scale = 1, value_scale = 1;
  };

  CacheRow row_at(int64_t position) const {
    CacheRow row;
    if (position < first || position >= stop) return row;
    // In bounds: position < length, so the driver has seen this column and found a block of the pool.
    const int64_t S = p.pool.block_size, block = p.block_tables.at(tile.sequence, position / S), offset = position % S;
    row.key = p.key_cache.at(block, kv_head, offset);
    row.value = p.value_cache.at(block, kv_head, offset);
    if constexpr (is_quantised<C>) {
      row.key_scale = *p.key_scale.at(block, kv_head, offset);
      row.value_scale = *p.value_scale.at(block, kv_head, offset);
    }
    return row;
  }

  KVPAGER_INLINE Vec value_of(const CacheRow& row, int64_t d) const {
    if (row.value == nullptr) return zero();
    const Vec loaded = d + kWidth <= D ? load(row.value + d) : load_partial(row.value + d, D - d);
    return is_quantised<C> ? mul(loaded, splat(row.value_scale)) : loaded;
  }

  // Packs kPanel positions: keys as a panel [depth, kPanel], values as kPanel rows of the panels [kChunk, kPanel] that
  // cover the head dim, the last of which may be one vector wide.
  void pack(int64_t column) {
    CacheRow row[kPanel];
    for (int i = 0; i < kPanel; ++i) row[i] = row_at(chunk + column + i);
    for (int half = 0; half < kPanel; half += kWidth)
      for (int64_t word = 0; word < depth; word += kWidth) {
        Vec square[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) {
          const CacheRow& from = row[half + i];
          square[i] = from.key == nullptr ? zero() : words_of(from.key, word);
          if constexpr (is_quantised<C>) square[i] = mul(square[i], splat(from.key_scale));
        }
        transpose(square);
        float* to = keys + column * depth + word * kPanel + half;
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store(to + i * kPanel, square[i]);
      }
    for (int64_t d = 0; d < width; d += kWidth) {
      const int64_t panel = d / kPanel * kPanel, panel_width = width - panel < kPanel ? kWidth : kPanel;
      float* to = values + panel * (kChunk / kPer) + column / kPer * panel_width + d - panel;
      for (int i = 0; i < kPanel; i += kPer, to += panel_width)
        store(to, kPairs ? pair_rows(value_of(row[i], d), value_of(row[i + kPer - 1], d)) : value_of(row[i], d));
    }
  }

  // One block of rows over the packed chunk.
  void attend(int64_t row, int64_t count) {
    const int64_t last = position_of(row + count - 1), seen_from = p.options.first_visible(position_of(row)) - chunk;
    if (last < chunk || seen_from >= kChunk) return;
    const int64_t from = seen_from > 0 ? seen_from / kPanel * kPanel : 0;  // columns that some row of the block sees
    const int64_t to = last + 1 - chunk < kChunk ? round_up(last + 1 - chunk, kPanel) : kChunk;
    for (int64_t column = from; column < to; column += kPanel)
      multiply<kPairs, false, 2>(count, {query + row * depth, depth}, {keys + column * depth, kPanel}, depth,
                                 {scores + column, kChunk, p.options.scale, nullptr});
    float shrink[kRowBlock];
    for (int64_t i = 0; i < count; ++i) shrink[i] = weigh(row + i, i, from, to);
    const Operand a{weights + from / kPer, kChunk / kPer};
    for (int64_t d = 0; d < width; d += kPanel) {
      const bool wide = width - d >= kPanel;
      const int64_t panel_width = wide ? kPanel : kWidth, steps = (to - from) / kPer;
      const Operand b{values + d * (kChunk / kPer) + from / kPer * panel_width, panel_width};
      const Target c{sums + row * width + d, width, 1, shrink};
      wide ? multiply<kPairs, true, 2>(count, a, b, steps, c) : multiply<kPairs, true, 1>(count, a, b, steps, c);
    }
  }

  // Scores from ... to - 1 of a row -> weights, 0 where it sees nothing; returns what its sums shrink by.
  float weigh(int64_t row, int64_t index, int64_t from, int64_t to) {
    float* score = scores + index * kChunk;
    if (p.options.softcap > 0)
      for (int64_t i = from; i < to; i += kWidth)
        store(score + i, mul(tanh(div(load(score + i), splat(p.options.softcap))), splat(p.options.softcap)));
    const int64_t position = position_of(row), seen_from = p.options.first_visible(position) - chunk;
    if (p.options.alibi_slopes.data != nullptr) {
      const Vec slope = splat(p.options.alibi_slopes[head_of(row)]);
      float distances[kWidth];  // exact below 2^24, as the steps are
      for (int lane = 0; lane < kWidth; ++lane) distances[lane] = static_cast<float>(chunk + from + lane - position);
      Vec distance = load(distances);
      for (int64_t i = from; i < to; i += kWidth, distance = add(distance, splat(kWidth)))
        store(score + i, fma(distance, slope, load(score + i)));
    }
    for (int64_t i = from; i < seen_from && i < to; ++i) score[i] = -INFINITY;
    for (int64_t i = position + 1 > chunk + from ? position + 1 - chunk : from; i < to; ++i) score[i] = -INFINITY;
    Vec highest = splat(tops[row]);
    for (int64_t i = from; i < to; i += kWidth) highest = maximum(load(score + i), highest);
    const float top = reduce_max(highest);
    const float base = top == -INFINITY ? 0 : top;  // nothing seen so far: every weight is exp(-inf) = 0
    Vec exact = zero(), rounded = zero();
    for (int64_t i = from; i < to; i += kPer * kWidth) {
      const Vec low = exp(sub(load(score + i), splat(base)));
      exact = add(exact, low);
      if constexpr (kPairs) {
        const Vec high = exp(sub(load(score + i + kWidth), splat(base)));
        exact = add(exact, high);
        const Vec words = round_pairs(low, high);
        rounded = add_pairs(rounded, words);
        store(weights + (index * kChunk + i) / kPer, words);
      } else {
        store(score + i, low);
      }
    }
    const float shrink = first_of(exp(splat(tops[row] - base)));  // exp(-inf) = 0 for the first chunk
    tops[row] = top;
    totals[row] = totals[row] * shrink + reduce_add(exact);
    weight_totals[row] = kPairs ? weight_totals[row] * shrink + reduce_add(rounded) : totals[row];
    return shrink;
  }

  void finish() {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t token = token_of(row), head = head_of(row);
      T* out = p.out.at(token, head);
      for (int64_t d = 0; d < D; d += kWidth) {
        const Vec result = div(load(sums + row * width + d), splat(weight_totals[row]));
        d + kWidth <= D ? store_narrow(out + d, result) : store_narrow_partial(out + d, result, D - d);
      }
      if (p.lse.data) p.lse.at(token, head) = tops[row] + __builtin_logf(totals[row]);
    }
  }

  const AttentionParams<T, C>& p;
  const Tile& tile;
  const int64_t kv_head, D, members, rows;
  const int64_t depth, width;  // words of a row of Q or K; floats of a row of V or of sums
  float *query, *sums, *keys, *values, *scores, *weights, *tops, *totals, *weight_totals;
  int64_t first, stop, chunk;  // positions the tile sees; first position of the packed chunk
};

}  // namespace

template <class T, class C>
void attend_tile(const AttentionParams<T, C>& params, const Tile& tile, int64_t kv_head, float* scratch) {
  TileWorker<T, C>(params, tile, kv_head, scratch).run();
}

#define KVPAGER_INSTANTIATE(T, C) template void attend_tile(const AttentionParams<T, C>&, const Tile&, int64_t, float*);
KVPAGER_FOR_CACHES(KVPAGER_INSTANTIATE)

}  // namespace kvpager::cpu::prefill::KVPAGER_ISA

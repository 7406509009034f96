// Attention in float64 on the CPU, for decode and prefill alike: the online softmax over chunks of positions, plainly.
//
// The work is cut into tiles of up to kTileTokens query tokens of one sequence and one kv head. A tile reads each chunk
// of K and V once and uses it for all its query tokens and all query heads of the group. Chunks start at multiples of
// kChunk, and a query's sums depend on its own position only, so a token's result is bit for bit the same whether it is
// computed alone, in a chunk of a prompt, or in any batch.
// Cost: O(query tokens * positions seen * H * D) arithmetic, 2 * kTileTokens * group * D numbers of scratch per thread.
#pragma once
#include <vector>

#include "values.h"

namespace kvpager::cpu::plain {

constexpr int64_t kChunk = 64;
constexpr int64_t kTileTokens = 16;
constexpr int64_t kLanes = 16;  // independent partial sums of a dot product, for the compiler to vectorise

struct Tile {
  int64_t sequence, first_token, num_tokens, first_position;  // the token at first_token stands at first_position
};

// The query tokens that see something, in tiles. The params are checked.
inline std::vector<Tile> tiles_of(const AttentionParams<double>& p) {
  const bool decode = p.query_start_loc.data == nullptr;
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t length = p.seq_lens[row], start = decode ? row : p.query_start_loc[row];
    const int64_t query_len = decode ? 1 : p.query_start_loc[row + 1] - start;
    for (int64_t token = 0; length > 0 && token < query_len; token += kTileTokens)
      tiles.push_back({row, start + token, std::min(kTileTokens, query_len - token), length - query_len + token});
  }
  return tiles;
}

inline double dot(const double* a, const double* b, int64_t n) {
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += a[i] * b[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// One thread's working memory. Row r of a tile is query token r / group, query head r % group of the kv head.
class TileWorker {
 public:
  explicit TileWorker(const AttentionParams<double>& params)
      : p(params), D(params.pool.head_dim), group(params.num_heads / params.pool.num_kv_heads),
        query(kTileTokens * group * D), acc(kTileTokens * group * D), top(kTileTokens * group),
        total(kTileTokens * group) {}

  void run(const Tile& tile, int64_t kv_head) {
    start(tile, kv_head);
    const int64_t first = p.options.first_visible(tile.first_position), stop = tile.first_position + tile.num_tokens;
    for (int64_t chunk = first / kChunk * kChunk; chunk < stop; chunk += kChunk) {
      const int64_t begin = std::max(chunk, first), end = std::min(chunk + kChunk, stop);
      load(tile.sequence, kv_head, begin, end);
      for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
        const ScorePlace place{kv_head * group + row % group, tile.first_position + row / group, begin};
        const int64_t from = std::max(begin, p.options.first_visible(place.position));
        const int64_t to = std::min(end, place.position + 1);
        if (from < to) attend(row, place, from - begin, to - begin);
      }
    }
    finish(tile, kv_head);
  }

 private:
  void start(const Tile& tile, int64_t kv_head) {
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
      const int64_t head = kv_head * group + row % group;                       // < H
      const double* source = p.query.at(tile.first_token + row / group, head);  // tokens of a tile are < num_tokens
      for (int64_t d = 0; d < D; ++d) query[row * D + d] = source[d] * p.options.scale;
      std::fill_n(&acc[row * D], D, 0.0);
      top[row] = p.options.sink(head);
      total[row] = top[row] > -INFINITY ? 1 : 0;  // a sink is a logit without a value
    }
  }

  // Points key_row and value_row at the rows of positions begin ... end - 1.
  void load(int64_t sequence, int64_t kv_head, int64_t begin, int64_t end) {
    const int64_t S = p.pool.block_size;
    for (int64_t position = begin; position < end; ++position) {
      // In bounds: position < length, so check_sequence has seen this column and found a block of the pool.
      const int64_t block = p.block_tables.at(sequence, position / S);
      key_row[position - begin] = p.key_cache.at(block, kv_head, position % S);  // position - begin < kChunk
      value_row[position - begin] = p.value_cache.at(block, kv_head, position % S);
    }
  }

  // Online softmax: a chunk with a larger logit rescales what was summed before. `first` names the score of key_row[0].
  void attend(int64_t row, const ScorePlace& first, int64_t from, int64_t to) {
    double scores[kChunk], new_top = top[row];
    for (int64_t i = from; i < to; ++i) {
      const ScorePlace place{first.head, first.position, first.key_position + i};
      scores[i] = p.options.logit(dot(&query[row * D], key_row[i], D), place);
      new_top = std::max(new_top, scores[i]);
    }
    if (new_top == -INFINITY) return;  // every score overflowed to -inf: nothing to add, and -inf - -inf would be NaN
    double* sum = &acc[row * D];
    const double shrink = std::exp(top[row] - new_top);  // exp(-inf) = 0 for the first chunk
    for (int64_t d = 0; d < D; ++d) sum[d] *= shrink;
    double weights = total[row] * shrink;
    for (int64_t i = from; i < to; ++i) {
      const double weight = std::exp(scores[i] - new_top);
      const double* value = value_row[i];
      for (int64_t d = 0; d < D; ++d) sum[d] += weight * value[d];
      weights += weight;
    }
    top[row] = new_top;
    total[row] = weights;
  }

  void finish(const Tile& tile, int64_t kv_head) {
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
      const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
      double* out = p.out.at(token, head);
      for (int64_t d = 0; d < D; ++d) out[d] = acc[row * D + d] / total[row];
      if (p.lse.data) p.lse.at(token, head) = top[row] + std::log(total[row]);
    }
  }

  const AttentionParams<double>& p;
  const int64_t D, group;
  std::vector<double> query, acc, top, total;
  const double *key_row[kChunk], *value_row[kChunk];
};

// Attends with all queries of checked params. `parallel_for(begin, end, grain, body)` spreads the work over threads.
template <class F>
void attend(const AttentionParams<double>& p, const F& parallel_for) {
  const std::vector<Tile> tiles = tiles_of(p);
  int64_t written = 0;  // tiles lie in token order; what lies between them sees nothing
  for (const Tile& tile : tiles) {
    write_empty(p, written, tile.first_token);
    written = tile.first_token + tile.num_tokens;
  }
  write_empty(p, written, p.num_tokens);
  const int64_t K = p.pool.num_kv_heads;
  parallel_for(0, static_cast<int64_t>(tiles.size()) * K, 1, [&](int64_t begin, int64_t end) {
    TileWorker worker(p);
    for (int64_t item = begin; item < end; ++item) worker.run(tiles[item / K], item % K);
  });
}

}  // namespace kvpager::cpu::plain

// Paged attention on the CPU, plain: the online softmax over chunks of positions, for decode and prefill alike.
//
// Work is cut into tiles of up to kTileTokens query tokens of one sequence and one kv head, spread over threads. A tile
// reads each chunk of K and V once and uses it for all its query tokens and all query heads of the group. Chunks start
// at multiples of kChunk, and a query's sums depend on its own position only, so a token's result is bit for bit the
// same whether it is computed alone, in a chunk of a prompt, or in any batch.
// Cost: O(query tokens * positions seen * H * D) arithmetic, (2 * kTileTokens * group + 2 * kChunk) * D numbers of
// scratch per thread.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "sequences.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kChunk = 64;
constexpr int64_t kTileTokens = 16;
constexpr int64_t kLanes = 16;  // independent partial sums of a dot product, for the compiler to vectorise

struct Tile {
  int64_t sequence, first_token, num_tokens, first_position;  // the token at first_token stands at first_position
};

template <class T>
int64_t check_query_len(const AttentionParams<T>& p, int64_t row) {
  const int64_t query_len = int64_t{p.query_start_loc[row + 1]} - p.query_start_loc[row];
  if (query_len < 0 || query_len > p.max_query_len)
    fail_argument("query_start_loc", "steps of 0 to " + std::to_string(p.max_query_len) + " (`max_query_len`)",
                  std::to_string(query_len) + " at row " + std::to_string(row));
  if (p.seq_lens[row] >= 0 && query_len > p.seq_lens[row])  // a negative length is check_sequence's to refuse
    fail_argument("query_start_loc", "no more query tokens than the sequence is long",
                  std::to_string(query_len) + " queries for length " + std::to_string(p.seq_lens[row]) + " at row " +
                      std::to_string(row));
  return query_len;
}

// Checks every value and cuts the queries into tiles. Tokens of no tile (length 0, padding rows) see nothing.
template <class T>
std::vector<Tile> checked_tiles(const AttentionParams<T>& p) {
  const bool decode = p.query_start_loc.data == nullptr;
  std::vector<Tile> tiles;
  if (!decode && p.query_start_loc[0] != 0)
    fail_argument("query_start_loc", "0 as first entry", std::to_string(p.query_start_loc[0]));
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t length = p.seq_lens[row];
    const int64_t query_len = decode ? 1 : check_query_len(p, row);
    check_sequence(p, row, length, query_len);
    if (length == 0) continue;
    const int64_t start = decode ? row : p.query_start_loc[row];
    for (int64_t token = 0; token < query_len; token += kTileTokens)
      tiles.push_back({row, start + token, std::min(kTileTokens, query_len - token), length - query_len + token});
  }
  // The starts rise, so a last one within the query bounds them all.
  if (!decode && p.query_start_loc[p.num_sequences] > p.num_tokens)
    fail_argument("query_start_loc", "a last entry of at most " + std::to_string(p.num_tokens) + " (query rows)",
                  std::to_string(p.query_start_loc[p.num_sequences]));
  return tiles;
}

template <class A>
A dot(const A* a, const A* b, int64_t n) {
  A lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (int64_t lane = 0; i < n; ++i, ++lane) lanes[lane] += a[i] * b[i];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// One thread's working memory. Row r of a tile is query token r / group, query head r % group of the kv head.
template <class T>
class TileWorker {
  using A = accumulate_t<T>;

 public:
  explicit TileWorker(const AttentionParams<T>& params)
      : p(params), D(params.pool.head_dim), group(params.num_heads / params.pool.num_kv_heads),
        query(kTileTokens * group * D), acc(kTileTokens * group * D), top(kTileTokens * group),
        total(kTileTokens * group), converted(std::is_same_v<T, A> ? 0 : 2 * kChunk * D) {}

  void run(const Tile& tile, int64_t kv_head) {
    start(tile, kv_head);
    const int64_t first = p.first_visible(tile.first_position), stop = tile.first_position + tile.num_tokens;
    for (int64_t chunk = first / kChunk * kChunk; chunk < stop; chunk += kChunk) {
      const int64_t begin = std::max(chunk, first), end = std::min(chunk + kChunk, stop);
      load(tile.sequence, kv_head, begin, end);
      for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
        const int64_t position = tile.first_position + row / group;
        const int64_t from = std::max(begin, p.first_visible(position)), to = std::min(end, position + 1);
        if (from < to) attend(row, from - begin, to - begin);
      }
    }
    finish(tile, kv_head);
  }

 private:
  void start(const Tile& tile, int64_t kv_head) {
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
      const int64_t head = kv_head * group + row % group;                  // < H
      const T* source = p.query.at(tile.first_token + row / group, head);  // tokens of a tile are < num_tokens
      for (int64_t d = 0; d < D; ++d) query[row * D + d] = widen(source[d]) * p.scale;
      std::fill_n(&acc[row * D], D, A(0));
      const bool sink = p.sinks.data != nullptr && p.sinks[head] > -INFINITY;
      top[row] = sink ? p.sinks[head] : A(-INFINITY);
      total[row] = sink ? 1 : 0;  // a sink is a logit without a value
    }
  }

  // Points key_row and value_row at the rows of positions begin ... end - 1, converted if need be.
  void load(int64_t sequence, int64_t kv_head, int64_t begin, int64_t end) {
    const int64_t S = p.pool.block_size;
    for (int64_t position = begin; position < end; ++position) {
      // In bounds: position < length, so check_sequence has seen this column and found a block of the pool.
      const int64_t block = p.block_tables.at(sequence, position / S);
      const T* key = p.key_cache.at(block, kv_head, position % S);
      const T* value = p.value_cache.at(block, kv_head, position % S);
      const int64_t row = position - begin;  // < kChunk
      if constexpr (std::is_same_v<T, A>) {
        key_row[row] = key;
        value_row[row] = value;
      } else {
        A *wide_key = &converted[row * D], *wide_value = &converted[(kChunk + row) * D];
        for (int64_t d = 0; d < D; ++d) wide_key[d] = widen(key[d]);
        for (int64_t d = 0; d < D; ++d) wide_value[d] = widen(value[d]);
        key_row[row] = wide_key;
        value_row[row] = wide_value;
      }
    }
  }

  // Online softmax: a chunk with a larger logit rescales what was summed before.
  void attend(int64_t row, int64_t from, int64_t to) {
    A scores[kChunk], new_top = top[row];
    for (int64_t i = from; i < to; ++i) {
      scores[i] = dot(&query[row * D], key_row[i], D);
      if (p.softcap > 0) scores[i] = p.softcap * std::tanh(scores[i] / p.softcap);
      new_top = std::max(new_top, scores[i]);
    }
    if (new_top == -INFINITY) return;  // every score overflowed to -inf: nothing to add, and -inf - -inf would be NaN
    A* sum = &acc[row * D];
    const A shrink = std::exp(top[row] - new_top);  // exp(-inf) = 0 for the first chunk
    for (int64_t d = 0; d < D; ++d) sum[d] *= shrink;
    A weights = total[row] * shrink;
    for (int64_t i = from; i < to; ++i) {
      const A weight = std::exp(scores[i] - new_top);
      const A* value = value_row[i];
      for (int64_t d = 0; d < D; ++d) sum[d] += weight * value[d];
      weights += weight;
    }
    top[row] = new_top;
    total[row] = weights;
  }

  void finish(const Tile& tile, int64_t kv_head) {
    for (int64_t row = 0; row < tile.num_tokens * group; ++row) {
      const int64_t token = tile.first_token + row / group, head = kv_head * group + row % group;
      T* out = p.out.at(token, head);
      for (int64_t d = 0; d < D; ++d) out[d] = narrow<T>(acc[row * D + d] / total[row]);
      if (p.lse.data) p.lse.at(token, head) = top[row] + std::log(total[row]);
    }
  }

  const AttentionParams<T>& p;
  const int64_t D, group;
  std::vector<A> query, acc, top, total, converted;
  const A *key_row[kChunk], *value_row[kChunk];
};

}  // namespace

template <class T>
void attention(const AttentionParams<T>& p) {
  const std::vector<Tile> tiles = checked_tiles(p);
  int64_t written = 0;  // tiles lie in token order; what lies between them sees nothing
  for (const Tile& tile : tiles) {
    write_empty(p, written, tile.first_token);
    written = tile.first_token + tile.num_tokens;
  }
  write_empty(p, written, p.num_tokens);
  const int64_t K = p.pool.num_kv_heads;
  torch::stable::parallel_for(0, static_cast<int64_t>(tiles.size()) * K, 1, [&](int64_t begin, int64_t end) {
    TileWorker<T> worker(p);
    for (int64_t item = begin; item < end; ++item) worker.run(tiles[item / K], item % K);
  });
}

template void attention(const AttentionParams<float>&);
template void attention(const AttentionParams<double>&);
template void attention(const AttentionParams<float16>&);
template void attention(const AttentionParams<bfloat16>&);

}  // namespace kvpager::cpu

// The CPU op `paged_prefill`: checks, cuts the queries into tiles and lets the threads take them, costliest first.
//
// A tile is up to kTileRows rows (query tokens times the heads of a group) of one sequence, attended once for each kv
// head. Threads take (tile, kv head) pairs from one line ordered by what they cost, so a causal prompt, a chunk on a
// long prefix and a mixed batch all end within one small tile of each other. Small calls are cut finer, down to a block
// of rows, so that every thread has some. How tiles are cut does not influence the result (see kernel.isa.cpp).
// Cost: O(query tokens * positions seen * H * D) arithmetic, O(B + tiles) for the cuts.
#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "../../attention/checks.h"
#include "../attention/plain.h"
#include "../attention/values.h"
#include "kernel.h"

namespace kvpager::cpu::prefill {
namespace {

constexpr int64_t kTileRows = 192;       // with one chunk of K and V, what fits the second-level cache
constexpr int64_t kTilesPerThread = 4;   // enough that the last ones even out
constexpr int64_t kSmallWork = 1 << 18;  // multiply-adds: below this, waking a thread costs more than it brings

// Pairs of a query token and a position that it may see, at most.
template <class T, class C>
int64_t pairs_of(const AttentionParams<T, C>& p) {
  int64_t pairs = 0;
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t query_len = p.query_start_loc[row + 1] - p.query_start_loc[row], length = p.seq_lens[row];
    pairs += query_len * (length - p.options.first_visible(length - query_len));
  }
  return pairs;
}

// Tiles of up to `max_rows` rows: whole groups of a few tokens or, where a group has more rows, parts of one.
template <class T, class C>
std::vector<Tile> tiles_of(const AttentionParams<T, C>& p, int64_t max_rows) {
  const int64_t group = p.num_heads / p.pool.num_kv_heads;
  const int64_t members = std::min(group, max_rows), tokens = max_rows / members;
  std::vector<Tile> tiles;
  for (int64_t row = 0; row < p.num_sequences; ++row) {
    const int64_t start = p.query_start_loc[row], query_len = p.query_start_loc[row + 1] - start;
    for (int64_t token = 0; token < query_len; token += tokens)
      for (int64_t member = 0; member < group; member += members)
        tiles.push_back({row, start + token, std::min(tokens, query_len - token), p.seq_lens[row] - query_len + token,
                         member, std::min(members, group - member)});
  }
  return tiles;
}

template <class T, class C>
int64_t cost_of(const AttentionParams<T, C>& p, const Tile& tile) {
  return tile.num_tokens * tile.num_members *
         (tile.first_position + tile.num_tokens - p.options.first_visible(tile.first_position));
}

struct AlignedDelete {
  void operator()(float* room) const { operator delete[](room, std::align_val_t{64}); }
};

// Room that a thread keeps from call to call: fresh pages would cost a small call more than its arithmetic.
float* thread_room(int64_t floats) {
  thread_local std::unique_ptr<float[], AlignedDelete> room;
  thread_local int64_t size = 0;
  if (size < floats) {
    room.reset(new (std::align_val_t{64}) float[floats]);
    size = floats;
  }
  return room.get();
}

template <class T, class C>
void attend_in_tiles(const AttentionParams<T, C>& p) {
  const int64_t K = p.pool.num_kv_heads, D = p.pool.head_dim;
  const int64_t work = pairs_of(p) * p.num_heads * D * 2;
  const int64_t threads = work < kSmallWork ? 1 : static_cast<int64_t>(torch::stable::get_num_threads());
  int64_t max_rows = kTileRows;
  std::vector<Tile> tiles = tiles_of(p, max_rows);
  while (threads > 1 && max_rows > kMaxRowBlock && static_cast<int64_t>(tiles.size()) * K < threads * kTilesPerThread)
    tiles = tiles_of(p, max_rows /= 2);
  // Length 0, and rows past the last sequence. A sequence of length 0 has no queries.
  write_empty(p, p.query_start_loc[p.num_sequences], p.num_tokens);
  if (tiles.empty()) return;
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const Tile& a, const Tile& b) { return cost_of(p, a) > cost_of(p, b); });

  const auto attend = KVPAGER_ACTIVE(attend_tile<T, C>);
  const int64_t num_items = static_cast<int64_t>(tiles.size()) * K;
  const int64_t floats = scratch_floats(max_rows, D);
  std::atomic<int64_t> next_item{0};
  const auto take_items = [&](int64_t, int64_t) {
    float* scratch = thread_room(floats);
    for (int64_t item; (item = next_item.fetch_add(1, std::memory_order_relaxed)) < num_items;)
      attend(p, tiles[item / K], item % K, scratch);
  };
  const int64_t workers = std::min(threads, num_items);
  if (workers == 1)
    take_items(0, 1);
  else
    torch::stable::parallel_for(0, workers, 1, take_items);
}

void attend(const AttentionArguments& arguments) {
  with_cache_types("query", arguments.query, arguments.key_cache, [&](auto number, auto code) {
    const auto params = attention_params<decltype(number), decltype(code)>(arguments);
    check_fixed_scales(params);
    check_queries(params);
    if constexpr (std::is_same_v<decltype(number), double>) {
      plain::attend(params, [](auto... work) { torch::stable::parallel_for(work...); });
    } else {
      attend_in_tiles(params);
    }
  });
}

}  // namespace
}  // namespace kvpager::cpu::prefill

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("paged_prefill", TORCH_BOX((&kvpager::paged_prefill<&kvpager::cpu::prefill::attend>)));
}

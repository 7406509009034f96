// One warp's work on a piece: it loads its tiles, turns products into logits (the options of attention) and adds up.
#pragma once
#include "merge.cuh"

namespace kvpager::cuda::decode {

template <class T, class C>
struct DecodeParams {
  AttentionParams<T, C> attention;
  Addresses key, value, key_scale, value_scale;
  Divisor block_size;
  LogitFactors logits;
  int longest;  // length that the tables and `max_seq_len` allow
  SplitPlan plan;
  Workspace workspace;
  unsigned* errors;
};

// One piece's K and V for the block's kv head, seen by one lane.
template <class Shape>
struct PieceReader {
  using C = typename Shape::C;
  const DecodeParams<typename Shape::T, C>& params;
  const int row, begin, end, lane, kv_head;
  uint32_t block = 0, slot = 0;  // of the lane's own token, lane % kTokens, of the next tile
  bool bad = false;

  __device__ PieceReader(const DecodeParams<typename Shape::T, C>& params, int row, int begin, int end, int lane)
      : params(params), row(row), begin(begin), end(end), lane(lane), kv_head(head_tile(params.attention).kv_head) {}

  // Looks the own token up. Tokens outside the piece are replaced by its first or last, so that what is loaded is
  // there.
  // In bounds: begin <= position < end <= length <= max_blocks * S, so the column is below max_blocks.
  __device__ void look_up(int tile) {
    const int token = tile + lane % Shape::kTokens, position = larger(begin, smaller(token, end - 1));
    const uint32_t column = params.block_size.quotient(position);
    block = params.attention.block_tables.at(row, column);
    slot = position - column * params.block_size.divisor;
  }

  // Called before the tile is loaded: a block outside the pool is replaced by block 0, which there is.
  __device__ void check_block() {
    if (block < static_cast<uint32_t>(params.attention.pool.num_blocks)) return;
    bad = true;
    block = 0;
  }

  // 16 * share bytes into the row of token `token` of the tile.
  // In bounds: block < N, kv_head < K and slot < S in every lane; no offset is 2^32 units or more (paged_attention.cu).
  __device__ const char* row_of(const Addresses& cache, uint32_t own_offset, int token, int share) const {
    return cache.data + uint64_t{__shfl_sync(kAllLanes, own_offset, token) + share} * 16;
  }

  // Of the lane's own token.
  __device__ float scale_of(const Addresses& scales) const {
    return reinterpret_cast<const float*>(scales.data)[scales.offset(block, kv_head, slot)];
  }

  __device__ void load_keys(Tile<Shape>& tile) const {
    const uint32_t own = params.key.offset(block, kv_head, slot);
#pragma unroll
    for (int i = 0; i < 2 * Shape::kSubtiles; ++i)
      Shape::KeyShare::load(tile.key[i], row_of(params.key, own, 8 * i + lane / 4, lane % 4), lane % 4);
    if constexpr (is_quantised<C>) {
      tile.key_scale = scale_of(params.key_scale);
      tile.value_scale = scale_of(params.value_scale);
    }
  }

  __device__ void load_values(Tile<Shape>& tile) const {
    const uint32_t own = params.value.offset(block, kv_head, slot);
#pragma unroll
    for (int i = 0; i < 4 * Shape::kSubtiles; ++i)
      Shape::ValueShare::load(tile.value[i], row_of(params.value, own, Shape::token(i, lane), lane / 4), lane / 4);
  }
};

// Products to logits; -inf for tokens outside begin ... end - 1 of the tile.
template <class Shape>
__device__ __forceinline__ void finish_scores(Scores<Shape>& scores, float factor, float own_scale, float cap,
                                              int begin, int end, int lane) {
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i) {
    scores[i] *= factor;
    if constexpr (is_quantised<typename Shape::C>)
      scores[i] *= __shfl_sync(kAllLanes, own_scale, Shape::token(i, lane));
  }
  if (cap > 0)
#pragma unroll
    for (int i = 0; i < 4 * Shape::kSubtiles; ++i)
      scores[i] = cap * (1 - 2 * reciprocal_fast(exp2_fast(scores[i]) + 1));  // tanh
  if (begin > 0 || end < Shape::kTokens)
#pragma unroll
    for (int i = 0; i < 4 * Shape::kSubtiles; ++i)
      if (const int token = Shape::token(i, lane); token < begin || token >= end) scores[i] = -INFINITY;
}

// Adds ALiBi to logits, for a tile that begins at position `first` of `row`. What it needs is read anew for each tile:
// kept, it would take registers from calls without slopes. In bounds: row < num_sequences, head + r < H.
template <class Shape, class P>
__device__ __forceinline__ void add_alibi(Scores<Shape>& scores, const P& p, int row, int first, int lane) {
  const HeadTile tile = head_tile(p);
  const int r = lane / 4;
  const float slope = kLog2E * p.options.alibi_slopes[tile.head + (r < tile.heads ? r : 0)];
  const float distance = static_cast<float>(first + Shape::token(0, lane) - (p.seq_lens[row] - 1));
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i)
    scores[i] += slope * (distance + static_cast<float>(Shape::token(i, lane) - Shape::token(0, lane)));
}

// The tiles of a piece that fall to one warp. False if a table entry was no block.
template <class Shape>
__device__ __forceinline__ bool attend_piece(const DecodeParams<typename Shape::T, typename Shape::C>& params,
                                             const Piece& piece, QueryTile<Shape>& queries, WarpSums<Shape>& sums,
                                             int warp, int lane) {
  constexpr int kTokens = Shape::kTokens, kStep = kDecodeWarps * kTokens;
  // Read from one lane, so that the compiler knows that all go the same way.
  const int begin = __shfl_sync(kAllLanes, piece.begin, 0), end = __shfl_sync(kAllLanes, piece.end, 0);
  PieceReader<Shape> reader(params, piece.row, begin, end, lane);
  Tile<Shape> tile;
  sums.clear();
  int first = begin / kTokens * kTokens + warp * kTokens;  // of the tile
  reader.look_up(first);
  const float factor = params.logits.factor * queries.load(params.attention, piece.row, warp, lane);
  __syncthreads();
  if (first >= end) return true;
  reader.check_block();
  reader.load_keys(tile);
  reader.load_values(tile);
  reader.look_up(first + kStep);
  // Past the piece's end its last row is loaded again: that costs less than a branch around the loads.
  for (; first < end; first += kStep) {
    const float key_scale = tile.key_scale, value_scale = tile.value_scale;
    Scores<Shape> scores;
    score_tile<Shape>(scores, tile, queries, lane);
    reader.check_block();
    reader.load_keys(tile);
    finish_scores<Shape>(scores, factor, key_scale, params.logits.cap, begin - first, end - first, lane);
    if (params.attention.options.alibi_slopes.data != nullptr)
      add_alibi<Shape>(scores, params.attention, piece.row, first, lane);
    weigh<Shape>(sums, scores, value_scale, lane);
    if (first < begin || first + kTokens > end) hide_values<Shape>(tile, begin - first, end - first, lane);
    add_values<Shape>(sums, tile, scores);
    reader.load_values(tile);
    reader.look_up(first + 2 * kStep);
  }
  return !reader.bad;
}

}  // namespace kvpager::cuda::decode

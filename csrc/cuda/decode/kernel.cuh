// Decode attention on tensor cores: one query token a sequence, K and V read once for up to 8 query heads of a kv head.
//
// A block takes one part of the split plan (cuts.cuh) for one tile of query heads: consecutive tokens of one or more
// rows. Its warps take the tiles of a piece in turns (tile.cuh). The sums of the warps meet in shared memory, and the
// pieces of a row that was cut meet in the workspace (merge.cuh). All blocks are resident at once: 3 on a
// multiprocessor, 2 if D is more than 128.
//
// One step of a warp asks for the rows of the next step as soon as registers are free:
//   scores of K | ask for the next K | softmax | add weighted V | ask for the next V | look up the block after that
//
// Budgets, for D = 128 on sm_90 (the tools read the lines below): a tile is 8 KB of K and V in 16 loads of 16 bytes a
// lane, so 12 warps have up to 96 KB under way on a multiprocessor, where 26 KB (bfloat16) of latency must be covered.
// The loop is 38 instructions for a KB of K and V in bfloat16, 81 in fp8 and 106 in int8, all branches counted (a new
// largest logit, the cap, the ends of a piece), of 248 that a multiprocessor can issue while memory brings a KB.
// budget: kernel=decode_kernel registers=168 shared=18720 spills=0 threads=128 loads16=4 mma=18
// budget: kernel=decode_kernel<bfloat16,bfloat16,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=24
// budget: kernel=decode_kernel<float16,float16,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=24
// budget: kernel=decode_kernel<bfloat16,fp8_e4m3,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e4m3,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,int8_code,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,int8_code,128 registers=168 shared=18720 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,bfloat16,256 registers=255 shared=37152 spills=0 threads=128 loads16=32 mma=48
// budget: kernel=decode_kernel<float16,float16,256 registers=255 shared=37152 spills=0 threads=128 loads16=32 mma=48
// budget: kernel=decode_kernel<bfloat16,fp8_e4m3,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,fp8_e4m3,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<bfloat16,int8_code,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
// budget: kernel=decode_kernel<float16,int8_code,256 registers=255 shared=37152 spills=0 threads=128 loads16=16 mma=48
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
    weigh<Shape>(sums, scores, value_scale, lane);
    if (first < begin || first + kTokens > end) hide_values<Shape>(tile, begin - first, end - first, lane);
    add_values<Shape>(sums, tile, scores);
    reader.load_values(tile);
    reader.look_up(first + 2 * kStep);
  }
  return !reader.bad;
}

// The next piece of the block's part from `at` on; false if there is none. Rows without tokens are done on the way.
template <int D, class Params>
__device__ __forceinline__ bool next_piece(const Params& params, Cut at, Piece& piece) {
  const auto& p = params.attention;
  const SplitPlan& plan = params.plan;
  const Cut to = plan.cut(blockIdx.y + 1);
  for (; at.row <= to.row && at.row < p.num_sequences; at = {at.row + 1, 0}) {
    const int length = p.seq_lens[at.row];
    if (length < 0 || length > params.longest) {
      if (fresh_thread_index() == 0) report(params.errors, kSeqLens);
      continue;
    }
    if (length == 0) {  // written by the part that holds the row's start
      if (at.position == 0 && (at.row < to.row || to.position > 0)) write_nothing_seen(p, at.row, D);
      continue;
    }
    const int first = static_cast<int>(p.options.first_visible(length - 1)), begin = larger(first, at.position);
    int end = at.row == to.row ? smaller(length, to.position) : length;
    if (begin >= end) continue;
    if (const int split = plan.fixed_split; split > 0) end = smaller(end - begin, split - begin % split) + begin;
    piece = {at.row, first, length, begin, end};
    return true;
  }
  return false;
}

// grid (K * head tiles of a kv head, parts), block kDecodeThreads
template <class T, class C, int D>
__global__ void __launch_bounds__(kDecodeThreads, decode_blocks(D)) decode_kernel(DecodeParams<T, C> params) {
  using Shape = DecodeShape<T, C, D>;
  using Sums = BlockSums<D>;
  using Heads = QueryTile<Shape>;
  KVPAGER_SHARED(Sums, shared);
  KVPAGER_SHARED(Heads, queries);
  const AttentionParams<T, C>& p = params.attention;
  const SplitPlan& plan = params.plan;
  if (!plan_is_valid(plan, p.num_sequences, params.errors) || !scales_are_valid(p, params.errors)) return;
  Cut at = plan.cut(blockIdx.y);
  for (Piece piece; next_piece<D>(params, at, piece);) {
    if (fresh_thread_index() == 0) shared.piece = piece;
    WarpSums<Shape> sums;
    const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const bool good = attend_piece<Shape>(params, piece, queries, sums, warp, lane);
    shared.put(sums, warp, lane);
    at = finish_piece<D>(p, plan, params.workspace, shared, !good, params.errors);
  }
}

}  // namespace kvpager::cuda::decode

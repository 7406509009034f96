// Prefill attention on tensor cores: prompts, chunks on a prefix, drafts to verify; causal, aligned at the end.
//
// A row is one query token and one query head of a kv head's group, tokens outermost, so that a group shares K and V.
// A block of four warps has 64 rows of one sequence and kv head (16 a warp), or, where the rows of a sequence are few,
// 16 rows that its warps share, each with a quarter of the positions. It walks over tiles of positions that its rows
// see: the next tile is on its way (cp.async) while the tensor cores work on this one: S = Q K^T, online softmax in
// base 2, O += P V, with P rounded to 16 bits. Codes of quantised caches become 16-bit numbers on the way (exactly),
// the scale of a key is applied to its scores, that of a value to its weights.
//
// The size of the grid is computed from shapes alone, so the host needs no lengths. With R(b) rows before sequence b,
// the blocks of b begin at R(b) / (rows of a block) + b: that leaves room for all rows of every sequence, and blocks
// without rows return. The last blocks of the line run first, since they see the most positions. Query rows past the
// last sequence count as a sequence of length 0: zeros, and lse -inf. A row's numbers depend only on its own position
// and on the tiles, which lie at absolute multiples of kTile.
//
// Where the sequences of few rows are few as well, their positions are cut into `num_parts` parts, a block each: each
// block leaves a partial result in a workspace, and the last to arrive merges them in order.
//
// Bytes: K and V once for each block that sees them, out of L2 for all but the first. Work: 4 D operations a row and
// position. Shared memory (dynamic) at D = 128: 64 KB, 48 KB for codes; 2 blocks on an SM, by registers.
// The main loop is the one over tiles; over codes it holds the one that widens them. At D = 64 and few rows a warp has
// 4 loads of codes and 16 products in it, the fewest of all.
// budget: kernel=prefill_kernel registers=255 shared=64 spills=0 threads=128 loads16=4 mma=16
// budget: kernel=prefill_kernel<bfloat16,bfloat16 registers=255 shared=64 spills=0 threads=128 loads16=8 mma=16
// budget: kernel=prefill_kernel<float16,float16 registers=255 shared=64 spills=0 threads=128 loads16=8 mma=16
#pragma once
#include "results.cuh"

namespace kvpager::cuda::prefill {

template <class T, class C, int kHeadDim, int kRowWarps>
class PrefillBlock {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  static constexpr int kPacks = Shape::kPacks, kSteps = kHeadDim / 16, kColumns = Shape::kColumns;

 public:
  __device__ __forceinline__ PrefillBlock(const AttentionParams<T, C>& params, const PrefillRows& rows, int64_t kv_head,
                                          const SharedRows& shared, char* memory)
      : own(params, rows, kv_head, shared, memory) {}

  __device__ __forceinline__ void run() {
    constexpr int kTile = Shape::kTile;
    const int32_t first_tile = own.rows.first_seen / kTile, num_tiles = own.rows.last_position / kTile - first_tile + 1;
    const int32_t per_part = (num_tiles + own.shared.num_parts - 1) / own.shared.num_parts;
    begin = (first_tile + static_cast<int32_t>(blockIdx.z) * per_part) * kTile;
    stop = begin + per_part * kTile <= own.rows.last_position ? begin + per_part * kTile : own.rows.last_position + 1;
    start();
    float scale = 0;
    for (int32_t base = begin; base < stop; base += kTile) {
      const int stage = Shape::kCodes ? 0 : (base - begin) / kTile % 2;
      char* keys = own.memory + stage * Shape::kStageBytes;
      if constexpr (Shape::kCodes) {
        if (base == begin) scale = fetch_scale<T, C, Shape>(own.p, own.rows, own.kv_head, base);
        widen_codes(scale);
        fetch(base + kTile, 0);  // over the codes that all have widened
        scale = fetch_scale<T, C, Shape>(own.p, own.rows, own.kv_head, base + kTile);
      } else {
        fetch(base + kTile, 1 - stage);
        cp_async_wait<1>();  // all but the tile just asked for
        __syncthreads();
      }
      attend(base, keys, keys + Shape::kTileBytes);
      if constexpr (Shape::kCodes) cp_async_wait<0>();
      __syncthreads();  // before this tile is overwritten, and after every thread's codes have landed
    }
    cp_async_wait<0>();
    own.add_totals();
    if constexpr (Shape::kColumnWarps > 1)
      merge_warps(own);
    else
      write_rows(own);
  }

 private:
  __device__ __forceinline__ void fetch(int32_t base, int stage) {
    if (base < stop) {
      char* keys = own.memory + (Shape::kCodes ? Shape::kStageBytes : stage * Shape::kStageBytes);
      fetch_tile<T, C, Shape>(own.p, own.rows, own.kv_head, base, keys,
                              keys + (Shape::kCodes ? Shape::kCodeBytes : Shape::kTileBytes));
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void widen_codes(float scale) {
    const char* codes = own.memory + Shape::kStageBytes;
    widen_tile<T, C, Shape>(codes, own.memory);
    widen_tile<T, C, Shape>(codes + Shape::kCodeBytes, own.memory + Shape::kTileBytes);
    if (threadIdx.x < 2 * Shape::kTile) own.scales()[threadIdx.x] = scale;
    __syncthreads();
  }

  // Queries and the first tile into shared memory, and what every row begins with.
  __device__ __forceinline__ void start() {
    char* queries = own.memory + Shape::kQueryAt;
    for (int i = threadIdx.x; i < Shape::kRows * kPacks; i += kPrefillThreads) {
      const int row = i / kPacks, pack = i % kPacks;
      const bool wanted = row < own.rows.num_rows && pack * 8 < own.p.pool.head_dim;
      const int32_t packed = own.rows.first_row + row;
      // In bounds: a row below num_rows is one of the sequence's tokens and of the kv head's group.
      const T* from = wanted ? own.p.query.at(own.rows.first_token + packed / own.group(),
                                              own.kv_head * own.group() + packed % own.group()) +
                                   pack * 8
                             : own.p.query.data;
      cp_async_16(queries + pack_at<kPacks>(row, pack), from, wanted);
    }
    fetch(begin, 0);
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragment<kPacks>(query[step], queries, own.warp_row, step);
      __syncthreads();  // the memory of the queries becomes a tile's
    }
    own.begin_rows();
  }

  // One tile: its positions begin at `base`.
  __device__ __forceinline__ void attend(int32_t base, const char* keys, const char* values) {
    float score[kColumns / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = query[step][i];
      } else {
        query_fragment<kPacks>(a, own.memory + Shape::kQueryAt, own.warp_row, step);
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        key_fragment<kPacks>(b, keys, own.warp_column + 16 * n, step);
        Tensor16<T>::multiply(score[2 * n], a, b[0], b[1]);
        Tensor16<T>::multiply(score[2 * n + 1], a, b[2], b[3]);
      }
    }
    own.finish_scores(base, score);
    float shrink[2];
    own.weigh(score, shrink);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) own.sums[n][e] *= shrink[e / 2];
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      const uint32_t a[4] = {Tensor16<T>::pack(score[2 * n][0], score[2 * n][1]),
                             Tensor16<T>::pack(score[2 * n][2], score[2 * n][3]),
                             Tensor16<T>::pack(score[2 * n + 1][0], score[2 * n + 1][1]),
                             Tensor16<T>::pack(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int pack = 0; pack < kPacks; pack += 2) {
        uint32_t b[4];
        value_fragment<kPacks>(b, values, own.warp_column + 16 * n, pack);
        Tensor16<T>::multiply(own.sums[pack], a, b[0], b[1]);
        Tensor16<T>::multiply(own.sums[pack + 1], a, b[2], b[3]);
      }
    }
  }

  PrefillLane<T, C, kHeadDim, kRowWarps> own;
  uint32_t query[Shape::kQueryInRegisters ? kSteps : 1][4];
  int32_t begin, stop;  // of the positions of this block
};

// grid (num_tokens * group / kRows + num_sequences + 1, K, num_parts), block kPrefillThreads
template <class T, class C, int kHeadDim, int kRowWarps>
__global__ void __launch_bounds__(kPrefillThreads)
    prefill_kernel(AttentionParams<T, C> p, SharedRows shared, unsigned* errors) {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  KVPAGER_DYNAMIC_SHARED(char, memory);
  check_query_starts<kPrefillThreads>(p, errors);
  const int64_t block = int64_t{gridDim.x} - 1 - blockIdx.x, kv_head = blockIdx.y;
  const PrefillRows rows = prefill_rows<Shape::kRows>(p, block);
  if (rows.num_rows == 0 || !scales_are_valid(p, errors)) return;
  if (rows.length == 0) {  // nothing to see
    const int group = static_cast<int>(p.num_heads / p.pool.num_kv_heads), D = static_cast<int>(p.pool.head_dim);
    for (int i = threadIdx.x; i < rows.num_rows * D; i += kPrefillThreads) {
      const int32_t row = rows.first_row + i / D;
      const int64_t token = rows.first_token + row / group, head = kv_head * group + row % group;
      p.out.at(token, head)[i % D] = narrow<T>(0.0f);
      if (p.lse.data && i % D == 0) p.lse.at(token, head) = -INFINITY;
    }
    return;
  }
  if (!table_is_valid(p, rows, errors)) return;
  PrefillBlock<T, C, kHeadDim, kRowWarps>(p, rows, kv_head, shared, memory).run();
}

}  // namespace kvpager::cuda::prefill

// Prefill attention on tensor cores: prompts, chunks on a prefix, drafts to verify; causal, aligned at the end.
//
// A row is one query token and one query head of a kv head's group, tokens outermost, so that a group shares K and V.
// A block of four warps has 64 rows of one sequence and kv head (16 a warp), or, where the rows of a sequence are few,
// 16 rows that its warps share, each with a quarter of the positions. It walks over tiles of positions that its rows see:
// the next tile is on its way (cp.async) while the tensor cores work on this one: S = Q K^T, online softmax in base 2,
// O += P V, with P rounded to 16 bits. Codes of quantised caches become 16-bit numbers on the way (exactly), the scale of
// a key is applied to its scores, that of a value to its weights.
//
// The grid knows shapes only. With R(b) the rows before sequence b, its blocks begin at R(b) / rows of a block + b, which
// leaves each sequence enough, and none for the host to know; blocks without rows return. The last begin first: they see
// the most. Query rows past the last sequence are a sequence of length 0: zeros, and lse -inf.
// A row's numbers depend on its own position and on the tiles at absolute multiples of kTile only.
//
// Where the sequences of few rows are few as well, their positions are cut over `num_splits` blocks: each leaves sums in a
// workspace, and the last to arrive merges them in order.
//
// Bytes: K and V once for each block that sees them, out of L2 for all but the first. Work: 4 D operations a row and
// position. Shared memory (dynamic) at D = 128: 64 KB, 48 KB for codes; 2 blocks on an SM, by registers.
// The tools look into the innermost loop: over numbers that is the one over tiles, over codes the one that widens them.
// budget: kernel=prefill_kernel registers=255 shared=64 spills=0 threads=128 loads16=2
// budget: kernel=prefill_kernel<bfloat16,bfloat16 registers=255 shared=64 spills=0 threads=128 loads16=8 mma=16
// budget: kernel=prefill_kernel<float16,float16 registers=255 shared=64 spills=0 threads=128 loads16=8 mma=16
// ptxas holds two instances to 128 registers and spills a word.
// budget: kernel=prefill_kernel<float16,int8_code,64,1 arch=sm_80 registers=128 shared=64 spills=8 threads=128 loads16=2
// budget: kernel=prefill_kernel<float16,fp8_e4m3,64,1 arch=sm_80 registers=128 shared=64 spills=8 threads=128 loads16=2
#pragma once
#include "prefill_merge.cuh"
#include "prefill_tile.cuh"

namespace kvpager::cuda {

template <class T, class C, int kHeadDim, int kRowWarps>
class PrefillBlock {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  static constexpr int kChunks = Shape::kChunks, kSteps = kHeadDim / 16, kColumns = Shape::kColumns;

 public:
  __device__ __forceinline__ PrefillBlock(const AttentionParams<T, C>& params, const PrefillRows& block_rows,
                                          int64_t head, const PrefillSplit& cut, char* shared)
      : p(params), rows(block_rows), kv_head(head), split(cut), memory(shared), lane(threadIdx.x % 32),
        warp(threadIdx.x / 32), warp_row(warp / Shape::kColumnWarps * 16),
        warp_column(warp % Shape::kColumnWarps * kColumns) {}

  __device__ __forceinline__ void run() {
    constexpr int kTile = Shape::kTile;
    const int32_t first_tile = rows.first_seen / kTile, num_tiles = rows.last_position / kTile - first_tile + 1;
    const int32_t per_split = (num_tiles + split.num_splits - 1) / split.num_splits;
    begin = (first_tile + static_cast<int32_t>(blockIdx.z) * per_split) * kTile;
    stop = begin + per_split * kTile <= rows.last_position ? begin + per_split * kTile : rows.last_position + 1;
    start();
    float scale = 0;
    for (int32_t base = begin; base < stop; base += kTile) {
      const int stage = Shape::kCodes ? 0 : (base - begin) / kTile % 2;
      char* keys = memory + stage * Shape::kStageBytes;
      if constexpr (Shape::kCodes) {
        if (base == begin) scale = fetch_scale<T, C, Shape>(p, rows, kv_head, base);
        widen_codes(scale);
        fetch(base + kTile, 0);  // over the codes that all have widened
        scale = fetch_scale<T, C, Shape>(p, rows, kv_head, base + kTile);
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
    finish();
  }

 private:
  __device__ __forceinline__ void fetch(int32_t base, int stage) {
    if (base < stop) {
      char* keys = memory + (Shape::kCodes ? Shape::kStageBytes : stage * Shape::kStageBytes);
      fetch_tile<T, C, Shape>(p, rows, kv_head, base, keys,
                              keys + (Shape::kCodes ? Shape::kCodeBytes : Shape::kTileBytes));
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void widen_codes(float scale) {
    const char* codes = memory + Shape::kStageBytes;
    widen_tile<T, C, Shape>(codes, memory);
    widen_tile<T, C, Shape>(codes + Shape::kCodeBytes, memory + Shape::kTileBytes);
    if (threadIdx.x < 2 * Shape::kTile) scales()[threadIdx.x] = scale;
    __syncthreads();
  }

  __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(memory + Shape::kScalesAt); }

  // Row of the sequence, over tokens and members of the group, of this lane's upper (0) or lower (1) row.
  __device__ __forceinline__ int32_t row_of(int half) const { return rows.first_row + warp_row + lane / 4 + 8 * half; }
  __device__ __forceinline__ bool exists(int half) const { return warp_row + lane / 4 + 8 * half < rows.num_rows; }
  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(p.num_heads / p.pool.num_kv_heads); }
  __device__ __forceinline__ int64_t token_of(int half) const { return rows.first_token + row_of(half) / group(); }
  __device__ __forceinline__ int64_t head_of(int half) const { return kv_head * group() + row_of(half) % group(); }

  // Queries and the first tile into shared memory, and what every row begins with.
  __device__ __forceinline__ void start() {
    char* queries = memory + Shape::kQueryAt;
    for (int i = threadIdx.x; i < Shape::kRows * kChunks; i += kPrefillThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const bool wanted = row < rows.num_rows && chunk * 8 < p.pool.head_dim;
      const int32_t packed = rows.first_row + row;
      // In bounds: a row below num_rows is one of the sequence's tokens and of the kv head's group.
      const T* from =
          wanted ? p.query.at(rows.first_token + packed / group(), kv_head * group() + packed % group()) + chunk * 8
                 : p.query.data;
      cp_async_16(queries + chunk_at<kChunks>(row, chunk), from, wanted);
    }
    fetch(begin, 0);
    cp_async_wait<0>();
    __syncthreads();
    if constexpr (Shape::kQueryInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) query_fragment<kChunks>(query[step], queries, warp_row, step);
      __syncthreads();  // the memory of the queries becomes a tile's
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      position[half] = exists(half) ? rows.length - rows.query_len + row_of(half) / group() : -1;
      // A sink is a logit without a value; of lanes, warps and blocks that share a row one begins with it.
      const float sink =
          exists(half) && p.sinks.data && warp_column == 0 && blockIdx.z == 0 ? p.sinks[head_of(half)] : -INFINITY;
      top[half] = sink * kLog2E;
      total[half] = sink > -INFINITY && lane % 4 == 0 ? 1.0f : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = 0;
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
        query_fragment<kChunks>(a, memory + Shape::kQueryAt, warp_row, step);
      }
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        key_fragment<kChunks>(b, keys, warp_column + 16 * n, step);
        Tensor16<T>::multiply(score[2 * n], a, b[0], b[1]);
        Tensor16<T>::multiply(score[2 * n + 1], a, b[2], b[3]);
      }
    }
    bend(base, score);
    float shrink[2];
    weigh(score, shrink);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] *= shrink[e / 2];
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      const uint32_t a[4] = {Tensor16<T>::pack(score[2 * n][0], score[2 * n][1]),
                             Tensor16<T>::pack(score[2 * n][2], score[2 * n][3]),
                             Tensor16<T>::pack(score[2 * n + 1][0], score[2 * n + 1][1]),
                             Tensor16<T>::pack(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; chunk += 2) {
        uint32_t b[4];
        value_fragment<kChunks>(b, values, warp_column + 16 * n, chunk);
        Tensor16<T>::multiply(sums[chunk], a, b[0], b[1]);
        Tensor16<T>::multiply(sums[chunk + 1], a, b[2], b[3]);
      }
    }
  }

  // Products to logits in base 2: scales, softcap, and -inf where a row sees nothing.
  __device__ __forceinline__ void bend(int32_t base, float (&score)[kColumns / 8][4]) const {
    const float factor = p.scale * kLog2E, capped = p.scale / p.softcap, cap = p.softcap * kLog2E;
    const bool all_see_all =
        base + Shape::kTile - 1 <= rows.first_position && base >= p.first_visible(rows.last_position);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = warp_column + 8 * n + lane % 4 * 2 + e % 2;
        float number = score[n][e];
        if constexpr (Shape::kCodes) number *= scales()[column];
        number = p.softcap > 0 ? cap * tanh(number * capped) : number * factor;
        const int32_t at = position[e / 2], seen = base + column;
        const bool hidden = !all_see_all && (seen > at || (p.window > 0 && seen <= at - p.window));
        score[n][e] = hidden ? -INFINITY : number;
      }
  }

  // Logits to weights (in a quantised cache times the value's scale); the sums of before shrink by `shrink`.
  __device__ __forceinline__ void weigh(float (&score)[kColumns / 8][4], float (&shrink)[2]) {
    float base[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = top[half];
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          highest = score[n][e] > highest || score[n][e] != score[n][e] ? score[n][e] : highest;  // a NaN shows
#pragma unroll
      for (int width = 1; width < 4; width *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, highest, width);
        highest = other > highest || other != other ? other : highest;
      }
      base[half] = highest == -INFINITY ? 0.0f : highest;  // nothing seen so far: every weight is 2^-inf = 0
      shrink[half] = exp2_fast(top[half] - base[half]);
      top[half] = highest;
      total[half] *= shrink[half];
    }
    const float unit = value_unit();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = exp2_fast(score[n][e] - base[e / 2]);
        total[e / 2] += weight;
        score[n][e] = weight;
        if constexpr (Shape::kCodes)
          score[n][e] *= scales()[Shape::kTile + warp_column + 8 * n + lane % 4 * 2 + e % 2] * unit;
      }
    if constexpr (kHasUnit) {
      shrink[0] *= unit_change;
      shrink[1] *= unit_change;
    }
  }

  // Weights times scales must fit float16, whatever the scales are: sums are kept in units of the largest power of two
  // below any scale so far. Returns 1 / unit; bfloat16 has the range of float and needs none.
  static constexpr bool kHasUnit = Shape::kCodes && std::is_same_v<T, float16>;
  __device__ __forceinline__ float value_unit() {
    if constexpr (!kHasUnit) return 1.0f;
    float largest = 0;
    for (int i = lane; i < kColumns; i += 32) {
      const float scale = scales()[Shape::kTile + warp_column + i];
      largest = scale > largest ? scale : largest;
    }
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, largest, width);
      largest = other > largest ? other : largest;
    }
    const float power = float_of_bits(float_bits(largest) & 0x7f800000u);
    const float before = value_scale_unit;
    if (power > before) value_scale_unit = power;
    unit_change = before / value_scale_unit;
    return 1.0f / value_scale_unit;
  }

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int width = 1; width < 4; width *= 2) total[half] += __shfl_xor_sync(0xffffffffu, total[half], width);
    if constexpr (Shape::kColumnWarps > 1)
      merge_warps();
    else
      write_rows();
  }

  __device__ __forceinline__ void write_rows() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!exists(half)) continue;
      const int64_t token = token_of(half), head = head_of(half);
      T* out = p.out.at(token, head);
      const float factor = value_scale_unit / total[half];
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        const int d = 8 * n + lane % 4 * 2;
        if (d < p.pool.head_dim)
          *reinterpret_cast<uint32_t*>(out + d) =
              Tensor16<T>::pack(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
      }
      if (p.lse.data && lane % 4 == 0) p.lse.at(token, head) = (top[half] + log2_fast(total[half])) * kLn2;
    }
  }

  // Four warps, each with the same 16 rows over its own positions.
  __device__ __forceinline__ void merge_warps() {
    float* tops = reinterpret_cast<float*>(memory);  // [warps, 16], then totals [warps, 16], then sums [warps, 16, D]
    float *totals = tops + kPrefillWarps * 16, *parts = totals + kPrefillWarps * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + lane / 4 + 8 * half;
      if (lane % 4 == 0) {
        tops[row] = top[half];
        totals[row] = total[half];
      }
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          parts[row * kHeadDim + 8 * n + lane % 4 * 2 + e] = sums[n][2 * half + e] * value_scale_unit;
    }
    __syncthreads();
    const auto part_of_warp = [&](int warp_index, int row, int d) {
      const int at = warp_index * 16 + row;
      return PrefillPart{tops[at], totals[at], parts[at * kHeadDim + d]};
    };
    if (split.num_splits == 1) return write_merged(p, rows, kv_head, kPrefillWarps, part_of_warp);
    // In bounds: the workspace has a place for every block of the grid.
    const int64_t place = (int64_t{blockIdx.x} * gridDim.y + blockIdx.y) * split.num_splits;
    float* shared_parts = split.parts + place * 16 * (kHeadDim + 2);
    const auto part_at = [&](int index, int row) { return shared_parts + (index * 16 + row) * (kHeadDim + 2); };
    const int D = static_cast<int>(p.pool.head_dim);
    for (int i = threadIdx.x; i < rows.num_rows * D; i += kPrefillThreads) {
      const PrefillPart part = merged(kPrefillWarps, i / D, i % D, part_of_warp);
      float* target = part_at(static_cast<int>(blockIdx.z), i / D);
      target[i % D] = part.sum;
      if (i % D == 0) target[kHeadDim] = part.top, target[kHeadDim + 1] = part.total;
    }
    __threadfence();
    __syncthreads();  // all of the block's part is written before it is counted
    unsigned* last = reinterpret_cast<unsigned*>(memory);
    if (threadIdx.x == 0)
      *last = atomicAdd(&split.arrivals[place / split.num_splits], 1u) + 1 == static_cast<unsigned>(split.num_splits);
    __syncthreads();
    if (!*last) return;
    __threadfence();
    write_merged(p, rows, kv_head, split.num_splits, [&](int index, int row, int d) {
      const float* part = part_at(index, row);
      return PrefillPart{__ldcg(part + kHeadDim), __ldcg(part + kHeadDim + 1), __ldcg(part + d)};
    });
  }

  const AttentionParams<T, C>& p;
  const PrefillRows& rows;
  const int64_t kv_head;
  const PrefillSplit& split;
  char* const memory;
  const int lane, warp, warp_row, warp_column;
  uint32_t query[Shape::kQueryInRegisters ? kSteps : 1][4];
  float sums[kHeadDim / 8][4], top[2], total[2];
  float value_scale_unit = kHasUnit ? 0x1p-120f : 1.0f, unit_change = 1.0f;
  int32_t position[2];
  int32_t begin, stop;  // of the positions of this block
};

// grid (num_tokens * group / kRows + num_sequences + 1, K, num_splits), block kPrefillThreads
template <class T, class C, int kHeadDim, int kRowWarps>
__global__ void __launch_bounds__(kPrefillThreads)
    prefill_kernel(AttentionParams<T, C> p, PrefillSplit split, unsigned* errors) {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  KVPAGER_DYNAMIC_SHARED(char, memory);
  check_query_starts(p, errors);
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
  PrefillBlock<T, C, kHeadDim, kRowWarps>(p, rows, kv_head, split, memory).run();
}

}  // namespace kvpager::cuda

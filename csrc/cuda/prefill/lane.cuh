// One lane of prefill: its two rows, their positions and sums, and the online softmax over them.
//
// Lane l has rows l / 4 and l / 4 + 8 ("halves") of the warp's 16. Of each it has the columns of a fragment: of every
// 8, column 2 (l % 4) and the next. So four lanes share a row.
#pragma once
#include "merge.cuh"
#include "tile.cuh"

namespace kvpager::cuda::prefill {

template <class T, class C, int kHeadDim, int kRowWarps>
struct PrefillLane {
  using Shape = PrefillShape<C, kHeadDim, kRowWarps>;
  static constexpr int kColumns = Shape::kColumns;

  __device__ __forceinline__ PrefillLane(const AttentionParams<T, C>& params, const PrefillRows& block_rows,
                                         int64_t head, const SharedRows& shared_rows, char* shared_memory)
      : p(params), rows(block_rows), kv_head(head), shared(shared_rows), memory(shared_memory), lane(threadIdx.x % 32),
        warp(threadIdx.x / 32), warp_row(warp / Shape::kColumnWarps * 16),
        warp_column(warp % Shape::kColumnWarps * kColumns) {}

  // Row of the sequence, over tokens and members of the group, of this lane's upper (0) or lower (1) row.
  __device__ __forceinline__ int32_t row_of(int half) const { return rows.first_row + warp_row + lane / 4 + 8 * half; }
  __device__ __forceinline__ bool exists(int half) const { return warp_row + lane / 4 + 8 * half < rows.num_rows; }
  __device__ __forceinline__ int32_t group() const { return static_cast<int32_t>(p.num_heads / p.pool.num_kv_heads); }
  __device__ __forceinline__ int64_t token_of(int half) const { return rows.first_token + row_of(half) / group(); }
  __device__ __forceinline__ int64_t head_of(int half) const { return kv_head * group() + row_of(half) % group(); }

  // Of the tile's keys [kTile], then of its values.
  __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(memory + Shape::kScalesAt); }

  // What every row begins with.
  __device__ __forceinline__ void begin_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      position[half] = exists(half) ? rows.length - rows.query_len + row_of(half) / group() : -1;
      // A sink is a logit without a value; of lanes, warps and blocks that share a row one begins with it.
      const float sink = exists(half) && p.options.sinks.data && warp_column == 0 && blockIdx.z == 0
                             ? p.options.sinks[head_of(half)]
                             : -INFINITY;
      top[half] = sink * kLog2E;
      total[half] = sink > -INFINITY && lane % 4 == 0 ? 1.0f : 0.0f;
      // In bounds: a row of no token has a head below H all the same.
      slope[half] = p.options.alibi_slopes.data ? p.options.alibi_slopes[head_of(half)] * kLog2E : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[n][e] = 0;
  }

  // Products to logits in units of log 2: scales, softcap, and -inf where a row sees nothing.
  __device__ __forceinline__ void finish_scores(int32_t base, float (&score)[kColumns / 8][4]) const {
    const float factor = p.options.scale * kLog2E, capped = p.options.scale / p.options.softcap;
    const bool all_see_all =
        base + Shape::kTile - 1 <= rows.first_position && base >= p.options.first_visible(rows.last_position);
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int column = warp_column + 8 * n + lane % 4 * 2 + e % 2;
        float number = score[n][e];
        if constexpr (Shape::kCodes) number *= scales()[column];
        number = p.options.softcap > 0 ? p.options.softcap * kLog2E * tanh(number * capped) : number * factor;
        const int32_t at = position[e / 2], seen = base + column;
        const bool hidden = !all_see_all && (seen > at || (p.options.window > 0 && seen <= at - p.options.window));
        score[n][e] = hidden ? -INFINITY : number;
      }
    if (p.options.alibi_slopes.data != nullptr) add_alibi(base, score);
  }

  // Adds ALiBi to logits.
  __device__ __forceinline__ void add_alibi(int32_t base, float (&score)[kColumns / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float distance = static_cast<float>(base + warp_column + lane % 4 * 2 - position[half]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e)
          score[n][e] += slope[half] * (distance + static_cast<float>(8 * n + e % 2));
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
    const float inverse_power = next_value_power();
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float weight = exp2_fast(score[n][e] - base[e / 2]);
        total[e / 2] += weight;
        score[n][e] = weight;
        if constexpr (Shape::kCodes)
          score[n][e] *= scales()[Shape::kTile + warp_column + 8 * n + lane % 4 * 2 + e % 2] * inverse_power;
      }
    if constexpr (kHasPower) {
      shrink[0] *= power_change;
      shrink[1] *= power_change;
    }
  }

  // Weights times scales must fit float16, whatever the scales are: sums are kept divided by the largest power of two
  // below any scale so far. Returns the inverse of that power. bfloat16 has the range of float and needs none.
  static constexpr bool kHasPower = Shape::kCodes && std::is_same_v<T, float16>;
  __device__ __forceinline__ float next_value_power() {
    if constexpr (!kHasPower) return 1.0f;
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
    const float before = value_power;
    if (power > before) value_power = power;
    power_change = before / value_power;
    return 1.0f / value_power;
  }

  // After the last tile: the totals of the four lanes of a row.
  __device__ __forceinline__ void add_totals() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int width = 1; width < 4; width *= 2) total[half] += __shfl_xor_sync(0xffffffffu, total[half], width);
  }

  const AttentionParams<T, C>& p;
  const PrefillRows& rows;
  const int64_t kv_head;
  const SharedRows& shared;
  char* const memory;
  const int lane, warp, warp_row, warp_column;
  float sums[kHeadDim / 8][4], top[2], total[2];  // out times total, divided by value_power; the largest logit
  float value_power = kHasPower ? 0x1p-120f : 1.0f, power_change = 1.0f;
  float slope[2];  // of ALiBi, in units of log 2
  int32_t position[2];
};

}  // namespace kvpager::cuda::prefill

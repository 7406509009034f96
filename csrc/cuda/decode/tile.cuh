// Decode attention by one warp: tiles of 16 tokens go from memory through registers straight to the tensor cores.
//
// There are two products, both with the group's query heads as the side that is 8 wide: a group of 2 costs as much as
// one of 8.
//   scores [heads, tokens] = Q K^T   the wide side (16) takes the heads twice, each time with other dims (`score_tile`)
//   out^T [dims, heads] = V^T P^T    the weights lie in the lanes as the scores were left: nothing is transposed
// The head dim may be permuted within a product as long as both factors are permuted alike. So a lane takes 16
// consecutive bytes of a row (its share) where the fragment's figure shows scattered columns, and the four registers of
// a load are two fragments of K: no shared memory, ldmatrix or swizzle is needed. Lane letters:
// r = lane / 4, c = lane % 4.
//   K: lane holds its share (of 4, c) of rows r and r + 8
//   V: its share (of 8, r) of rows 2c, 2c + 1, 2c + 8, 2c + 9
//   scores, weights: head r, the tokens of the lane's V rows        out: heads 2c and 2c + 1, dims of V's share
// Codes of a quantised cache become float16, exactly; their scales go into the scores and into the weights.
#pragma once
#include "../device/codes.cuh"
#include "shape.cuh"

namespace kvpager::cuda::decode {

// Up to 8 query rows in shared memory, as fragments: words[j][lane] of the product's 16 rows, of which 0 ... 7 are the
// heads with the dims of step 2 j (16 a step) and 8 ... 15 the same heads with those of step 2 j + 1.
template <class Shape>
struct QueryTile {
  uint4 words[Shape::kProducts / 2][32];

  // Each warp writes its share of the words; the caller has a barrier follow. Returns the power of two by which head
  // r's words were divided.
  // In bounds: row < num_tokens, head + heads <= H, dims < D.
  template <class P>
  __device__ float load(const P& p, int row, int warp, int lane) {
    const HeadTile tile = head_tile(p);
    const int r = lane / 4, c = lane % 4;
    const auto* query = p.query.at(row, tile.head + (r < tile.heads ? r : 0));
    // Elements 2 pair and 2 pair + 1 of the lane's share; even, and the row is at a multiple of 4 bytes.
    const auto load_pair = [&](int pair) {
      const int dim = Shape::KeyShare::dim(c, 2 * pair);
      return r < tile.heads ? *reinterpret_cast<const uint32_t*>(query + dim) : 0;
    };
    float power = 1;
    if constexpr (kConverted) {  // by a power of two, lest it overflow
      float largest = 0;
#pragma unroll
      for (int pair = 0; pair < 2 * Shape::kProducts; ++pair) {
        const uint32_t two = load_pair(pair);
        largest = fmaxf(largest, fmaxf(fabsf(low_of(two)), fabsf(high_of(two))));
      }
      power = power_of_two_below(max_over_tokens(largest));
    }
    const float inverse = inverse_power(power);
    for (int j = warp; j < Shape::kProducts / 2; j += kDecodeWarps) {
      uint32_t two[4];
      for (int i = 0; i < 4; ++i) {  // half i / 2 of step 2 j + i % 2
        two[i] = load_pair(2 * (2 * j + i % 2) + i / 2);
        if constexpr (kConverted) two[i] = pack_f16(low_of(two[i]) * inverse, high_of(two[i]) * inverse);
      }
      words[j][lane] = make_uint4(two[0], two[1], two[2], two[3]);
    }
    return power;
  }

 private:
  using T = typename Shape::T;
  static constexpr bool kConverted = !std::is_same_v<T, typename Shape::Number>;  // bfloat16 to float16
  __device__ static float low_of(uint32_t two) { return widen(T{static_cast<uint16_t>(two & 0xffffu)}); }
  __device__ static float high_of(uint32_t two) { return widen(T{static_cast<uint16_t>(two >> 16)}); }
};

// What the kernels keep of tiles: K and V rows as they lie in memory.
template <class Shape>
struct Tile {
  uint32_t key[2 * Shape::kSubtiles][Shape::KeyShare::kWords];      // of tokens 8 i + r
  uint32_t value[4 * Shape::kSubtiles][Shape::ValueShare::kWords];  // of tokens Shape::token(i)
  float key_scale, value_scale;  // of the lane's own token, lane % kTokens; quantised caches only
};

// A running softmax over the warp's tokens, logits in units of log 2. `top` and `total` are head r's, the total over
// the lane's own tokens. acc[j][i + 2 k]: head 2c + i, dim ValueShare::dim(r, 2 j + k), relative to its top and to
// `power`.
template <class Shape>
struct WarpSums {
  float acc[Shape::kProducts][4], top, total;
  float power;  // a power of two near the largest value scale: weights times scales fit into float16 beside it

  __device__ void clear() {
#pragma unroll
    for (int j = 0; j < Shape::kProducts; ++j)
      for (int i = 0; i < 4; ++i) acc[j][i] = 0;
    top = -INFINITY, total = 0;
    power = is_quantised<typename Shape::C> ? 0x1p-126f : 1.0f;
  }

  // By `shrink` of head r.
  __device__ void rescale(float shrink, int lane) {
    const int column = lane % 4;
    const float factors[2] = {__shfl_sync(kAllLanes, shrink, 8 * column),
                              __shfl_sync(kAllLanes, shrink, 8 * column + 4)};
#pragma unroll
    for (int j = 0; j < Shape::kProducts; ++j)
      for (int i = 0; i < 4; ++i) acc[j][i] *= factors[i % 2];
  }
};

template <class Shape>
using Scores = float[4 * Shape::kSubtiles];  // of head r and token Shape::token(index): products, then logits, weights

// The 16 rows of a product are 8 heads with the dims of one step, then the same heads with the dims of the next. So
// only the first half of the product with one step's K is a score, and the second half of that with the next step's.
// The other halves mix dims of different steps and are ignored.
template <class Shape>
__device__ __forceinline__ void score_tile(Scores<Shape>& scores, const Tile<Shape>& tile,
                                           const QueryTile<Shape>& queries, int lane) {
#pragma unroll
  for (int sub = 0; sub < Shape::kSubtiles; ++sub) {
    float sums[2][2][4] = {};  // [eight tokens][even, odd steps]
    uint4 four;
#pragma unroll
    for (int step = 0; step < Shape::kProducts; ++step) {
      if (step % 2 == 0) four = load_shared_16(&queries.words[step / 2][lane]);
      const uint32_t a[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int eight = 0; eight < 2; ++eight) {
        const auto& words = tile.key[2 * sub + eight];
        uint32_t b0, b1;
        if constexpr (is_quantised<typename Shape::C>)
          f16_of_codes<typename Shape::C>(words[step], b0, b1);
        else
          b0 = words[2 * step], b1 = words[2 * step + 1];
        multiply<typename Shape::Number>(sums[eight][step % 2], a, b0, b1);
      }
    }
    for (int i = 0; i < 4; ++i) scores[4 * sub + i] = sums[i / 2][0][i % 2] + sums[i / 2][1][i % 2 + 2];
  }
}

// Weights times value scales, relative to `power`, which follows the largest scale.
template <class Shape>
__device__ __forceinline__ void scale_weights(WarpSums<Shape>& sums, Scores<Shape>& weights, float own_scale,
                                              int lane) {
  if (__any_sync(kAllLanes, own_scale > 2 * sums.power)) {
    float largest = own_scale;
    for (int width = 1; width < 32; width *= 2) largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, width));
    const float power = power_of_two_below(largest);
    sums.rescale(sums.power * inverse_power(power), lane);
    sums.power = power;
  }
  own_scale *= inverse_power(sums.power);
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i) weights[i] *= __shfl_sync(kAllLanes, own_scale, Shape::token(i, lane));
}

// Logits to weights, and what was summed before to the new largest logit, which seldom changes.
template <class Shape>
__device__ __forceinline__ void weigh(WarpSums<Shape>& sums, Scores<Shape>& scores, float own_scale, int lane) {
  float top = sums.top;
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i) top = fmaxf(top, scores[i]);
  top = max_over_tokens(top);
  const float zero = top == -INFINITY ? 0 : top;  // every score overflowed: -inf - -inf would be NaN
  if (__any_sync(kAllLanes, top > sums.top)) {
    const float shrink = exp2_fast(sums.top - zero);
    sums.top = top;
    sums.total *= shrink;
    sums.rescale(shrink, lane);
  }
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i) {
    scores[i] = exp2_fast(scores[i] - zero);
    sums.total += scores[i];
  }
  if constexpr (is_quantised<typename Shape::C>) scale_weights<Shape>(sums, scores, own_scale, lane);
}

// Zeros in the rows of tokens outside begin ... end - 1: a weight of 0 times an inf or NaN would be NaN.
template <class Shape>
__device__ __forceinline__ void hide_values(Tile<Shape>& tile, int begin, int end, int lane) {
#pragma unroll
  for (int i = 0; i < 4 * Shape::kSubtiles; ++i) {
    const int token = Shape::token(i, lane);
    if (token >= begin && token < end) continue;
#pragma unroll
    for (uint32_t& word : tile.value[i]) word = 0;
  }
}

// out^T += V^T P^T. Byte permutations make the pairs of tokens that stand in one register of V^T.
template <class Shape>
__device__ __forceinline__ void add_values(WarpSums<Shape>& sums, const Tile<Shape>& tile,
                                           const Scores<Shape>& weights) {
  using Number = typename Shape::Number;
#pragma unroll
  for (int sub = 0; sub < Shape::kSubtiles; ++sub) {
    const uint32_t b0 = pack<Number>(weights[4 * sub], weights[4 * sub + 1]);
    const uint32_t b1 = pack<Number>(weights[4 * sub + 2], weights[4 * sub + 3]);
#pragma unroll
    for (int word = 0; word < Shape::ValueShare::kWords; ++word) {
      const auto* const value = &tile.value[4 * sub];
      const uint32_t rows[4] = {value[0][word], value[1][word], value[2][word], value[3][word]};
      uint32_t a[4];
      if constexpr (is_quantised<typename Shape::C>) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {  // dims 0 and 1 of the word's four, then 2 and 3
          const unsigned order = pair == 0 ? 0x5140 : 0x7362;
          f16_of_codes<typename Shape::C>(__byte_perm(rows[0], rows[1], order), a[0], a[1]);
          f16_of_codes<typename Shape::C>(__byte_perm(rows[2], rows[3], order), a[2], a[3]);
          multiply<Number>(sums.acc[2 * word + pair], a, b0, b1);
        }
      } else {
        a[0] = __byte_perm(rows[0], rows[1], 0x5410), a[1] = __byte_perm(rows[0], rows[1], 0x7632);
        a[2] = __byte_perm(rows[2], rows[3], 0x5410), a[3] = __byte_perm(rows[2], rows[3], 0x7632);
        multiply<Number>(sums.acc[word], a, b0, b1);
      }
    }
  }
}

}  // namespace kvpager::cuda::decode

// The sizes of decode attention's tiles, what a lane holds of a row, and the arithmetic of both 16-bit types.
#pragma once
#include "launch.h"

namespace kvpager::cuda::decode {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps;

__device__ __forceinline__ int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int larger(int a, int b) { return a > b ? a : b; }

// Query heads head ... head + heads - 1, which read kv_head: those of one block.
struct HeadTile {
  int kv_head, head, heads;
};

// From the grid's x: K times the tiles of a kv head's query heads. Made anew where it is needed, to save registers.
template <class P>
__device__ __forceinline__ HeadTile head_tile(const P& p) {
  const int group = static_cast<int>(p.num_heads / p.pool.num_kv_heads), tiles = (group + kTileHeads - 1) / kTileHeads;
  const int kv_head = blockIdx.x / tiles, first = blockIdx.x % tiles * kTileHeads;
  return {kv_head, kv_head * group + first, smaller(kTileHeads, group - first)};
}

// One lane's share of a row of D elements that kLanes lanes read together: loads of 16 bytes, the rest by 8 and 4.
template <class C, int D, int kLanes>
struct Share {
  static constexpr int kBytes = D / kLanes * static_cast<int>(sizeof(C)), kWords = kBytes / 4, kWide = kBytes / 16;
  static constexpr int kWideBytes = 16 * kWide * kLanes, kMiddleBytes = (kBytes & 8) * kLanes;
  static_assert(D % kLanes == 0 && kBytes % 4 == 0);

  // `at`: 16 * lane bytes into the row.
  __device__ static void load(uint32_t (&words)[kWords], const char* at, int lane) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const uint4 four = load_once_16(at + 16 * i * kLanes);
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    if constexpr ((kBytes & 8) != 0) {
      const uint2 two = load_once_8(at + kWideBytes - 8 * lane);
      words[4 * kWide] = two.x, words[4 * kWide + 1] = two.y;
    }
    if constexpr ((kBytes & 4) != 0) words[kWords - 1] = load_once_4(at + kWideBytes + kMiddleBytes - 12 * lane);
  }

  // Which of the row's elements is `element` of the lane's words.
  __device__ static constexpr int dim(int lane, int element) {
    const int byte = element * static_cast<int>(sizeof(C));
    int at = kWideBytes + kMiddleBytes + 4 * lane + byte % 4;
    if (byte < 16 * kWide)
      at = 16 * (byte / 16 * kLanes + lane) + byte % 16;
    else if (byte < 16 * kWide + (kBytes & 8))
      at = kWideBytes + 8 * lane + byte % 8;
    return at / static_cast<int>(sizeof(C));
  }
};

// Sizes of the kernel for query type T, cache type C and head dim D.
template <class T_, class C_, int D_>
struct DecodeShape {
  using T = T_;
  using C = C_;
  using Number = std::conditional_t<is_quantised<C>, float16, T>;  // what the tensor cores multiply
  using KeyShare = Share<C, D_, 4>;
  using ValueShare = Share<C, D_, 8>;
  static constexpr int D = D_, kProducts = D / 16;
  static constexpr int kSubtiles = D * sizeof(C) <= 128 ? 2 : 1, kTokens = 16 * kSubtiles;  // of a warp's step

  // Token of the tile whose V row and scores the lane holds as number `index`, below 4 kSubtiles.
  __device__ static int token(int index, int lane) {
    return 16 * (index / 4) + 8 * (index % 4 / 2) + 2 * (lane % 4) + index % 2;
  }
};

template <class Number>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Number, bfloat16>)
    mma_m16n8k16_bf16(c, a, b0, b1);
  else
    mma_m16n8k16_f16(c, a, b0, b1);
}

template <class Number>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Number, bfloat16>) return pack_bf16(low, high);
  return pack_f16(low, high);
}

// Over the 4 lanes that hold the same head's scores.
__device__ __forceinline__ float max_over_tokens(float number) {
  for (int width = 1; width < 4; width *= 2) number = fmaxf(number, __shfl_xor_sync(kAllLanes, number, width));
  return number;
}
__device__ __forceinline__ float sum_over_tokens(float number) {
  for (int width = 1; width < 4; width *= 2) number += __shfl_xor_sync(kAllLanes, number, width);
  return number;
}

// A power of two, within a factor of 2 of a positive number, and its inverse.
__device__ __forceinline__ float power_of_two_below(float number) {
  const uint32_t bits = float_bits(number) & 0x7f800000u;
  return float_of_bits(bits < 0x00800000u ? 0x00800000u : (bits > 0x7e800000u ? 0x7e800000u : bits));
}
__device__ __forceinline__ float inverse_power(float power) { return float_of_bits(0x7f000000u - float_bits(power)); }

}  // namespace kvpager::cuda::decode

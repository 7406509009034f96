// What one block of prefill holds in shared memory, how tiles of K and V get there, and the fragments read from them.
//
// All matrices have rows of kHeadDim 16-bit numbers, in packs of 8 (16 bytes). Pack c of row r lies at c ^ (r & 7), so
// that the eight rows of an 8 x 8 matrix come from all banks. Dims past the true head dim and positions that nobody may
// see hold zeros; their memory is not read.
#pragma once
#include "../device/codes.cuh"
#include "rows.cuh"

namespace kvpager::cuda::prefill {

// Arithmetic of the 16-bit type that goes through the tensor cores.
template <class T>
struct Tensor16;
template <>
struct Tensor16<bfloat16> {
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_bf16(c, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_bf16(low, high); }
  // Codes have 4 or 7 significant bits: exact in bfloat16, too.
  static __device__ __forceinline__ uint32_t of_f16x2(uint32_t pair) {
    float low, high;
    f32_of_f16x2(pair, low, high);
    return pack_bf16(low, high);
  }
};
template <>
struct Tensor16<float16> {
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_m16n8k16_f16(c, a, b0, b1);
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return pack_f16(low, high); }
  static __device__ __forceinline__ uint32_t of_f16x2(uint32_t pair) { return pair; }
};

// Sizes of a block's work. kRowWarps of the four warps have rows of their own, 16 each; the others share those rows and
// take other positions of a tile.
template <class C, int kHeadDim, int kRowWarps>
struct PrefillShape {
  static constexpr bool kCodes = is_quantised<C>;
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kTile = kHeadDim <= 128 || kRowWarps == 1 ? 64 : 32;  // positions
  static constexpr int kColumnWarps = kPrefillWarps / kRowWarps;
  static constexpr int kColumns = kTile / kColumnWarps;  // positions of a tile that one warp takes
  static constexpr int kPacks = kHeadDim / 8;            // of a row
  // Numbers: two stages of a K and a V tile, or one of numbers and behind it one of codes.
  static constexpr int kTileBytes = kTile * kHeadDim * 2;
  static constexpr int kCodeBytes = kTile * kHeadDim;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kTilesBytes = kCodes ? kStageBytes + 2 * kCodeBytes : 2 * kStageBytes;
  // Queries stay in registers, read through the memory of a tile that is not there yet; above 128 they have their own.
  static constexpr bool kQueryInRegisters = kHeadDim <= 128;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kQueryAt = kQueryInRegisters ? (kCodes ? 0 : kStageBytes) : kTilesBytes;
  static constexpr int kScalesAt = kTilesBytes + (kQueryInRegisters ? 0 : kQueryBytes);
  static constexpr int kBytes = kScalesAt + (kCodes ? 2 * kTile * 4 : 0);
  // The results of warps that share rows meet in the memory of the tiles: (top, total), then sums.
  static constexpr int kMergeBytes = kColumnWarps > 1 ? kPrefillWarps * 16 * (kHeadDim + 2) * 4 : 0;
  static_assert(kMergeBytes <= kBytes && kQueryBytes <= kStageBytes && kColumns % 16 == 0);
};

// Byte offset of a pack in a matrix of numbers.
template <int kPacks>
__device__ __forceinline__ int pack_at(int row, int pack) {
  return (row * kPacks + (pack ^ (row & 7))) * 16;
}

// Positions base ... base + kTile - 1 of K and V on their way into shared memory; the caller commits.
template <class T, class C, class Shape>
__device__ __forceinline__ void fetch_tile(const AttentionParams<T, C>& p, const PrefillRows& rows, int64_t kv_head,
                                           int32_t base, char* keys, char* values) {
  constexpr int kPerCopy = 16 / sizeof(C), kCopies = Shape::kPacks * 8 / kPerCopy;  // of a row
  constexpr int kRowsAtOnce = kPrefillThreads / kCopies;
  static_assert(kPrefillThreads % kCopies == 0 && Shape::kTile % kRowsAtOnce == 0);
  const int copy = threadIdx.x % kCopies, d = copy * kPerCopy;
  const uint32_t S = static_cast<uint32_t>(p.pool.block_size);
#pragma unroll
  for (int i = 0; i < Shape::kTile / kRowsAtOnce; ++i) {
    const int row = i * kRowsAtOnce + threadIdx.x / kCopies;
    const int32_t position = base + row;
    const bool wanted =
        position >= rows.first_seen && position <= rows.last_position && d < static_cast<int>(p.pool.head_dim);
    const C *key = p.key_cache.data, *value = p.value_cache.data;  // not read, unless `wanted`
    if (wanted) {
      // In bounds: the position is one that the block's rows see, so its column was checked and names a block.
      const uint32_t column = static_cast<uint32_t>(position) / S, offset = static_cast<uint32_t>(position) % S;
      const int64_t block = p.block_tables.at(rows.sequence, column);
      key = p.key_cache.at(block, kv_head, offset) + d;
      value = p.value_cache.at(block, kv_head, offset) + d;
    }
    const int at = Shape::kCodes ? (row * kCopies + copy) * 16 : pack_at<Shape::kPacks>(row, copy);
    cp_async_16(keys + at, key, wanted);
    cp_async_16(values + at, value, wanted);
  }
}

// This thread's scale of the tile: threads below kTile have those of keys, the next those of values. 0 if not seen.
template <class T, class C, class Shape>
__device__ __forceinline__ float fetch_scale(const AttentionParams<T, C>& p, const PrefillRows& rows, int64_t kv_head,
                                             int32_t base) {
  const int thread = threadIdx.x, row = thread % Shape::kTile;
  const int32_t position = base + row;
  if (thread >= 2 * Shape::kTile || position < rows.first_seen || position > rows.last_position) return 0;
  const uint32_t S = static_cast<uint32_t>(p.pool.block_size);
  const int64_t block = p.block_tables.at(rows.sequence, static_cast<uint32_t>(position) / S);  // as in fetch_tile
  const Scales<const float>& scales = thread < Shape::kTile ? p.key_scale : p.value_scale;
  return *scales.at(block, kv_head, static_cast<uint32_t>(position) % S);
}

// A tile of codes to numbers of T: the codes themselves, their scales come later.
template <class T, class C, class Shape>
__device__ __forceinline__ void widen_tile(const char* codes, char* numbers) {
  constexpr int kCopies = Shape::kPacks / 2;  // 16 codes each
#pragma unroll 4
  for (int i = threadIdx.x; i < Shape::kTile * kCopies; i += kPrefillThreads) {
    const uint4 sixteen = *reinterpret_cast<const uint4*>(codes + i * 16);
    const uint32_t words[4] = {sixteen.x, sixteen.y, sixteen.z, sixteen.w};
    uint32_t wide[8];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t low, high;
      f16_of_codes<C>(words[word], low, high);
      wide[2 * word] = Tensor16<T>::of_f16x2(low);
      wide[2 * word + 1] = Tensor16<T>::of_f16x2(high);
    }
    const int row = i / kCopies, pack = i % kCopies * 2;
    *reinterpret_cast<uint4*>(numbers + pack_at<Shape::kPacks>(row, pack)) =
        make_uint4(wide[0], wide[1], wide[2], wide[3]);
    *reinterpret_cast<uint4*>(numbers + pack_at<Shape::kPacks>(row, pack + 1)) =
        make_uint4(wide[4], wide[5], wide[6], wide[7]);
  }
}

// Fragments, by ldmatrix: lane l names row l % 8 of matrix l / 8.
// 16 query rows from `row`, dims 16 step ... 16 step + 15: the left factor.
template <int kPacks>
__device__ __forceinline__ void query_fragment(uint32_t (&a)[4], const char* queries, int row, int step) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  ldmatrix_x4(a, queries + pack_at<kPacks>(row + matrix % 2 * 8 + lane % 8, 2 * step + matrix / 2));
}
// 16 positions from `row` of the same dims: right factors of positions 0 to 7 (b[0], b[1]) and 8 to 15 (b[2], b[3]).
template <int kPacks>
__device__ __forceinline__ void key_fragment(uint32_t (&b)[4], const char* keys, int row, int step) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  ldmatrix_x4(b, keys + pack_at<kPacks>(row + matrix / 2 * 8 + lane % 8, 2 * step + matrix % 2));
}
// 16 positions from `row`, 16 dims from pack `pack`: right factors of the first 8 dims and of the next 8.
template <int kPacks>
__device__ __forceinline__ void value_fragment(uint32_t (&b)[4], const char* values, int row, int pack) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  ldmatrix_x4_trans(b, values + pack_at<kPacks>(row + matrix % 2 * 8 + lane % 8, pack + matrix / 2));
}

}  // namespace kvpager::cuda::prefill

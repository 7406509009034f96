// The fused front end of a step on the CPU: checks positions and slots, then spreads tokens over threads. float64 is
// computed here, plainly.
#include "fused.h"

#include <algorithm>
#include <memory>

#include "../fused_checks.h"
#include "kernels.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // of qkv: fewer are not worth waking a thread for

template <class T, class C>
void check_values(const FusedParams<T, C>& p) {
  const int64_t num_slots = p.pool.num_blocks * p.pool.block_size;
  for (int64_t token = 0; token < p.num_tokens; ++token) {
    const int64_t position = p.positions[token], slot = p.slot_mapping[token];
    if (position < 0 || position >= p.num_positions)
      fail_argument("positions", "0 to " + std::to_string(p.num_positions - 1) + " (rows of `cos_sin`)",
                    std::to_string(position) + " at token " + std::to_string(token));
    if (slot < -1 || slot >= num_slots)
      fail_slot("slot_mapping", "-1 or a slot below " + std::to_string(num_slots),
                std::to_string(slot) + " at token " + std::to_string(token));
  }
}

void norm_and_turn(const double* row, const double* weight, const double* cos_sin, int64_t D, double eps,
                   double* target) {
  const int64_t half = D / 2;
  double squares = 0;
  for (int64_t d = 0; d < D; ++d) squares += row[d] * row[d];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(D) + eps);
  for (int64_t d = 0; d < half; ++d) {
    const double low = weight ? row[d] * factor * weight[d] : row[d];
    const double high = weight ? row[half + d] * factor * weight[half + d] : row[half + d];
    target[d] = low * cos_sin[d] - high * cos_sin[half + d];
    target[half + d] = high * cos_sin[d] + low * cos_sin[half + d];
  }
}

// Bounds as in fused.isa.cpp.
void fuse_plainly(const FusedParams<double>& p, int64_t begin, int64_t end) {
  const int64_t H = p.num_heads, K = p.pool.num_kv_heads, D = p.pool.head_dim, S = p.pool.block_size;
  for (int64_t token = begin; token < end; ++token) {
    const double* cos_sin = p.cos_sin + p.positions[token] * p.cos_sin_stride;
    for (int64_t head = 0; head < H; ++head)
      norm_and_turn(p.qkv.at(token, head), p.q_weight, cos_sin, D, p.eps, p.query_out.at(token, head));
    const int64_t slot = p.slot_mapping[token];
    for (int64_t head = 0; head < K && slot >= 0; ++head) {
      norm_and_turn(p.qkv.at(token, H + head), p.k_weight, cos_sin, D, p.eps, p.key_cache.at(slot / S, head, slot % S));
      std::copy_n(p.qkv.at(token, H + K + head), D, p.value_cache.at(slot / S, head, slot % S));
    }
  }
}

}  // namespace

template <class T, class C>
void qk_norm_rope_write(const FusedParams<T, C>& p) {
  check_values(p);
  const int64_t elements = (p.num_heads + 2 * p.pool.num_kv_heads) * p.pool.head_dim;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / elements);
  torch::stable::parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, double>) {
      fuse_plainly(p, begin, end);
    } else {
      const auto row = std::make_unique<float[]>(p.pool.head_dim);
      KVPAGER_ACTIVE(fuse_tokens<T, C>)(p, begin, end, row.get());
    }
  });
}

#define KVPAGER_INSTANTIATE(T, C) template void qk_norm_rope_write(const FusedParams<T, C>&);
KVPAGER_INSTANTIATE(float, float)
KVPAGER_INSTANTIATE(double, double)
KVPAGER_INSTANTIATE(float16, float16)
KVPAGER_INSTANTIATE(bfloat16, bfloat16)
KVPAGER_INSTANTIATE(float, int8_code)
KVPAGER_INSTANTIATE(float16, int8_code)
KVPAGER_INSTANTIATE(bfloat16, int8_code)
KVPAGER_INSTANTIATE(float, fp8_e4m3)
KVPAGER_INSTANTIATE(float16, fp8_e4m3)
KVPAGER_INSTANTIATE(bfloat16, fp8_e4m3)

}  // namespace kvpager::cpu

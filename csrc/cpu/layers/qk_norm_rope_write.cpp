// The CPU op `qk_norm_rope_write`, from the projection to attention: checks positions and slots, then spreads tokens
// over threads. float64 is computed here, plainly.
#include <algorithm>
#include <memory>

#include "../../layers/checks.h"
#include "../attention/values.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::layers {

// Norm, rotation and slot write of tokens begin ... end - 1. `row` has room for head_dim floats.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void write_tokens(const QkNormRopeWriteParams<T, C>& params,
                                                                      int64_t begin, int64_t end, float* row))

namespace {

template <class T, class C>
void check_values(const QkNormRopeWriteParams<T, C>& p) {
  for (int64_t token = 0; token < p.num_tokens; ++token)
    if (const int64_t position = p.positions[token]; position < 0 || position >= p.num_positions)
      fail_argument("positions", "0 to " + std::to_string(p.num_positions - 1) + " (rows of `cos_sin`)",
                    std::to_string(position) + " at token " + std::to_string(token));
  check_slots(p.slot_mapping, p.num_tokens, p.pool);
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

// Bounds as in qk_norm_rope_write.isa.cpp.
void write_plainly(const QkNormRopeWriteParams<double>& p, int64_t begin, int64_t end) {
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

template <class T, class C>
void write(const QkNormRopeWriteParams<T, C>& p) {
  check_fixed_scales(p);
  check_values(p);
  const int64_t grain = grain_of((p.num_heads + 2 * p.pool.num_kv_heads) * p.pool.head_dim);
  torch::stable::parallel_for(0, p.num_tokens, grain, [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, double>) {
      write_plainly(p, begin, end);
    } else {
      const auto row = std::make_unique<float[]>(p.pool.head_dim);
      KVPAGER_ACTIVE(write_tokens<T, C>)(p, begin, end, row.get());
    }
  });
}

void qk_norm_rope_write(Tensor query_out, Tensor qkv, std::optional<Tensor> q_weight, std::optional<Tensor> k_weight,
                        Tensor cos_sin, Tensor positions, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                        double eps, std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  with_cache_types("qkv", qkv, key_cache, [&](auto number, auto code) {
    write(qk_norm_rope_write_params<decltype(number), decltype(code)>(query_out, qkv, q_weight, k_weight, cos_sin,
                                                                      positions, key_cache, value_cache, slot_mapping,
                                                                      eps, key_scale, value_scale));
  });
}

}  // namespace
}  // namespace kvpager::cpu::layers

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("qk_norm_rope_write", TORCH_BOX(&kvpager::cpu::layers::qk_norm_rope_write));
}

// RMSNorm and the gated activation on the CPU: spreads rows over threads; float64 is computed here, plainly.
#include "layers.h"

#include <algorithm>

#include "../checks.h"
#include "kernels.h"

namespace kvpager::cpu {
namespace {

constexpr int64_t kGrainElements = 1 << 14;  // fewer are not worth waking a thread for

int64_t grain_of(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width)); }

// Bounds as in layers.isa.cpp.
void norm_plainly(const NormParams<double>& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const double* x = p.x + row * p.x_stride;
    if (p.residual != nullptr) {
      double* residual = p.residual + row * p.residual_stride;
      for (int64_t at = 0; at < p.width; ++at) residual[at] += x[at];
      x = residual;
    }
    double squares = 0;
    for (int64_t at = 0; at < p.width; ++at) squares += x[at] * x[at];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(p.width) + p.eps);
    for (int64_t at = 0; at < p.width; ++at) p.out[row * p.out_stride + at] = x[at] * factor * p.weight[at];
  }
}

void silu_mul_plainly(const GateParams<double>& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t at = 0; at < p.width; ++at) {
      const double x = p.gate[row * p.gate_stride + at];
      p.out[row * p.out_stride + at] = x / (1 + std::exp(-x)) * p.up[row * p.up_stride + at];
    }
}

}  // namespace

template <class T>
void rms_norm(const NormParams<T>& p) {
  torch::stable::parallel_for(0, p.num_rows, grain_of(p.width), [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, double>) {
      norm_plainly(p, begin, end);
    } else {
      KVPAGER_ACTIVE(norm_rows<T>)(p, begin, end);
    }
  });
}

template <class T>
void silu_mul(const GateParams<T>& p) {
  torch::stable::parallel_for(0, p.num_rows, grain_of(p.width), [&](int64_t begin, int64_t end) {
    if constexpr (std::is_same_v<T, double>) {
      silu_mul_plainly(p, begin, end);
    } else {
      KVPAGER_ACTIVE(silu_mul_rows<T>)(p, begin, end);
    }
  });
}

#define KVPAGER_INSTANTIATE(T)                  \
  template void rms_norm(const NormParams<T>&); \
  template void silu_mul(const GateParams<T>&);
KVPAGER_INSTANTIATE(float)
KVPAGER_INSTANTIATE(double)
KVPAGER_INSTANTIATE(float16)
KVPAGER_INSTANTIATE(bfloat16)

}  // namespace kvpager::cpu

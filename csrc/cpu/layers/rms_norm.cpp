// The CPU op `rms_norm`: spreads rows over threads. float64 is computed here, plainly.
#include "../../layers/checks.h"
#include "../runtime/grain.h"
#include "../runtime/isa.h"

namespace kvpager::cpu::layers {

// Rows begin ... end - 1.
KVPAGER_DECLARE_PER_ISA(template <class T> void norm_rows(const NormParams<T>& params, int64_t begin, int64_t end))

namespace {

// Bounds as in rms_norm.isa.cpp.
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

void rms_norm(Tensor out, Tensor x, Tensor weight, std::optional<Tensor> residual, double eps) {
  with_number_type("x", x.scalar_type(), [&](auto number) {
    using T = decltype(number);
    const NormParams<T> p = norm_params<T>(out, x, weight, residual, eps);
    torch::stable::parallel_for(0, p.num_rows, grain_of(p.width), [&](int64_t begin, int64_t end) {
      if constexpr (std::is_same_v<T, double>) {
        norm_plainly(p, begin, end);
      } else {
        KVPAGER_ACTIVE(norm_rows<T>)(p, begin, end);
      }
    });
  });
}

}  // namespace
}  // namespace kvpager::cpu::layers

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) {
  library.impl("rms_norm", TORCH_BOX(&kvpager::cpu::layers::rms_norm));
}

// What stands between the linear layers: norm and activation, between the driver (layers.cpp) and the kernels
// (layers.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Rows begin ... end - 1.
KVPAGER_DECLARE_PER_ISA(template <class T> void norm_rows(const NormParams<T>& params, int64_t begin, int64_t end);
                        template <class T> void silu_mul_rows(const GateParams<T>& params, int64_t begin, int64_t end))

}  // namespace kvpager::cpu

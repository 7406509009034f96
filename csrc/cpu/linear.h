// The linear layer, between the driver (linear.cpp) and the kernel (linear.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Outputs first_output ... end_output - 1 of rows first_row ... end_row - 1.
struct LinearPart {
  int64_t first_row, end_row, first_output, end_output;
};

KVPAGER_DECLARE_PER_ISA(template <class T> void linear_part(const LinearParams<T>& params, const LinearPart& part))

}  // namespace kvpager::cpu

// The fused front end of a step, between the driver (fused.cpp) and the kernel (fused.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Norm, rotation and slot write of tokens begin ... end - 1. `row` has room for head_dim floats.
KVPAGER_DECLARE_PER_ISA(template <class T, class C>
                        void fuse_tokens(const FusedParams<T, C>& params, int64_t begin, int64_t end, float* row))

}  // namespace kvpager::cpu

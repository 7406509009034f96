// Merging, between the driver (merge.cpp) and the kernel (merge.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Merges the parts of tokens begin ... end - 1, all heads.
KVPAGER_DECLARE_PER_ISA(template <class T> void merge_tokens(const MergeParams<T>& params, int64_t begin, int64_t end))

}  // namespace kvpager::cpu

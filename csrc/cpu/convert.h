// Quantised writes and gathers, between the drivers (convert.cpp) and the kernels (convert.isa.cpp).
#pragma once
#include "../params.h"
#include "isa.h"

namespace kvpager::cpu {

// Quantises tokens begin ... end - 1 into their slots. `row` has room for head_dim floats.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void quantise_tokens(const QuantisedWriteParams<T, C>& params,
                                                                         int64_t begin, int64_t end, float* row))

// Widens positions begin ... end - 1 of a sequence into rows of key and value from first_row on.
KVPAGER_DECLARE_PER_ISA(template <class T, class C> void gather_rows(const GatherParams<T, C>& params, int64_t sequence,
                                                                     int64_t begin, int64_t end, int64_t first_row))

}  // namespace kvpager::cpu

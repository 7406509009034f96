// Passes over a row of vectors, its last one perhaps partial.
#pragma once
#include "transpose.h"

namespace kvpager::cpu::KVPAGER_ISA {

// Calls `use(at, load, store)` for every vector of a row, the last one perhaps partial.
template <class T, class F>
KVPAGER_INLINE void for_vectors(int64_t width, const F& use) {
  int64_t at = 0;
  for (; at + kWidth <= width; at += kWidth)
    use(
        at, [](const T* source) __attribute__((always_inline)) { return load(source); },
        [](T* target, Vec numbers) __attribute__((always_inline)) { store_narrow(target, numbers); });
  if (const int64_t count = width - at; count > 0)
    use(
        at, [count](const T* source) __attribute__((always_inline)) { return load_partial(source, count); },
        [count](T* target, Vec numbers)
            __attribute__((always_inline)) { store_narrow_partial(target, numbers, count); });
}

}  // namespace kvpager::cpu::KVPAGER_ISA

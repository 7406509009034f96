// Units: the widest accesses, up to 16 bytes, that divide every address and stride of a call.
//
// A launcher measures once, on the host, and picks the kernel for that unit. The kernel then counts in units in place
// of elements, so that one source serves every dtype and every alignment.
#pragma once
#include <cstdint>

#include "../../views.h"

namespace kvpager::cuda {

// Sixteen bytes, moved by one instruction.
struct alignas(16) Unit16 {
  uint32_t words[4];
};

// `count` elements of T, loaded and stored at once; the address is a multiple of the whole.
template <class T, int count>
struct alignas(count * sizeof(T)) Pack {
  T at[count];
};

template <class T, int count>
KVPAGER_HD Pack<T, count> load_pack(const T* source) {
  return *reinterpret_cast<const Pack<T, count>*>(source);
}

template <class T, int count>
KVPAGER_HD void store_pack(T* target, const Pack<T, count>& pack) {
  *reinterpret_cast<Pack<T, count>*>(target) = pack;
}

// What divides every address and byte offset it was shown.
class Alignment {
 public:
  Alignment& address(const void* pointer) { return offset(static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer))); }
  Alignment& offset(int64_t bytes) {
    seen_ |= static_cast<uint64_t>(bytes);
    return *this;
  }
  template <class T>
  Alignment& rows(const Rows<T>& rows, int64_t element_bytes) {
    return address(rows.data).offset(rows.row_stride * element_bytes).offset(rows.head_stride * element_bytes);
  }
  template <class T>
  Alignment& cache(const Cache<T>& cache, int64_t element_bytes) {
    return address(cache.data)
        .offset(cache.block_stride * element_bytes)
        .offset(cache.head_stride * element_bytes)
        .offset(cache.slot_stride * element_bytes);
  }
  bool fits(int64_t bytes) const { return seen_ % static_cast<uint64_t>(bytes) == 0; }
  // The widest unit, at most 16 bytes.
  int64_t unit_bytes() const {
    int64_t bytes = 16;
    while (!fits(bytes)) bytes /= 2;
    return bytes;
  }

 private:
  uint64_t seen_ = 0;
};

// Calls `use` with a value of the unit of that many bytes.
template <class F>
void with_unit(int64_t bytes, const F& use) {
  switch (bytes) {
    case 16: return use(Unit16{});
    case 8: return use(uint64_t{});
    case 4: return use(uint32_t{});
    case 2: return use(uint16_t{});
    default: return use(uint8_t{});
  }
}

// The same memory, counted in units of U.
template <class U, class T>
Rows<U> in_units(const Rows<T>& rows, int64_t element_bytes) {
  const int64_t unit = sizeof(U);
  return {reinterpret_cast<U*>(rows.data), rows.row_stride * element_bytes / unit,
          rows.head_stride * element_bytes / unit};
}

template <class U, class T>
Cache<U> in_units(const Cache<T>& cache, int64_t element_bytes) {
  const int64_t unit = sizeof(U);
  return {reinterpret_cast<U*>(cache.data), cache.block_stride * element_bytes / unit,
          cache.head_stride * element_bytes / unit, cache.slot_stride * element_bytes / unit};
}

}  // namespace kvpager::cuda

// Shared memory of a block: static variables, the dynamic part, and what may be done with addresses in it.
//
// Each is an allocation of its own that ends where the variable ends, so that AddressSanitizer sees a step too far;
// without it guard bytes around it are looked at when the block ends. All of it is 0xFF bytes (NaN) at first.
#pragma once
#include "scheduler.h"

namespace emulated {

constexpr size_t kMaxDynamicShared = 227 << 10;  // of a block on sm_90
constexpr size_t kSharedAlignment = 1024, kGuardBytes = 64;
constexpr unsigned char kGuard = 0xA5;
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGuards = 0;
#else
constexpr size_t kGuards = kGuardBytes;
#endif
inline constexpr char kDynamic = 0;  // the tag of the dynamic part

inline char* make_shared(Block& block, const void* tag, size_t bytes) {
  const size_t room = (bytes + kGuards + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
  void* data = nullptr;
  if (posix_memalign(&data, kSharedAlignment, kGuards ? room : bytes) != 0) die("no memory for shared memory");
  memset(data, 0xFF, bytes);
  memset(static_cast<char*>(data) + bytes, kGuard, kGuards);
  block.shared.push_back({tag, static_cast<char*>(data), bytes});
  return static_cast<char*>(data);
}

inline void make_dynamic_shared(Block& block) {
  if (device->dynamic_shared_bytes) make_shared(block, &kDynamic, device->dynamic_shared_bytes);
}

inline char* shared_variable(const void* tag, size_t bytes) {
  for (const SharedVariable& variable : own_block().shared)
    if (variable.tag == tag) return variable.data;
  return make_shared(own_block(), tag, bytes);
}

inline char* dynamic_shared() {
  for (const SharedVariable& variable : own_block().shared)
    if (variable.tag == &kDynamic) return variable.data;
  die("dynamic shared memory that the launch did not ask for");
}

inline void free_shared(Block& block) {
  for (const SharedVariable& variable : block.shared) {
    for (size_t i = 0; i < kGuards; ++i)
      if (static_cast<unsigned char>(variable.data[variable.bytes + i]) != kGuard)
        die("a write past the end of shared memory");
    free(variable.data);
  }
  block.shared.clear();
}

// Whether all of [address, address + bytes) is shared memory of the running block.
inline bool in_shared(const void* address, size_t bytes) {
  const char* first = static_cast<const char*>(address);
  for (const SharedVariable& variable : own_block().shared)
    if (first >= variable.data && first + bytes <= variable.data + variable.bytes) return true;
  return false;
}

inline void check_shared(const char* what, const void* address, size_t bytes, const Where& where) {
  if (!in_shared(address, bytes)) die(what, &where);
}

inline void check_aligned(const char* what, const void* address, size_t alignment, const Where& where) {
  if (reinterpret_cast<uintptr_t>(address) % alignment) die(what, &where);
}

}  // namespace emulated

// A variable of the block; `type` is trivial and without a comma.
#define KVPAGER_SHARED(type, name)  \
  static const char name##_tag = 0; \
  auto& name = *reinterpret_cast<std::type_identity_t<type>*>(emulated::shared_variable(&name##_tag, sizeof(type)))
// A pointer to the dynamic shared memory that the launch asked for.
#define KVPAGER_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulated::dynamic_shared())

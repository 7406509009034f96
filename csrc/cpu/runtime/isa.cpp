// Finds the instruction sets of this CPU and keeps the one that runs; read and set by kvpager/native.py.
#include "isa.h"

#include <atomic>
#include <cstring>

namespace kvpager::cpu {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

// What a set needs and this CPU (or its operating system) lacks; null if nothing.
const char* missing_for(Isa isa) {
  if (isa == Isa::baseline) return nullptr;
#if defined(__x86_64__)
  __builtin_cpu_init();
#define KVPAGER_NEED(feature) \
  if (!__builtin_cpu_supports(feature)) return feature
  KVPAGER_NEED("avx2");
  KVPAGER_NEED("fma");
  KVPAGER_NEED("f16c");
  if (isa == Isa::avx2) return nullptr;
  KVPAGER_NEED("avx512f");
  KVPAGER_NEED("avx512bw");
  KVPAGER_NEED("avx512dq");
  KVPAGER_NEED("avx512vl");
  if (isa == Isa::avx512) return nullptr;
  KVPAGER_NEED("avx512vnni");
  KVPAGER_NEED("avx512bf16");
#undef KVPAGER_NEED
  return nullptr;
#else
  return "x86-64";
#endif
}

Isa best_isa() {
  for (int isa = static_cast<int>(Isa::avx512_bf16); isa > 0; --isa)
    if (missing_for(static_cast<Isa>(isa)) == nullptr) return static_cast<Isa>(isa);
  return Isa::baseline;
}

std::atomic<Isa>& selected() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

Isa active_isa() { return selected().load(std::memory_order_relaxed); }

}  // namespace kvpager::cpu

#define KVPAGER_EXPORT extern "C" __attribute__((visibility("default")))

KVPAGER_EXPORT const char* kvpager_cpu_isa() {
  return kvpager::cpu::kNames[static_cast<int>(kvpager::cpu::active_isa())];
}

// The name of set number `index`; null past the last.
KVPAGER_EXPORT const char* kvpager_cpu_isa_name(int index) {
  return index >= 0 && index < 4 ? kvpager::cpu::kNames[index] : nullptr;
}

// The CPU feature that set number `index` needs and this machine lacks; empty if it can run.
KVPAGER_EXPORT const char* kvpager_cpu_isa_lacks(int index) {
  const char* missing = kvpager::cpu::missing_for(static_cast<kvpager::cpu::Isa>(index));
  return missing == nullptr ? "" : missing;
}

// Makes the named set the one that runs, from the next op call on; 0 if there is no such set or it can't run here.
KVPAGER_EXPORT int kvpager_select_cpu_isa(const char* name) {
  for (int index = 0; index < 4; ++index) {
    const auto isa = static_cast<kvpager::cpu::Isa>(index);
    if (strcmp(name, kvpager::cpu::kNames[index]) != 0 || kvpager::cpu::missing_for(isa) != nullptr) continue;
    kvpager::cpu::selected().store(isa, std::memory_order_relaxed);
    return 1;
  }
  return 0;
}

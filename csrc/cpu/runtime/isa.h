// Instruction sets: which ones kernels are compiled for, and which one runs.
//
// A source named `*.isa.cpp` is compiled once for each set, with the set's name as KVPAGER_ISA and its compiler flags
// (build_backend/native_build.py). All that it defines lives in a namespace KVPAGER_ISA within that of its folder. Such
// a source includes no torch header and no container: the linker merges inline functions that two sets share by name,
// and the code of the larger set could then run on a CPU that lacks it.
#pragma once

namespace kvpager::cpu {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// The set that runs: the best one this CPU has, unless another was selected. One relaxed load.
Isa active_isa();

// KVPAGER_DECLARE_PER_ISA(void f(int)) declares f in the namespace of each set that this build has, within the
// namespace around it. There KVPAGER_ACTIVE(f) points to the one that runs.
#if defined(__x86_64__)
#define KVPAGER_DECLARE_PER_ISA(...) \
  namespace baseline {               \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx2 {                   \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx512 {                 \
  __VA_ARGS__;                       \
  }                                  \
  namespace avx512_bf16 {            \
  __VA_ARGS__;                       \
  }
#define KVPAGER_ACTIVE(...) \
  (::kvpager::cpu::pick(&baseline::__VA_ARGS__, &avx2::__VA_ARGS__, &avx512::__VA_ARGS__, &avx512_bf16::__VA_ARGS__))
template <class F>
F* pick(F* baseline, F* avx2, F* avx512, F* avx512_bf16) {
  F* const functions[] = {baseline, avx2, avx512, avx512_bf16};
  return functions[static_cast<int>(active_isa())];
}
#else
#define KVPAGER_DECLARE_PER_ISA(...) \
  namespace baseline {               \
  __VA_ARGS__;                       \
  }
#define KVPAGER_ACTIVE(...) (&baseline::__VA_ARGS__)
#endif

}  // namespace kvpager::cpu

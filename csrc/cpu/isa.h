// Instruction sets: which ones kernels are compiled for, and which one runs.
//
// A source named `*.isa.cpp` is compiled once for each set, with the set's name as KVPAGER_ISA and its compiler flags
// (build_backend/native_build.py); all it defines lives in `kvpager::cpu::KVPAGER_ISA`. Such a source includes no torch
// header and no container: an inline function that two sets share by name would be merged by the linker, and the code
// of the larger set could then run on a CPU that lacks it.
#pragma once

namespace kvpager::cpu {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// The set that runs: the best one this CPU has, unless another was selected. One relaxed load.
Isa active_isa();

// KVPAGER_DECLARE_PER_ISA(void f(int)) declares f in the namespace of each set that this build has;
// KVPAGER_ACTIVE(f) is the one that runs.
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
#define KVPAGER_ACTIVE(function)                                                                            \
  (::kvpager::cpu::active_isa() == ::kvpager::cpu::Isa::avx512_bf16                                         \
       ? ::kvpager::cpu::avx512_bf16::function                                                              \
       : (::kvpager::cpu::active_isa() == ::kvpager::cpu::Isa::avx512                                       \
              ? ::kvpager::cpu::avx512::function                                                            \
              : (::kvpager::cpu::active_isa() == ::kvpager::cpu::Isa::avx2 ? ::kvpager::cpu::avx2::function \
                                                                           : ::kvpager::cpu::baseline::function)))
#else
#define KVPAGER_DECLARE_PER_ISA(...) \
  namespace baseline {               \
  __VA_ARGS__;                       \
  }
#define KVPAGER_ACTIVE(function) ::kvpager::cpu::baseline::function
#endif

}  // namespace kvpager::cpu

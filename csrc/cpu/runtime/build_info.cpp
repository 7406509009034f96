// What the library was built with; read by Python when it loads the library.
#define KVPAGER_STRINGIZE_(x) #x
#define KVPAGER_STRINGIZE(x) KVPAGER_STRINGIZE_(x)

extern "C" __attribute__((visibility("default"))) const char* kvpager_build_info() {
  return "torch abi target " KVPAGER_STRINGIZE(TORCH_TARGET_VERSION) ", compiler " __VERSION__
#if defined(KVPAGER_CUDA_ARCHS)
                                                                     ", cuda " KVPAGER_CUDA_ARCHS
#endif
      ;
}

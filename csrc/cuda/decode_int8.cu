// Decode attention on tensor cores over int8 caches; compiled apart, since it takes long.
#include "decode.cuh"

namespace kvpager::cuda {

template void launch_decode(const AttentionParams<bfloat16, int8_code>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);
template void launch_decode(const AttentionParams<float16, int8_code>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);

}  // namespace kvpager::cuda

// Decode attention on tensor cores over caches of bfloat16 and float16; compiled apart, since it takes long.
#include "decode.cuh"

namespace kvpager::cuda {

template void launch_decode(const AttentionParams<bfloat16, bfloat16>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);
template void launch_decode(const AttentionParams<float16, float16>&, const Schedule&, const Workspace&, int64_t,
                            Stream, unsigned*);

}  // namespace kvpager::cuda

// The CPU op `take_errors`. Nothing is ever pending on the CPU, whose kernels raise at once.
#include "../../tensors.h"

namespace kvpager::cpu {
namespace {

void take_errors(Tensor word) {
  check_tensor("word", word, ScalarType::Long, word, {1});
  *static_cast<int64_t*>(word.mutable_data_ptr()) = 0;
}

}  // namespace
}  // namespace kvpager::cpu

STABLE_TORCH_LIBRARY_IMPL(kvpager, CPU, library) { library.impl("take_errors", TORCH_BOX(&kvpager::cpu::take_errors)); }

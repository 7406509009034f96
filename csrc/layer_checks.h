// From tensors to the params of the layers around attention; see checks.h.
#pragma once
#include "checks.h"

namespace kvpager {

// [rows, width] of the dtype of `beside`; -1 takes any size.
inline void check_matrix(const char* argument, const Tensor& tensor, const Tensor& beside, int64_t rows,
                         int64_t width) {
  check_tensor(argument, tensor, beside.scalar_type(), beside, {rows, width});
  check_last_contiguous(argument, tensor);
}

template <class T>
LinearParams<T> linear_params(const Tensor& out, const Tensor& x, const Tensor& weight,
                              const std::optional<Tensor>& bias) {
  check_matrix("x", x, x, -1, -1);
  const int64_t num_rows = x.size(0), depth = x.size(1);
  check_matrix("weight", weight, x, -1, depth);
  const int64_t num_outputs = weight.size(0);
  check_matrix("out", out, x, num_rows, num_outputs);
  check_written("out", out);
  if (bias) {
    check_tensor("bias", *bias, x.scalar_type(), x, {num_outputs});
    check_last_contiguous("bias", *bias);
  }
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
          out.stride(0),
          x.stride(0),
          weight.stride(0),
          num_rows,
          num_outputs,
          depth};
}

template <class T>
NormParams<T> norm_params(const Tensor& out, const Tensor& x, const Tensor& weight,
                          const std::optional<Tensor>& residual, double eps) {
  check_matrix("x", x, x, -1, -1);
  const int64_t num_rows = x.size(0), width = x.size(1);
  check_matrix("out", out, x, num_rows, width);
  check_written("out", out);
  check_tensor("weight", weight, x.scalar_type(), x, {width});
  check_last_contiguous("weight", weight);
  if (residual) {
    check_matrix("residual", *residual, x, num_rows, width);
    check_written("residual", *residual);
  }
  if (!(eps >= 0)) fail_argument("eps", "0 or more", std::to_string(eps));
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(x.const_data_ptr()),
          static_cast<const T*>(weight.const_data_ptr()),
          residual ? static_cast<T*>(residual->mutable_data_ptr()) : nullptr,
          out.stride(0),
          x.stride(0),
          residual ? residual->stride(0) : 0,
          num_rows,
          width,
          static_cast<accumulate_t<T>>(eps)};
}

template <class T>
GateParams<T> gate_params(const Tensor& out, const Tensor& gate, const Tensor& up) {
  check_matrix("gate", gate, gate, -1, -1);
  check_matrix("up", up, gate, gate.size(0), gate.size(1));
  check_matrix("out", out, gate, gate.size(0), gate.size(1));
  check_written("out", out);
  return {static_cast<T*>(out.mutable_data_ptr()),
          static_cast<const T*>(gate.const_data_ptr()),
          static_cast<const T*>(up.const_data_ptr()),
          out.stride(0),
          gate.stride(0),
          up.stride(0),
          gate.size(0),
          gate.size(1)};
}

}  // namespace kvpager

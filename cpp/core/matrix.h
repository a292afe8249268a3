// A buffer of any rank seen as a row-major matrix: its last `column_axes` axes are the columns. Tokens
// keep their axes in JAX, where flattening them would force a reshard; here it costs nothing.
#pragma once

#include "core/ffi.h"

namespace te {

struct Matrix {
  void* data;
  DType dtype;
  int64_t rows;
  int64_t cols;

  int64_t size() const { return rows * cols; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool absent(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == DType::F32 && buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0;
}
inline bool present(const ffi::AnyBuffer& buffer) { return !absent(buffer); }
inline bool present(Out& buffer) { return present(*buffer); }

inline Matrix matrix(const ffi::AnyBuffer& buffer, int64_t column_axes) {
  const auto dims = buffer.dimensions();
  const int64_t rank = static_cast<int64_t>(dims.size());
  Matrix m{buffer.untyped_data(), buffer.element_type(), 1, 1};
  for (int64_t i = 0; i < rank; ++i) (i < rank - column_axes ? m.rows : m.cols) *= dims[i];
  return m;
}
inline Matrix matrix(Out& buffer, int64_t column_axes) { return matrix(*buffer, column_axes); }

template <typename T>
T* data_or_null(const ffi::AnyBuffer& buffer) {
  return absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}
template <typename T>
T* data_or_null(Out& buffer) {
  return data_or_null<T>(*buffer);
}

}  // namespace te

// What a handler may not assume about its buffers. A Check collects the first mistake of a call as
// "te_quantize: scale: expected f32[], got f32[3]"; handlers return it and never throw or exit.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

#include "core/matrix.h"

namespace te {

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::F32: return "f32";
    case DType::F16: return "f16";
    case DType::BF16: return "bf16";
    case DType::F8E4M3FN: return "f8_e4m3fn";
    case DType::F8E5M2: return "f8_e5m2";
    case DType::F64: return "f64";
    case DType::S32: return "s32";
    case DType::U8: return "u8";
    case DType::U32: return "u32";
    case DType::PRED: return "pred";
    default: return "another dtype";
  }
}

inline std::string describe(const ffi::AnyBuffer& buffer) {
  std::string text = std::string(name_of(buffer.element_type())) + "[";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i ? "," : "") + std::to_string(buffer.dimensions()[i]);
  }
  return text + "]";
}

inline bool is_fp8(DType t) { return t == DType::F8E4M3FN || t == DType::F8E5M2; }
inline bool is_float(DType t) { return t == DType::F32 || t == DType::F16 || t == DType::BF16; }

// What a message says of something: a text, a number, a buffer, or the result of a function.
inline std::string in_words(std::string_view text) { return std::string(text); }
inline std::string in_words(const ffi::AnyBuffer& buffer) { return describe(buffer); }
inline std::string in_words(float number) { return std::to_string(number); }
template <typename Words>
auto in_words(const Words& words) -> decltype(std::string(words())) {
  return words();
}

class Check {
 public:
  explicit Check(const char* op) : op_(op) {}

  // Words are found for mistakes only: a training step makes dozens of calls, each with a dozen checks.
  template <typename Expected, typename Got>
  Check& that(bool ok, const char* argument, const Expected& expected, const Got& got) {
    if (!ok && message_.empty()) {
      message_ = std::string(op_) + ": " + argument + ": expected " + in_words(expected) + ", got " + in_words(got);
    }
    return *this;
  }
  // f32[]: a scale or an amax. Absent is allowed where `optional`.
  Check& scalar(const char* argument, const ffi::AnyBuffer& b, bool optional = false) {
    const bool ok = b.element_type() == DType::F32 && b.dimensions().size() == 0;
    return that(ok || (optional && absent(b)), argument, "f32[]", b);
  }
  Check& high_precision(const char* argument, const ffi::AnyBuffer& b) {
    return that(is_float(b.element_type()), argument, "f32, f16 or bf16", b);
  }
  Check& fp8(const char* argument, const ffi::AnyBuffer& b) {
    return that(is_fp8(b.element_type()), argument, "f8_e4m3fn or f8_e5m2", b);
  }
  Check& dtype(const char* argument, const ffi::AnyBuffer& b, DType expected) {
    return that(b.element_type() == expected, argument, name_of(expected), b);
  }
  Check& axes(const char* argument, const ffi::AnyBuffer& b, int64_t column_axes) {
    const int64_t rank = static_cast<int64_t>(b.dimensions().size());
    return that(
        column_axes >= 0 && column_axes <= rank, argument,
        [&] { return "at least " + std::to_string(column_axes) + " axes"; }, b);
  }
  // The number of elements of a buffer that is addressed as rows x cols.
  Check& size(const char* argument, const ffi::AnyBuffer& b, int64_t rows, int64_t cols) {
    return that(
        static_cast<int64_t>(b.element_count()) == rows * cols, argument,
        [&] { return std::to_string(rows) + " x " + std::to_string(cols) + " elements"; }, b);
  }

  bool failed() const { return !message_.empty(); }
  ffi::Error error() const { return ffi::Error::InvalidArgument(message_); }

 private:
  const char* op_;
  std::string message_;
};

}  // namespace te

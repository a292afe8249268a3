// A result that its op may quantize while it stores it. y[rows, cols] is FP8 exactly when `scale` is given
// (y = cast(value * scale)); only then may its transposed copy y_t[cols, rows] be asked for. amax, where
// asked for, is max |value| before scaling, or max |y| where y is not FP8. Some ops may do without y: beside a
// transposed copy, or where they only measure.
#pragma once

#include "core/scaling.h"

namespace te {

inline Check& check_result(Check& check, const Casting& casting, const char* y_name, Out& y, const char* y_t_name,
                           Out& y_t, int64_t rows, int64_t cols, bool optional_y = false) {
  casting.check(check);
  const In& scale = casting.scale;
  const bool without_y = optional_y && absent(*y);
  if (absent(scale)) {
    check.that(absent(*y_t), y_t_name, "no transposed copy without a scale", *y_t);
    return without_y ? check : check.high_precision(y_name, *y).size(y_name, *y, rows, cols);
  }
  if (without_y) {
    check.that(present(y_t), y_name, "a result to scale", "none");
  } else {
    check.fp8(y_name, *y).size(y_name, *y, rows, cols);
  }
  if (absent(*y_t)) return check;
  if (!without_y) check.dtype(y_t_name, *y_t, y->element_type());
  return check.fp8(y_t_name, *y_t).size(y_t_name, *y_t, cols, rows);
}

// The dtype of a result that its transposed copy may stand for; `otherwise` where neither is stored.
inline DType stored_dtype(Out& y, Out& y_t, DType otherwise = DType::F32) {
  return present(y) ? y->element_type() : present(y_t) ? y_t->element_type() : otherwise;
}

}  // namespace te

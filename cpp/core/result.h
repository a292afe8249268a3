// A result that its op may quantize while it stores it. y[rows, cols] is FP8 exactly when `scale` is given
// (y = cast(value * scale)); only then may its transposed copy y_t[cols, rows] be asked for. amax, where
// asked for, is max |value| before scaling, or max |y| where y is not FP8. Some ops may do without y: they only
// measure.
#pragma once

#include "core/scaling.h"

namespace te {

inline Check& check_result(Check& check, const Casting& casting, const char* y_name, Out& y, const char* y_t_name,
                           Out& y_t, int64_t rows, int64_t cols, bool optional_y = false) {
  casting.check(check);
  const In& scale = casting.scale;
  if (optional_y && absent(*y)) {
    return check.that(absent(scale) && absent(*y_t), y_name, "a result to scale or to transpose", "none");
  }
  if (present(scale)) {
    check.fp8(y_name, *y);
  } else {
    check.high_precision(y_name, *y);
    check.that(absent(*y_t), y_t_name, "no transposed copy without a scale", *y_t);
  }
  check.size(y_name, *y, rows, cols);
  if (present(y_t)) check.dtype(y_t_name, *y_t, y->element_type()).size(y_t_name, *y_t, cols, rows);
  return check;
}

}  // namespace te

// te_measure, te_quantize, te_quantize_stack, te_dequantize: what the CPU and the CUDA handlers of these targets agree
// on.
//
//   te_quantize: x[rows, cols], scale (absent: 1) -> q[rows, cols]?, q_t[cols, rows]?, amax f32[]?, colsum f32[cols]?,
//                report f32[bins]?, scale_inv f32[]?
//   te_quantize_stack: x0[rows, cols], x1, x2?, scale -> as te_quantize of their stack, where cols is a multiple of 8:
//                q[rows, P, cols]?, q_t[P, cols, rows]?, amax f32[]?, colsum f32[P, cols]?, ..
//   te_measure: x0, x1?, x2? of one size -> amax f32[]?, report f32[bins]? of them together; NaN where one holds a NaN
//   te_dequantize: q, scale_inv f32[] -> x
#pragma once

#include "core/result.h"

namespace te {

struct QuantizeAttributes : Scaling {
  int64_t k_axes;  // how many of x's last axes are the columns
};

inline Check& check_casts(Check& check, Out& q, Out& q_t, Out& colsum, int64_t rows, int64_t cols) {
  if (present(q)) check.fp8("q", *q).size("q", *q, rows, cols);
  if (present(q_t)) check.fp8("q_t", *q_t).size("q_t", *q_t, cols, rows);
  if (present(q) && present(q_t)) check.dtype("q_t", *q_t, q->element_type());
  if (present(colsum)) check.dtype("colsum", *colsum, DType::F32).size("colsum", *colsum, 1, cols);
  return check;
}

inline Check check_quantize(const In& x, const Casting& casting, Out& q, Out& q_t, Out& colsum, int64_t k_axes) {
  Check check("te_quantize");
  casting.check(check.high_precision("x", x).axes("x", x, k_axes));
  if (check.failed()) return check;
  const Matrix m = matrix(x, k_axes);
  return check_casts(check, q, q_t, colsum, m.rows, m.cols);
}

inline Check check_measure(const In& x0, const In& x1, const In& x2, Out& amax, Out& report) {
  Check check("te_measure");
  check_measured(check.high_precision("x0", x0), amax, report);
  for (const auto& [name, x] : {std::pair<const char*, const In&>{"x1", x1}, {"x2", x2}}) {
    if (absent(x)) continue;
    check.dtype(name, x, x0.element_type()).size(name, x, static_cast<int64_t>(x0.element_count()), 1);
  }
  return check;
}

inline int64_t parts_of(const In& x2) { return absent(x2) ? 2 : 3; }

inline Check check_quantize_stack(const In& x0, const In& x1, const In& x2, const Casting& casting, Out& q, Out& q_t,
                                  Out& colsum) {
  Check check("te_quantize_stack");
  casting.check(check.high_precision("x0", x0).axes("x0", x0, 1));
  if (check.failed()) return check;
  const Matrix m = matrix(x0, 1);
  check.that(m.cols % 8 == 0, "x0", "a last axis of a multiple of 8", x0);
  check.dtype("x1", x1, m.dtype).size("x1", x1, m.rows, m.cols);
  if (!absent(x2)) check.dtype("x2", x2, m.dtype).size("x2", x2, m.rows, m.cols);
  return check_casts(check, q, q_t, colsum, m.rows, parts_of(x2) * m.cols);
}

inline DType format_of(Out& q, Out& q_t) { return stored_dtype(q, q_t, DType::F8E4M3FN); }

inline Check check_dequantize(const In& q, const In& scale_inv, Out& x) {
  Check check("te_dequantize");
  check.fp8("q", q).scalar("scale_inv", scale_inv).high_precision("x", *x);
  return check.size("x", *x, static_cast<int64_t>(q.element_count()), 1);
}

}  // namespace te

TE_ATTRIBUTES(te::Scaling, TE_SCALING);
TE_ATTRIBUTES(te::QuantizeAttributes, TE_SCALING, TE_ATTRIBUTE(int64_t, k_axes));

// te_amax, te_quantize, te_dequantize: what the CPU and the CUDA handlers of these targets agree on.
//
//   te_quantize: x[rows, cols], scale f32[] (absent: 1) -> q[rows, cols], q_t[cols, rows], amax f32[],
//                colsum f32[cols]; q, q_t and colsum are each absent where not asked for
//   te_quantize_stack: x0[rows, cols], x1, x2?, scale -> as te_quantize of [rows, P, cols], their stack: q[rows, P,
//   cols],
//                q_t[P, cols, rows], amax, colsum f32[P, cols]; cols is a multiple of 8
//   te_amax: x -> f32[], max |x|; NaN where x holds a NaN
//   te_dequantize: q, scale_inv f32[] -> x
#pragma once

#include "core/check.h"

namespace te {

struct QuantizeAttributes {
  int64_t k_axes;  // how many of x's last axes are the columns
};

inline Check check_quantize(const In& x, const In& scale, Out& q, Out& q_t, Out& amax, Out& colsum, int64_t k_axes) {
  Check check("te_quantize");
  check.high_precision("x", x).axes("x", x, k_axes).scalar("scale", scale, /*optional=*/true).scalar("amax", *amax);
  if (check.failed()) return check;
  const Matrix m = matrix(x, k_axes);
  if (present(q)) check.fp8("q", *q).size("q", *q, m.rows, m.cols);
  if (present(q_t)) check.fp8("q_t", *q_t).size("q_t", *q_t, m.cols, m.rows);
  if (present(q) && present(q_t)) check.dtype("q_t", *q_t, q->element_type());
  if (present(colsum)) check.dtype("colsum", *colsum, DType::F32).size("colsum", *colsum, 1, m.cols);
  return check;
}

inline int64_t parts_of(const In& x2) { return absent(x2) ? 2 : 3; }

inline Check check_quantize_stack(const In& x0, const In& x1, const In& x2, const In& scale, Out& q, Out& q_t,
                                  Out& amax, Out& colsum) {
  Check check("te_quantize_stack");
  check.high_precision("x0", x0).axes("x0", x0, 1).scalar("scale", scale, /*optional=*/true).scalar("amax", *amax);
  if (check.failed()) return check;
  const Matrix m = matrix(x0, 1);
  check.that(m.cols % 8 == 0, "x0", "a last axis of a multiple of 8", x0);
  check.dtype("x1", x1, m.dtype).size("x1", x1, m.rows, m.cols);
  if (!absent(x2)) check.dtype("x2", x2, m.dtype).size("x2", x2, m.rows, m.cols);
  const int64_t cols = parts_of(x2) * m.cols;
  if (present(q)) check.fp8("q", *q).size("q", *q, m.rows, cols);
  if (present(q_t)) check.fp8("q_t", *q_t).size("q_t", *q_t, cols, m.rows);
  if (present(q) && present(q_t)) check.dtype("q_t", *q_t, q->element_type());
  if (present(colsum)) check.dtype("colsum", *colsum, DType::F32).size("colsum", *colsum, 1, cols);
  return check;
}

inline DType format_of(Out& q, Out& q_t) {
  return present(q) ? q->element_type() : present(q_t) ? q_t->element_type() : DType::F8E4M3FN;
}

inline Check check_dequantize(const In& q, const In& scale_inv, Out& x) {
  Check check("te_dequantize");
  check.fp8("q", q).scalar("scale_inv", scale_inv).high_precision("x", *x);
  return check.size("x", *x, static_cast<int64_t>(q.element_count()), 1);
}

}  // namespace te

TE_ATTRIBUTES(te::QuantizeAttributes, TE_ATTRIBUTE(int64_t, k_axes));

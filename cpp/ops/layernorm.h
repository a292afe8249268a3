// te_layernorm_fwd, te_layernorm_bwd, te_rmsnorm_fwd, te_rmsnorm_bwd: what the CPU and the CUDA handlers of
// these targets agree on. K is the last axis of x; rows are all axes before it.
//
//   layernorm_fwd: x[rows, K], gamma[K], beta[K], scale?, known_mean f32[rows]?, known_rstd f32[rows]?
//                  -> y[rows, K], y_t[K, rows]?, mean f32[rows], rstd f32[rows], amax?, report?, scale_inv?
//                                                      y = (x - mean) * rstd * g + beta
//   rmsnorm_fwd:   the same without beta and means     y = x * rstd * g
//   layernorm_bwd: dy[rows, K], x, gamma, mean, rstd, residual[rows, K]? -> dx[rows, K], dgamma f32[K], dbeta f32[K]
//   rmsnorm_bwd:   the same without mean and dbeta
//
// What a cast is told of its scale, and tells of it, is core/scaling.h's Casting.
//
// g is gamma, or 1 + gamma where gamma is stored zero-centred. rstd = 1 / sqrt(variance + epsilon), or of the
// mean square for rmsnorm; where they are known from a call before they are operands, not results. All arithmetic is in
// f32. With xhat = (x - mean) * rstd and wdy = dy * g,
// dx = rstd * (wdy - mean_K(wdy) - xhat * mean_K(wdy * xhat)) + residual, without the middle term for rmsnorm. The
// residual is the gradient that reaches x past the norm.
#pragma once

#include "core/result.h"

namespace te {

struct NormFwdAttributes : Scaling {
  float epsilon;
  bool zero_centered_gamma;
};
struct NormBwdAttributes {
  bool zero_centered_gamma;
};

// Kernels that count rows in 32 bits have fewer; with more, others run.
constexpr int64_t kMostRows = 1 << 30;

// x and the parameter that every norm has. K is 0 where the check failed already.
inline int64_t check_norm_input(Check& check, const In& x, const In& gamma) {
  check.high_precision("x", x).axes("x", x, 1).high_precision("gamma", gamma);
  if (check.failed()) return 0;
  const int64_t k = matrix(x, 1).cols;
  check.size("gamma", gamma, 1, k);
  return k;
}

inline void check_row_statistic(Check& check, const char* name, const ffi::AnyBuffer& statistic, int64_t rows) {
  check.dtype(name, statistic, DType::F32).size(name, statistic, rows, 1);
}

// A statistic that is an operand or else a result.
struct RowStatistic {
  const In& known;
  Out& computed;

  float* data() const { return (present(known) ? known : *computed).typed_data<float>(); }
  void check(Check& check, const char* name, const char* known_name, int64_t rows) const {
    if (absent(known)) return check_row_statistic(check, name, *computed, rows);
    check_row_statistic(check, known_name, known, rows);
    check.that(absent(*computed), name, "no result where it is known", *computed);
  }
};

inline Check check_rmsnorm_fwd(const In& x, const In& gamma, const Casting& casting, Out& y, Out& y_t,
                               const RowStatistic& rstd, const char* op = "te_rmsnorm_fwd") {
  Check check(op);
  const int64_t k = check_norm_input(check, x, gamma);
  if (check.failed()) return check;
  const int64_t rows = matrix(x, 1).rows;
  rstd.check(check, "rstd", "known_rstd", rows);
  return check_result(check, casting, "y", y, "y_t", y_t, rows, k, /*optional_y=*/true);
}

inline Check check_layernorm_fwd(const In& x, const In& gamma, const In& beta, const Casting& casting, Out& y, Out& y_t,
                                 const RowStatistic& mean, const RowStatistic& rstd) {
  Check check = check_rmsnorm_fwd(x, gamma, casting, y, y_t, rstd, "te_layernorm_fwd");
  if (check.failed()) return check;
  mean.check(check, "mean", "known_mean", matrix(x, 1).rows);
  check.that(absent(mean.known) == absent(rstd.known), "known_mean", "one exactly where known_rstd is", mean.known);
  return check.high_precision("beta", beta).size("beta", beta, 1, matrix(x, 1).cols);
}

inline Check check_rmsnorm_bwd(const In& dy, const In& x, const In& gamma, const In& rstd, const In& residual, Out& dx,
                               Out& dgamma, const char* op = "te_rmsnorm_bwd") {
  Check check(op);
  const int64_t k = check_norm_input(check, x, gamma);
  if (check.failed()) return check;
  const int64_t rows = matrix(x, 1).rows;
  check_row_statistic(check, "rstd", rstd, rows);
  check.high_precision("dy", dy).size("dy", dy, rows, k);
  if (!absent(residual)) check.dtype("residual", residual, x.element_type()).size("residual", residual, rows, k);
  check.dtype("dx", *dx, x.element_type()).size("dx", *dx, rows, k);
  return check.dtype("dgamma", *dgamma, DType::F32).size("dgamma", *dgamma, 1, k);
}

inline Check check_layernorm_bwd(const In& dy, const In& x, const In& gamma, const In& mean, const In& rstd,
                                 const In& residual, Out& dx, Out& dgamma, Out& dbeta) {
  Check check = check_rmsnorm_bwd(dy, x, gamma, rstd, residual, dx, dgamma, "te_layernorm_bwd");
  if (check.failed()) return check;
  check_row_statistic(check, "mean", mean, matrix(x, 1).rows);
  return check.dtype("dbeta", *dbeta, DType::F32).size("dbeta", *dbeta, 1, matrix(x, 1).cols);
}

}  // namespace te

TE_ATTRIBUTES(te::NormFwdAttributes, TE_SCALING, TE_ATTRIBUTE(float, epsilon), TE_ATTRIBUTE(bool, zero_centered_gamma));
TE_ATTRIBUTES(te::NormBwdAttributes, TE_ATTRIBUTE(bool, zero_centered_gamma));

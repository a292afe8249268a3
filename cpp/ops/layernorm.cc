// LayerNorm and RMSNorm on the CPU, a row at a time: the statistics in two passes (mean, then centred squares, which
// keeps the variance of data far from zero), then the normalised row, stored by store_rows. The passes over a row
// hit the first-level cache; memory sees x and y once forward (8 bytes an element for f32), and dy, x and dx once
// backward (12 bytes).
#include "ops/layernorm.h"

#include <cmath>

#include "core/rows.h"

namespace te {
namespace {

struct Statistics {
  float mean;  // 0 for RMSNorm
  float rstd;
};

// ---- Inner loops

template <bool kCentred>
TE_SIMD Statistics statistics_row(const float* x, float epsilon, int64_t k) {
  const float count = static_cast<float>(k);
  float mean = 0.f;
  if constexpr (kCentred) {
    LaneSum sum;
    for_lanes(k, [&](int64_t i, int l) { sum.lane[l] += x[i]; });
    mean = sum.total() / count;
  }
  LaneSum squares;
  for_lanes(k, [&](int64_t i, int l) {
    const float centred = x[i] - mean;
    squares.lane[l] += centred * centred;
  });
  return {mean, 1.f / std::sqrt(squares.total() / count + epsilon)};
}

// y = (x - mean) * rstd * g + beta; beta is null for RMSNorm.
TE_SIMD void normalize_row(const float* x, Statistics s, const float* g, const float* beta, float* y, int64_t k) {
  if (beta) {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < k; ++i) y[i] = (x[i] - s.mean) * s.rstd * g[i] + beta[i];
  } else {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < k; ++i) y[i] = x[i] * s.rstd * g[i];
  }
}

template <bool kCentred>
TE_SIMD void gradient_row(const float* dy, const float* x, Statistics s, const float* g, float* dx, float* dgamma,
                          float* dbeta, int64_t k) {
  LaneSum along_xhat, along_one;  // sums of wdy * xhat and of wdy
  for_lanes(k, [&](int64_t i, int l) {
    const float xhat = (x[i] - s.mean) * s.rstd;
    const float wdy = dy[i] * g[i];
    dgamma[i] += dy[i] * xhat;
    along_xhat.lane[l] += wdy * xhat;
    if constexpr (kCentred) {
      dbeta[i] += dy[i];
      along_one.lane[l] += wdy;
    }
  });
  const float count = static_cast<float>(k);
  const float c_xhat = along_xhat.total() / count;
  const float c_one = along_one.total() / count;
  TE_ELEMENTWISE
  for (int64_t i = 0; i < k; ++i) {
    const float xhat = (x[i] - s.mean) * s.rstd;
    dx[i] = (dy[i] * g[i] - c_one - xhat * c_xhat) * s.rstd;
  }
}

// ---- Both norms; what LayerNorm has and RMSNorm has not is null.

// gamma or beta in f32, with 1 added to a zero-centred gamma.
std::vector<float> parameter(const In& values, bool zero_centered = false) {
  const FloatRows row(values, static_cast<int64_t>(values.dimensions().size()));
  std::vector<float> wide(row.cols());
  const float* source = row.at(0, wide.data());
  for (int64_t i = 0; i < row.cols(); ++i) wide[i] = zero_centered ? source[i] + 1.f : source[i];
  return wide;
}

template <bool kCentred>
ffi::Error forward(ffi::ThreadPool& pool, const In& x, const In& gamma, const float* beta, const Casting& casting,
                   Out& y, Out& y_t, float* mean, const RowStatistic& rstd, const NormFwdAttributes& attributes) {
  const FloatRows input(x, 1);
  const RowsResult result = rows_result(y, casting, y_t, input.rows(), input.cols());
  const std::vector<float> g = parameter(gamma, attributes.zero_centered_gamma);
  float* const rstds = rstd.data();
  const bool known = present(rstd.known);
  store_rows(pool, result, [&](int64_t row, float* values, float*) {
    const float* x_row = input.at(row, values);
    Statistics s;
    if (known) {
      s = {kCentred ? mean[row] : 0.f, rstds[row]};
    } else {
      s = statistics_row<kCentred>(x_row, attributes.epsilon, input.cols());
      if constexpr (kCentred) mean[row] = s.mean;
      rstds[row] = s.rstd;
    }
    normalize_row(x_row, s, g.data(), beta, values, input.cols());
  });
  return ffi::Error::Success();
}

template <bool kCentred>
ffi::Error backward(ffi::ThreadPool& pool, const In& dy, const In& x, const In& gamma, const float* mean,
                    const float* rstd, const In& residual, Out& dx, float* dgamma, float* dbeta,
                    NormBwdAttributes attributes) {
  const FloatRows input(x, 1), cotangent(dy, input.rows(), input.cols());
  const FloatRows past(absent(residual) ? dy : residual, input.rows(), input.cols());
  const std::vector<float> g = parameter(gamma, attributes.zero_centered_gamma);
  const RowsResult result{result_matrix(dx, input.rows(), input.cols()), 1.f, nullptr, {}, nullptr};
  ColumnSums dgammas(result.y.rows, result.y.cols), dbetas(kCentred ? result.y.rows : 0, result.y.cols);
  store_rows(pool, result, [&](int64_t row, float* values, float* scratch) {
    const Statistics s{kCentred ? mean[row] : 0.f, rstd[row]};
    gradient_row<kCentred>(cotangent.at(row, scratch), input.at(row, values), s, g.data(), values, dgammas.at(row),
                           kCentred ? dbetas.at(row) : nullptr, input.cols());
    if (!absent(residual)) add_row(past.at(row, scratch), values, input.cols());
  });
  dgammas.total(dgamma);
  if constexpr (kCentred) dbetas.total(dbeta);
  return ffi::Error::Success();
}

}  // namespace

// ---- Handlers

ffi::Error LayerNormFwd(ffi::ThreadPool pool, In x, In gamma, In beta, In scale, In known_mean, In known_rstd, Out y,
                        Out y_t, Out mean, Out rstd, Out amax, Out report, Out scale_inv,
                        NormFwdAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const RowStatistic means{known_mean, mean}, rstds{known_rstd, rstd};
  const Check check = check_layernorm_fwd(x, gamma, beta, casting, y, y_t, means, rstds);
  if (check.failed()) return check.error();
  return forward<true>(pool, x, gamma, parameter(beta).data(), casting, y, y_t, means.data(), rstds, attributes);
}

ffi::Error RmsNormFwd(ffi::ThreadPool pool, In x, In gamma, In scale, In known_rstd, Out y, Out y_t, Out rstd, Out amax,
                      Out report, Out scale_inv, NormFwdAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const RowStatistic rstds{known_rstd, rstd};
  const Check check = check_rmsnorm_fwd(x, gamma, casting, y, y_t, rstds);
  if (check.failed()) return check.error();
  return forward<false>(pool, x, gamma, nullptr, casting, y, y_t, nullptr, rstds, attributes);
}

ffi::Error LayerNormBwd(ffi::ThreadPool pool, In dy, In x, In gamma, In mean, In rstd, In residual, Out dx, Out dgamma,
                        Out dbeta, NormBwdAttributes attributes) {
  const Check check = check_layernorm_bwd(dy, x, gamma, mean, rstd, residual, dx, dgamma, dbeta);
  if (check.failed()) return check.error();
  return backward<true>(pool, dy, x, gamma, mean.typed_data<float>(), rstd.typed_data<float>(), residual, dx,
                        dgamma->typed_data<float>(), dbeta->typed_data<float>(), attributes);
}

ffi::Error RmsNormBwd(ffi::ThreadPool pool, In dy, In x, In gamma, In rstd, In residual, Out dx, Out dgamma,
                      NormBwdAttributes attributes) {
  const Check check = check_rmsnorm_bwd(dy, x, gamma, rstd, residual, dx, dgamma);
  if (check.failed()) return check.error();
  return backward<false>(pool, dy, x, gamma, nullptr, rstd.typed_data<float>(), residual, dx,
                         dgamma->typed_data<float>(), nullptr, attributes);
}

}  // namespace te

TE_HANDLER(layernorm_fwd, LayerNormFwd)
TE_HANDLER(rmsnorm_fwd, RmsNormFwd)
TE_HANDLER(layernorm_bwd, LayerNormBwd)
TE_HANDLER(rmsnorm_bwd, RmsNormBwd)

// Activations on the CPU: a row of z (and dy) at a time goes through the curve in f32 and is stored by store_rows,
// which casts, transposes and sums it. Memory sees each operand and result once: for f32, 4 (A + 1) bytes for an
// element of y forward, 4 (2A + 1) backward.
#include "ops/activation.h"

#include "core/rows.h"

namespace te {
namespace {

// ---- Inner loops. `gate` and `dgate` are z[1] and its gradient, null for A = 1.

template <typename C>
TE_SIMD void curve_row(C curve, const float* z, const float* gate, float* y, int64_t n) {
  if (gate) {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) y[i] = curve.at(z[i]).value * curve.gate(gate[i]).value;
  } else {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) y[i] = curve.at(z[i]).value;
  }
}

template <typename C>
TE_SIMD void curve_gradient_row(C curve, const float* dy, const float* z, const float* gate, float* dz, float* dgate,
                                int64_t n) {
  if (gate) {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) {
      const Point p = curve.at(z[i]), g = curve.gate(gate[i]);
      const float dproduct = dy[i];
      dz[i] = dproduct * g.value * p.slope;
      dgate[i] = dproduct * p.value * g.slope;
    }
  } else {
    TE_ELEMENTWISE
    for (int64_t i = 0; i < n; ++i) dz[i] = dy[i] * curve.at(z[i]).slope;
  }
}

// z + bias into `sum`, which may be z; z itself where there is no bias. Over a row that is in the first-level cache.
TE_SIMD void add_bias(const float* z, const float* bias, float* sum, int64_t n) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) sum[i] = z[i] + bias[i];
}
const float* biased(const float* z, const float* bias, float* sum, int64_t n) {
  if (!bias) return z;
  add_bias(z, bias, sum, n);
  return sum;
}

// bias[A, N] in f32; null where it is absent.
class Bias {
 public:
  Bias(const In& bias, int64_t cols) : buffer_(present(bias) ? cols : 0) {
    if (present(bias)) data_ = FloatRows(bias, 1, cols).at(0, buffer_.data());
  }
  const float* data() const { return data_; }

 private:
  std::vector<float> buffer_;
  const float* data_ = nullptr;
};

}  // namespace

// ---- Handlers

ffi::Error ActivationFwd(ffi::ThreadPool pool, In z, In scale, In bias, Out y, Out y_t, Out amax, Out report,
                         Out scale_inv, ActivationAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const Check check = check_activation_fwd(z, casting, bias, y, y_t, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const FloatRows input(z, 2);
  const RowsResult result = rows_result(y, casting, y_t, input.rows(), matrix(z, 1).cols);
  const int64_t n = result.y.cols;
  const Bias added(bias, input.cols());
  const float *bias_z = added.data(), *bias_gate = bias_z ? bias_z + n : nullptr;
  return with_curve(activation.curve, attributes, [&](auto curve) {
    store_rows(pool, result, [&](int64_t row, float* values, float* scratch) {
      const float* gate = nullptr;
      if (activation.gated) gate = biased(input.at(row, scratch, n, n), bias_gate, scratch, n);
      curve_row(curve, biased(input.at(row, values, 0, n), bias_z, values, n), gate, values, n);
    });
    return ffi::Error::Success();
  });
}

ffi::Error ActivationBwd(ffi::ThreadPool pool, In dy, In z, In scale, In bias, Out dz, Out dz_t, Out amax, Out dbias,
                         Out report, Out scale_inv, ActivationAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const Check check = check_activation_bwd(dy, z, casting, bias, dz, dz_t, dbias, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const FloatRows input(z, 2), cotangent(dy, input.rows(), matrix(z, 1).cols);
  const RowsResult result = rows_result(dz, casting, dz_t, input.rows(), input.cols(), data_or_null<float>(dbias));
  const int64_t n = cotangent.cols();
  const Bias added(bias, input.cols());
  return with_curve(activation.curve, attributes, [&](auto curve) {
    store_rows(pool, result, [&](int64_t row, float* values, float* scratch) {
      const float* z_row = biased(input.at(row, values), added.data(), values, input.cols());
      const float* gate = activation.gated ? z_row + n : nullptr;
      curve_gradient_row(curve, cotangent.at(row, scratch), z_row, gate, values, values + n, n);
    });
    return ffi::Error::Success();
  });
}

}  // namespace te

TE_HANDLER(activation_fwd, ActivationFwd)
TE_HANDLER(activation_bwd, ActivationBwd)

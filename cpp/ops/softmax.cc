// Softmax on the CPU, a row at a time: scaled scores and their maximum, exponentials and their sum, the division; the
// three passes hit the first-level cache, and store_rows stores the row. Memory sees each operand and result once: a
// value costs 8 bytes forward and 12 backward for f32; a causal row is read only as far as it is visible.
#include "ops/softmax.h"

#include <limits>

#include "core/rows.h"

namespace te {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

// ---- Inner loops

struct LaneMax {
  float lane[kLanes];
  LaneMax() { std::fill_n(lane, kLanes, kNone); }
  TE_INLINE void add(int l, float x) { lane[l] = x > lane[l] ? x : lane[l]; }  // drops NaN, which the sum then shows
  float total() const { return *std::max_element(lane, lane + kLanes); }
};

// v = x * scale where visible, else -infinity; returns the largest. `hidden` may be null.
TE_SIMD float scores_row(const float* x, const uint8_t* hidden, float scale, float* v, int64_t n) {
  LaneMax top;
  if (hidden) {
    for_lanes(n, [&](int64_t i, int l) {
      v[i] = hidden[i] ? kNone : x[i] * scale;
      top.add(l, v[i]);
    });
  } else {
    for_lanes(n, [&](int64_t i, int l) {
      v[i] = x[i] * scale;
      top.add(l, v[i]);
    });
  }
  return top.total();
}

// v = e^(v - top); returns the sum.
TE_SIMD float exponentials_row(float* v, float top, int64_t n) {
  LaneSum sum;
  for_lanes(n, [&](int64_t i, int l) {
    v[i] = exponential_below(top, v[i]);
    sum.lane[l] += v[i];
  });
  return sum.total();
}

TE_SIMD void scale_row(float* v, float factor, int64_t n) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) v[i] *= factor;
}

TE_SIMD float dot_row(const float* a, const float* b, int64_t n) {
  LaneSum sum;
  for_lanes(n, [&](int64_t i, int l) { sum.lane[l] += a[i] * b[i]; });
  return sum.total();
}

// dx may be y or dy.
TE_SIMD void gradient_row(const float* dy, const float* y, float dot, float scale, float* dx, int64_t n) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) dx[i] = scale * y[i] * (dy[i] - dot);
}

int64_t visible_keys(const SoftmaxShape& s, bool causal, int64_t row) {
  return causal ? std::min(s.keys, row % s.queries + 1) : s.keys;
}

}  // namespace

// ---- Handlers

ffi::Error SoftmaxFwd(ffi::ThreadPool pool, In x, In mask, In offset, Out y, Out rest, SoftmaxAttributes attributes) {
  Check check("te_softmax_fwd");
  const SoftmaxShape s = check_softmax_fwd(check, x, mask, offset, y, rest);
  if (check.failed()) return check.error();
  const uint8_t* hidden = data_or_null<uint8_t>(mask);
  const float* offsets = data_or_null<float>(offset);
  float* rests = data_or_null<float>(rest);
  const FloatRows input(x, 1);
  store_rows(pool, {result_matrix(y, s.rows(), s.keys), 1.f, nullptr, {}, nullptr},
             [&](int64_t row, float* values, float*) {
               const int64_t n = visible_keys(s, attributes.causal, row);
               const int64_t query = row % s.queries, head = row / s.queries, example = head / s.heads;
               const uint8_t* hidden_row = hidden ? hidden + (example * s.queries + query) * s.keys : nullptr;
               float top = scores_row(input.at(row, values, 0, n), hidden_row, attributes.scale_factor, values, n);
               if (offsets) top = std::max(top, offsets[head]);
               if (top == kNone) top = 0.f;
               const float extra = offsets ? std::exp(offsets[head] - top) : 0.f;
               const float sum = exponentials_row(values, top, n) + extra;
               const float inverse = sum == 0.f ? 0.f : 1.f / sum;
               scale_row(values, inverse, n);
               std::fill(values + n, values + s.keys, 0.f);
               if (rests) rests[row] = extra * inverse;
             });
  return ffi::Error::Success();
}

ffi::Error SoftmaxBwd(ffi::ThreadPool pool, In dy, In y, Out dx, Out dot, SoftmaxAttributes attributes) {
  Check check("te_softmax_bwd");
  const SoftmaxShape s = check_softmax_bwd(check, dy, y, dx, dot);
  if (check.failed()) return check.error();
  float* dots = data_or_null<float>(dot);
  const FloatRows cotangent(dy, s.rows(), s.keys), weights(y, 1);
  store_rows(pool, {result_matrix(dx, s.rows(), s.keys), 1.f, nullptr, {}, nullptr},
             [&](int64_t row, float* values, float* scratch) {
               const int64_t n = visible_keys(s, attributes.causal, row);
               const float* dy_row = cotangent.at(row, scratch, 0, n);
               const float* y_row = weights.at(row, values, 0, n);
               const float sum = dot_row(dy_row, y_row, n);
               gradient_row(dy_row, y_row, sum, attributes.scale_factor, values, n);
               std::fill(values + n, values + s.keys, 0.f);
               if (dots) dots[row] = sum;
             });
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(softmax_fwd, SoftmaxFwd)
TE_HANDLER(softmax_bwd, SoftmaxBwd)

// te_softmax_fwd, te_softmax_bwd: softmax over the keys of attention's scores, scaled and masked.
//
//   softmax_fwd: x[.., H, Q, K], mask bool[.., Q, K]?, offset f32[.., H]? -> y as x, rest f32[.., H, Q]?
//   softmax_bwd: dy[.., H, Q, K], y -> dx as y, dot f32[.., H, Q]?
//
// y = exp(scale x) / (sum exp(scale x) + exp(offset)) over the keys that are visible, 0 elsewhere: not those that the
// mask hides (True), and where `causal` only keys up to the query's own index. A row of no visible key, or of nothing
// but -infinity, is 0. An absent offset is -infinity; `rest` is the weight that it takes, 1 - sum y.
// dot = sum y dy and dx = scale y (dy - dot), so that -rest * dot is the offset's gradient. All arithmetic is in f32.
#pragma once

#include "core/check.h"
#include "core/math.h"

namespace te {

struct SoftmaxAttributes {
  float scale_factor;
  bool causal;
};

// Row r of x is query r % queries of head (r / queries) % heads of example r / queries / heads.
struct SoftmaxShape {
  int64_t examples, heads, queries, keys;
  constexpr int64_t rows() const { return examples * heads * queries; }
};

// The shape means something only where the check did not fail.
inline SoftmaxShape check_softmax(Check& check, const char* name, const In& x, Out& y, const char* statistic_name,
                                  Out& statistic) {
  check.high_precision(name, x).axes(name, x, 3).dtype("the result", *y, x.element_type());
  if (check.failed()) return {};
  const auto dims = x.dimensions();
  const size_t rank = dims.size();
  const SoftmaxShape s{matrix(x, 3).rows, dims[rank - 3], dims[rank - 2], dims[rank - 1]};
  check.size("the result", *y, s.rows(), s.keys);
  if (present(statistic)) {
    check.dtype(statistic_name, *statistic, DType::F32).size(statistic_name, *statistic, s.rows(), 1);
  }
  return s;
}

inline SoftmaxShape check_softmax_fwd(Check& check, const In& x, const In& mask, const In& offset, Out& y, Out& rest) {
  const SoftmaxShape s = check_softmax(check, "x", x, y, "rest", rest);
  if (check.failed()) return s;
  if (present(mask)) {
    check.that(mask.element_type() == DType::PRED, "mask", "bool", mask);
    check.size("mask", mask, s.examples * s.queries, s.keys);
  }
  if (present(offset)) check.dtype("offset", offset, DType::F32).size("offset", offset, s.examples, s.heads);
  return s;
}

inline SoftmaxShape check_softmax_bwd(Check& check, const In& dy, const In& y, Out& dx, Out& dot) {
  const SoftmaxShape s = check_softmax(check, "y", y, dx, "dot", dot);
  if (check.failed()) return s;
  check.dtype("dy", dy, y.element_type()).size("dy", dy, s.rows(), s.keys);
  return s;
}

// e^(v - top) for v <= top; exactly 0 from 88 below it on.
TE_MATH float exponential_below(float top, float v) {
  const float d = v - top;
  return exponential(d < -88.f ? -88.f : d);
}

}  // namespace te

TE_ATTRIBUTES(te::SoftmaxAttributes, TE_ATTRIBUTE(float, scale_factor), TE_ATTRIBUTE(bool, causal));

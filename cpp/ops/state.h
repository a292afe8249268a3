// te_update_state, te_mend_state, te_current_scale: the arithmetic between an amax and a scale, in one place for CPU
// and CUDA, so that both give the same bits (XLA's division on GPUs is not correctly rounded). Any leading axes are so
// many states.
//
//   te_update_state: reports f32[.., bins], scale f32[..], history f32[.., H] -> scale f32[..], history f32[.., H]
//   te_mend_state:   scale f32[..], history f32[.., H], uses f32[..]
//                      -> scale f32[..], scale_inv f32[..], history f32[.., H]
//   te_current_scale: amax f32[..] -> scale f32[..], scale_inv f32[..]
//
// What the numbers mean is said in transformer_engine_jax/quantized.py.
#pragma once

#include <cstring>

#include "core/check.h"

#ifdef __CUDACC__
#define TE_EVERYWHERE __host__ __device__ __forceinline__
#else
#define TE_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace te {

struct StateAttributes {
  float fp8_max;        // of the tensor's format
  float two_to_margin;  // 2^margin
  bool most_recent;     // the newest amax, not the largest of the history, sets the scale
};

struct CurrentScaleAttributes {
  float fp8_max;
  float amax_epsilon;  // amaxes below it count as it
  bool power_of_2;     // round the scale down to one
};

constexpr int kReportShift = 21;           // a report's bin is the exponent and two bits of the mantissa ...
constexpr int kReportFirst = 63 * 4;       // ... counted from 2^-64
constexpr float kLargestScale = 0x1p126f;  // it and its reciprocal are normal numbers

TE_EVERYWHERE bool finite_positive(float x) { return x > 0.f && x <= 3.402823466e38f; }

// The upper edge of a report's bin; the last bin has none.
TE_EVERYWHERE float bin_edge(int bin, int bins) {
  const uint32_t bits = bin == bins - 1 ? 0x7f800000u : static_cast<uint32_t>(bin + 1 + kReportFirst) << kReportShift;
  float edge;
  memcpy(&edge, &bits, sizeof edge);
  return edge;
}

TE_EVERYWHERE float next_scale(float amax, float old_scale, const StateAttributes& a) {
  if (!finite_positive(amax)) return old_scale;
  const float scale = (a.fp8_max / amax) / a.two_to_margin;
  return scale > kLargestScale ? kLargestScale : scale < 1.f / kLargestScale ? 1.f / kLargestScale : scale;
}

TE_EVERYWHERE float larger(float a, float b) { return a > b ? a : b; }

// One state: amax_of_reports has been reduced already. `next` may be `history` itself only if H is 1.
TE_EVERYWHERE void update_state(float amax, float scale, const float* history, int64_t length, const StateAttributes& a,
                                float* next_scale_out, float* next) {
  float largest = amax;
  for (int64_t i = 1; i < length; ++i) largest = larger(largest, history[i]);
  *next_scale_out = next_scale(a.most_recent ? amax : largest, scale, a);
  next[1 % length] = amax;
  for (int64_t i = 1; i < length; ++i) next[(i + 1) % length] = history[i];
}

TE_EVERYWHERE void mend_state(float scale, const float* history, int64_t length, float uses, const StateAttributes& a,
                              float* scale_out, float* scale_inv, float* next) {
  const float n = larger(uses, 1.f);
  const int64_t newest = 1 % length;
  float largest = 0.f;
  for (int64_t i = 0; i < length; ++i) {
    next[i] = i == newest ? history[i] : history[i] / n;
    largest = larger(largest, next[i]);
  }
  float mended = finite_positive(scale) ? scale / n : 1.f;
  if (n > 1.f) mended = next_scale(a.most_recent ? next[newest] : largest, mended, a);
  *scale_out = mended;
  *scale_inv = 1.f / mended;
}

TE_EVERYWHERE float current_scale(float amax, const CurrentScaleAttributes& a) {
  if (amax < a.amax_epsilon) amax = a.amax_epsilon;
  float scale = next_scale(amax, 1.f, StateAttributes{a.fp8_max, 1.f, true});
  if (a.power_of_2) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xff800000u;
    memcpy(&scale, &bits, sizeof bits);
  }
  return scale;
}

inline Check check_current_scale(const In& amax, Out& scale, Out& scale_inv) {
  Check check("te_current_scale");
  const int64_t n = static_cast<int64_t>(amax.element_count());
  check.dtype("amax", amax, DType::F32).dtype("scale", *scale, DType::F32).size("scale", *scale, n, 1);
  return check.dtype("scale_inv", *scale_inv, DType::F32).size("scale_inv", *scale_inv, n, 1);
}

inline int64_t states_of(const In& scale) { return static_cast<int64_t>(scale.element_count()); }

inline Check check_states(const char* op, const In& scale, const In& history, Out& scale_out, Out& history_out) {
  Check check(op);
  check.dtype("scale", scale, DType::F32).dtype("history", history, DType::F32).axes("history", history, 1);
  if (check.failed()) return check;
  const Matrix h = matrix(history, 1);
  check.that(h.cols > 0, "history", "at least one slot", describe(history));
  check.that(h.rows == states_of(scale), "history", "one row for each scale " + describe(scale), describe(history));
  check.dtype("scale_out", *scale_out, DType::F32).size("scale_out", *scale_out, h.rows, 1);
  return check.dtype("history_out", *history_out, DType::F32).size("history_out", *history_out, h.rows, h.cols);
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, two_to_margin),
              TE_ATTRIBUTE(bool, most_recent));
TE_ATTRIBUTES(te::CurrentScaleAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, amax_epsilon),
              TE_ATTRIBUTE(bool, power_of_2));

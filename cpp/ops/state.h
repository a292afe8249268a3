// te_update_state, te_mend_state, te_current_scale: the arithmetic between an amax and a scale, in one place for CPU
// and CUDA, so that both give the same bits (XLA's division on GPUs is not correctly rounded). Any leading axes are so
// many states.
//
//   te_update_state: reports f32[.., bins], scale f32[..], history f32[.., H]
//                      -> scale f32[..], history f32[.., H], uses f32[..], all 1 (a constant would be copied)
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

// The slot of a stored history that the last step filled.
TE_EVERYWHERE int64_t newest_of(int64_t length) { return 1 % length; }

// Slot i of the history in a sum of n states: all but the newest amax are n times what they were.
TE_EVERYWHERE float mended_amax(float amax, int64_t i, int64_t length, float n) {
  return i == newest_of(length) ? amax : amax / n;
}

// The scale of a sum of n states whose window holds this amax, or of none.
TE_EVERYWHERE float mended_scale(float scale, float n, float window, const StateAttributes& a) {
  const float last = finite_positive(scale) ? scale / n : 1.f;
  return n > 1.f ? next_scale(window, last, a) : last;
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

inline Check check_update(const In& reports, const In& scale, const In& history, Out& scale_out, Out& history_out,
                          Out& uses) {
  Check check = check_states("te_update_state", scale, history, scale_out, history_out);
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  check.dtype("uses", *uses, DType::F32).size("uses", *uses, states_of(scale), 1);
  if (check.failed()) return check;
  return check.that(matrix(reports, 1).rows == states_of(scale), "reports", "one row for each state",
                    describe(reports));
}

inline Check check_mend(const In& scale, const In& history, const In& uses, Out& scale_out, Out& scale_inv,
                        Out& history_out) {
  Check check = check_states("te_mend_state", scale, history, scale_out, history_out);
  check.dtype("uses", uses, DType::F32).size("uses", uses, states_of(scale), 1);
  return check.dtype("scale_inv", *scale_inv, DType::F32).size("scale_inv", *scale_inv, states_of(scale), 1);
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, two_to_margin),
              TE_ATTRIBUTE(bool, most_recent));
TE_ATTRIBUTES(te::CurrentScaleAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, amax_epsilon),
              TE_ATTRIBUTE(bool, power_of_2));

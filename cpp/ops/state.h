// te_update_state, te_mend_state, te_current_scale: the arithmetic between an amax and a scale, in one place for CPU
// and CUDA, so that both give the same bits (XLA's division on GPUs is not correctly rounded). Any leading axes are so
// many states.
//
//   te_update_state: for each of up to three states: reports f32[.., bins], scale f32[..], history f32[.., H]
//                      -> scale f32[..], history f32[.., H], uses f32[..], all 1 (a constant would be copied)
//   te_mend_state:   for each of up to three states: scale f32[..], history f32[.., H], uses f32[..]
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
  float fp8_max_0, fp8_max_1, fp8_max_2;  // of each tensor's format
  float two_to_margin;                    // 2^margin
  bool most_recent;                       // the newest amax, not the largest of the history, sets the scale
};

// The buffers of one state: operands, then results.
struct StateBuffers {
  const float *reports, *scale, *history, *uses;
  float *next_scale, *scale_inv, *next_history, *next_uses;
  float fp8_max;
};

// The states of one call, one after the other in memory for each of its `rows`.
constexpr int kMostStates = 3;
struct States {
  StateBuffers state[kMostStates];
  int count = 0;
  int64_t rows = 0;  // states on the leading axes of each
  int64_t length = 0;
  int bins = 0;
  float two_to_margin;
  bool most_recent;

  explicit States(const StateAttributes& a) : two_to_margin(a.two_to_margin), most_recent(a.most_recent) {}
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

TE_EVERYWHERE float next_scale(float amax, float old_scale, float fp8_max, float two_to_margin) {
  if (!finite_positive(amax)) return old_scale;
  const float scale = (fp8_max / amax) / two_to_margin;
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
TE_EVERYWHERE float mended_scale(float scale, float n, float window, float fp8_max, float two_to_margin) {
  const float last = finite_positive(scale) ? scale / n : 1.f;
  return n > 1.f ? next_scale(window, last, fp8_max, two_to_margin) : last;
}

TE_EVERYWHERE float current_scale(float amax, const CurrentScaleAttributes& a) {
  if (amax < a.amax_epsilon) amax = a.amax_epsilon;
  float scale = next_scale(amax, 1.f, a.fp8_max, 1.f);
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
  check.that(h.cols > 0, "history", "at least one slot", history);
  check.that(
      h.rows == states_of(scale), "history", [&] { return "one row for each scale " + describe(scale); }, history);
  check.dtype("scale_out", *scale_out, DType::F32).size("scale_out", *scale_out, h.rows, 1);
  return check.dtype("history_out", *history_out, DType::F32).size("history_out", *history_out, h.rows, h.cols);
}

// All states of a call have one shape; the first one's is that of `states`.
inline void check_like_first(Check& check, States& states, const In& history, const Matrix& h) {
  if (states.count == 0) states.rows = h.rows, states.length = h.cols;
  check.that(h.rows == states.rows && h.cols == states.length, "history", "the shape of the first state's", history);
}

// Adds a state to `states`, unless it is absent; the first may not be.
inline Check add_update(States& states, float fp8_max, const In& reports, const In& scale, const In& history,
                        Out& scale_out, Out& history_out, Out& uses) {
  if (states.count && absent(history)) return Check("te_update_state");
  Check check = check_states("te_update_state", scale, history, scale_out, history_out);
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  check.dtype("uses", *uses, DType::F32).size("uses", *uses, states_of(scale), 1);
  if (check.failed()) return check;
  const Matrix r = matrix(reports, 1), h = matrix(history, 1);
  check.that(r.rows == h.rows, "reports", "one row for each state", reports);
  check_like_first(check, states, history, h);
  if (states.count == 0) states.bins = static_cast<int>(r.cols);
  check.that(r.cols == states.bins, "reports", "as many bins as the first state's", reports);
  if (check.failed()) return check;
  states.state[states.count++] = {r.as<float>(),
                                  scale.typed_data<float>(),
                                  h.as<float>(),
                                  nullptr,
                                  scale_out->typed_data<float>(),
                                  nullptr,
                                  history_out->typed_data<float>(),
                                  uses->typed_data<float>(),
                                  fp8_max};
  return check;
}

inline Check add_mend(States& states, float fp8_max, const In& scale, const In& history, const In& uses, Out& scale_out,
                      Out& scale_inv, Out& history_out) {
  if (states.count && absent(history)) return Check("te_mend_state");
  Check check = check_states("te_mend_state", scale, history, scale_out, history_out);
  check.dtype("uses", uses, DType::F32).size("uses", uses, states_of(scale), 1);
  check.dtype("scale_inv", *scale_inv, DType::F32).size("scale_inv", *scale_inv, states_of(scale), 1);
  if (check.failed()) return check;
  const Matrix h = matrix(history, 1);
  check_like_first(check, states, history, h);
  if (check.failed()) return check;
  states.state[states.count++] = {nullptr,
                                  scale.typed_data<float>(),
                                  h.as<float>(),
                                  uses.typed_data<float>(),
                                  scale_out->typed_data<float>(),
                                  scale_inv->typed_data<float>(),
                                  history_out->typed_data<float>(),
                                  nullptr,
                                  fp8_max};
  return check;
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max_0), TE_ATTRIBUTE(float, fp8_max_1),
              TE_ATTRIBUTE(float, fp8_max_2), TE_ATTRIBUTE(float, two_to_margin), TE_ATTRIBUTE(bool, most_recent));
TE_ATTRIBUTES(te::CurrentScaleAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, amax_epsilon),
              TE_ATTRIBUTE(bool, power_of_2));

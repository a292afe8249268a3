// te_report_amax, te_update_state, te_mend_state, te_current_scale: the arithmetic between an amax and a scale, in one
// place for CPU and CUDA, so that both give the same bits (XLA's division on GPUs is not correctly rounded). Any
// leading axes are so many states. A state is one row of numbers, [scale, uses, history...]: kScale, kUses, kHistory.
//
//   te_report_amax:   for each of up to three: amax f32[..] -> report f32[.., bins]
//   te_update_state:  for each of up to three: reports f32[.., bins], state f32[.., 2 + H] -> state f32[.., 2 + H]
//   te_mend_state:    for each of up to three: state f32[.., 2 + H]
//                     -> scale f32[..], scale_inv f32[..], state f32[.., 2 + H]
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

constexpr int64_t kScale = 0, kUses = 1, kHistory = 2;

// The buffers of one state: operands, then results.
struct StateBuffers {
  const float *reports, *state;
  float *next, *scale, *scale_inv;
  float fp8_max;
};

// The states of one call, one after the other in memory for each of its `rows`.
constexpr int kMostStates = 3;
struct States {
  StateBuffers state[kMostStates];
  int count = 0;
  int64_t rows = 0;    // states on the leading axes of each
  int64_t length = 0;  // of the history
  int bins = 0;
  float two_to_margin;
  bool most_recent;

  explicit States(const StateAttributes& a) : two_to_margin(a.two_to_margin), most_recent(a.most_recent) {}
};

// The amaxes of one call and their reports.
struct Reports {
  const float* amax[kMostStates];
  float* report[kMostStates];
  int count = 0;
  int64_t rows = 0;
  int bins = 0;
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

// The bin that reports an amax, -1 for 0, NaN and Inf, which none does.
TE_EVERYWHERE int bin_of(float amax, int bins) {
  if (!finite_positive(amax)) return -1;
  uint32_t bits;
  memcpy(&bits, &amax, sizeof bits);
  const int bin = static_cast<int>(bits >> kReportShift) - kReportFirst;
  return bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
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

inline int64_t states_of(const In& amax) { return static_cast<int64_t>(amax.element_count()); }

// Adds an amax to `reports`, unless it is absent; the first may not be.
inline Check add_report(Reports& reports, const In& amax, Out& report) {
  Check check("te_report_amax");
  if (reports.count && absent(amax)) return check;
  check.dtype("amax", amax, DType::F32).dtype("report", *report, DType::F32).axes("report", *report, 1);
  if (check.failed()) return check;
  const Matrix m = matrix(report, 1);
  if (reports.count == 0) reports.rows = states_of(amax), reports.bins = static_cast<int>(m.cols);
  check.that(states_of(amax) == reports.rows, "amax", "the shape of the first", amax);
  check.that(m.rows == reports.rows && m.cols == reports.bins, "report", "a row of bins for each amax", *report);
  if (check.failed()) return check;
  reports.amax[reports.count] = amax.typed_data<float>();
  reports.report[reports.count++] = report->typed_data<float>();
  return check;
}

// Adds a state to `states`, unless it is absent; the first may not be.
inline Check add_state(States& states, const char* op, const In& state, Out& next, StateBuffers buffers) {
  Check check(op);
  check.dtype("state", state, DType::F32).axes("state", state, 1);
  if (check.failed()) return check;
  const Matrix m = matrix(state, 1);
  check.that(m.cols > kHistory, "state", "a scale, its uses and at least one amax", state);
  check.dtype("next", *next, DType::F32).size("next", *next, m.rows, m.cols);
  if (states.count == 0) states.rows = m.rows, states.length = m.cols - kHistory;
  check.that(m.rows == states.rows && m.cols == states.length + kHistory, "state", "the shape of the first", state);
  if (check.failed()) return check;
  buffers.state = m.as<float>();
  buffers.next = next->typed_data<float>();
  states.state[states.count++] = buffers;
  return check;
}

inline Check add_update(States& states, float fp8_max, const In& reports, const In& state, Out& next) {
  Check check("te_update_state");
  if (states.count && absent(state)) return check;
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  if (check.failed()) return check;
  const Matrix r = matrix(reports, 1);
  if (states.count == 0) states.bins = static_cast<int>(r.cols);
  check.that(r.cols == states.bins, "reports", "as many bins as the first state's", reports);
  if (check.failed()) return check;
  check =
      add_state(states, "te_update_state", state, next, {r.as<float>(), nullptr, nullptr, nullptr, nullptr, fp8_max});
  return check.that(r.rows == states.rows, "reports", "one row for each state", reports);
}

inline Check add_mend(States& states, float fp8_max, const In& state, Out& scale, Out& scale_inv, Out& next) {
  Check check("te_mend_state");
  if (states.count && absent(state)) return check;
  check.dtype("scale", *scale, DType::F32).dtype("scale_inv", *scale_inv, DType::F32);
  if (check.failed()) return check;
  check = add_state(states, "te_mend_state", state, next,
                    {nullptr, nullptr, nullptr, scale->typed_data<float>(), scale_inv->typed_data<float>(), fp8_max});
  return check.size("scale", *scale, states.rows, 1).size("scale_inv", *scale_inv, states.rows, 1);
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max_0), TE_ATTRIBUTE(float, fp8_max_1),
              TE_ATTRIBUTE(float, fp8_max_2), TE_ATTRIBUTE(float, two_to_margin), TE_ATTRIBUTE(bool, most_recent));
TE_ATTRIBUTES(te::CurrentScaleAttributes, TE_ATTRIBUTE(float, fp8_max), TE_ATTRIBUTE(float, amax_epsilon),
              TE_ATTRIBUTE(bool, power_of_2));

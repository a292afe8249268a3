// te_update_state: the arithmetic of core/scaling.h for the states of one GEMM, up to three. Any leading axes are so
// many states.
//
//   for each: reports f32[.., bins], state f32[.., 2 + H] -> state f32[.., 2 + H]
//
// What the numbers mean is said in transformer_engine_jax/quantized.py.
#pragma once

#include "core/scaling.h"

namespace te {

struct StateAttributes {
  float fp8_max_0, fp8_max_1, fp8_max_2;  // of each tensor's format
  float two_to_margin;                    // 2^margin
  bool most_recent;                       // the newest amax, not the largest of the history, sets the scale
};

struct StateBuffers {
  const float *reports, *state;
  float* next;
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

// Adds a state to `states`, unless it is absent; the first may not be.
inline Check add_state(States& states, float fp8_max, const In& reports, const In& state, Out& next) {
  Check check("te_update_state");
  if (states.count && absent(state)) return check;
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  check.dtype("state", state, DType::F32).axes("state", state, 1);
  if (check.failed()) return check;
  const Matrix r = matrix(reports, 1), m = matrix(state, 1);
  check.that(m.cols > kHistory, "state", "a scale, its uses and at least one amax", state);
  if (states.count == 0) {
    states.rows = m.rows, states.length = m.cols - kHistory, states.bins = static_cast<int>(r.cols);
  }
  check.that(m.rows == states.rows && m.cols == states.length + kHistory, "state", "the shape of the first", state);
  check.that(r.cols == states.bins, "reports", "as many bins as the first state's", reports);
  check.that(r.rows == states.rows, "reports", "one row for each state", reports);
  check.dtype("next", *next, DType::F32).size("next", *next, m.rows, m.cols);
  if (check.failed()) return check;
  states.state[states.count++] = {r.as<float>(), m.as<float>(), next->typed_data<float>(), fp8_max};
  return check;
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max_0), TE_ATTRIBUTE(float, fp8_max_1),
              TE_ATTRIBUTE(float, fp8_max_2), TE_ATTRIBUTE(float, two_to_margin), TE_ATTRIBUTE(bool, most_recent));

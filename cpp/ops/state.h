// te_update_state: the arithmetic of core/scaling.h for the states of one GEMM, of up to three tensors. Any leading
// axes are so many GEMMs.
//
//   states f32[.., T, 2 + H], of each tensor reports f32[.., bins] -> states f32[.., T, 2 + H]
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

// One call, and in it a state: the row of numbers of one tensor of one GEMM.
struct States {
  static constexpr int kMost = 3;
  const float* state;
  float* next;
  const float* reports[kMost] = {};
  float fp8_max[kMost];
  int tensors = 0;
  int bins = 0;
  int64_t gemms = 0;
  int64_t length = 0;  // of the history
  float two_to_margin;
  bool most_recent;

  TE_EVERYWHERE int64_t row(int64_t gemm, int tensor) const { return (gemm * tensors + tensor) * (kHistory + length); }
};

inline Check check_states(States& s, const In& states, std::initializer_list<const In*> reports, Out& next,
                          const StateAttributes& a) {
  Check check("te_update_state");
  check.dtype("states", states, DType::F32).axes("states", states, 2);
  if (check.failed()) return check;
  const auto dims = states.dimensions();
  const int64_t tensors = dims[dims.size() - 2], width = dims[dims.size() - 1];
  const int64_t gemms = tensors && width ? static_cast<int64_t>(states.element_count()) / (tensors * width) : 0;
  check.that(width > kHistory, "states", "a scale, its uses and at least one amax", states);
  check.dtype("next", *next, DType::F32).size("next", *next, gemms * tensors, width);
  for (const In* of_tensor : reports) {
    if (absent(*of_tensor)) continue;
    check.dtype("reports", *of_tensor, DType::F32).axes("reports", *of_tensor, 1);
    if (check.failed()) return check;
    const Matrix r = matrix(*of_tensor, 1);
    if (s.tensors == 0) s.bins = static_cast<int>(r.cols);
    check.that(r.rows == gemms, "reports", "one row for each GEMM", *of_tensor);
    check.that(r.cols == s.bins, "reports", "as many bins as the first tensor's", *of_tensor);
    s.reports[s.tensors++] = r.as<float>();
  }
  check.that(s.tensors == tensors, "states", "those of as many tensors as have reports", states);
  if (check.failed()) return check;
  s.state = states.typed_data<float>(), s.next = next->typed_data<float>();
  s.fp8_max[0] = a.fp8_max_0, s.fp8_max[1] = a.fp8_max_1, s.fp8_max[2] = a.fp8_max_2;
  s.gemms = gemms, s.length = width - kHistory, s.two_to_margin = a.two_to_margin, s.most_recent = a.most_recent;
  return check;
}

}  // namespace te

TE_ATTRIBUTES(te::StateAttributes, TE_ATTRIBUTE(float, fp8_max_0), TE_ATTRIBUTE(float, fp8_max_1),
              TE_ATTRIBUTE(float, fp8_max_2), TE_ATTRIBUTE(float, two_to_margin), TE_ATTRIBUTE(bool, most_recent));

// Scales and amax histories on the CPU: a few hundred numbers, one thread.
#include "ops/state.h"

namespace te {

ffi::Error UpdateState(In reports, In scale, In history, Out scale_out, Out history_out, StateAttributes attributes) {
  Check check = check_states("te_update_state", scale, history, scale_out, history_out);
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  if (check.failed()) return check.error();
  const Matrix r = matrix(reports, 1), h = matrix(history, 1);
  if (check.that(r.rows == h.rows, "reports", "one row for each state", describe(reports)).failed())
    return check.error();
  for (int64_t i = 0; i < h.rows; ++i) {
    const float* row = r.as<float>() + i * r.cols;
    float amax = 0.f;
    for (int64_t bin = 0; bin < r.cols; ++bin) {
      const float edge = bin_edge(static_cast<int>(bin), static_cast<int>(r.cols));
      amax = larger(amax, row[bin] < edge ? row[bin] : edge);
    }
    update_state(amax, scale.typed_data<float>()[i], h.as<float>() + i * h.cols, h.cols, attributes,
                 scale_out->typed_data<float>() + i, history_out->typed_data<float>() + i * h.cols);
  }
  return ffi::Error::Success();
}

ffi::Error MendState(In scale, In history, In uses, Out scale_out, Out scale_inv, Out history_out,
                     StateAttributes attributes) {
  Check check = check_states("te_mend_state", scale, history, scale_out, history_out);
  check.dtype("uses", uses, DType::F32).size("uses", uses, states_of(scale), 1);
  check.dtype("scale_inv", *scale_inv, DType::F32).size("scale_inv", *scale_inv, states_of(scale), 1);
  if (check.failed()) return check.error();
  const Matrix h = matrix(history, 1);
  for (int64_t i = 0; i < h.rows; ++i) {
    mend_state(scale.typed_data<float>()[i], h.as<float>() + i * h.cols, h.cols, uses.typed_data<float>()[i],
               attributes, scale_out->typed_data<float>() + i, scale_inv->typed_data<float>() + i,
               history_out->typed_data<float>() + i * h.cols);
  }
  return ffi::Error::Success();
}

ffi::Error CurrentScale(In amax, Out scale, Out scale_inv, CurrentScaleAttributes attributes) {
  const Check check = check_current_scale(amax, scale, scale_inv);
  if (check.failed()) return check.error();
  for (int64_t i = 0; i < states_of(amax); ++i) {
    const float s = current_scale(amax.typed_data<float>()[i], attributes);
    scale->typed_data<float>()[i] = s;
    scale_inv->typed_data<float>()[i] = 1.f / s;
  }
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(current_scale, CurrentScale)
TE_HANDLER(update_state, UpdateState)
TE_HANDLER(mend_state, MendState)

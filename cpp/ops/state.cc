// Scales and amax histories on the CPU: a few hundred numbers, one thread.
#include "ops/state.h"

#include <algorithm>

namespace te {

ffi::Error UpdateState(In reports, In scale, In history, Out scale_out, Out history_out, Out uses,
                       StateAttributes attributes) {
  const Check check = check_update(reports, scale, history, scale_out, history_out, uses);
  if (check.failed()) return check.error();
  const Matrix r = matrix(reports, 1), h = matrix(history, 1);
  for (int64_t state = 0; state < h.rows; ++state) {
    const float* report = r.as<float>() + state * r.cols;
    const float* old = h.as<float>() + state * h.cols;
    float* next = history_out->typed_data<float>() + state * h.cols;
    float amax = 0.f;
    for (int64_t bin = 0; bin < r.cols; ++bin) {
      amax = larger(amax, std::min(report[bin], bin_edge(static_cast<int>(bin), static_cast<int>(r.cols))));
    }
    float window = amax;
    for (int64_t i = 1; i < h.cols; ++i) {
      if (!attributes.most_recent) window = larger(window, old[i]);
      next[(i + 1) % h.cols] = old[i];
    }
    next[newest_of(h.cols)] = amax;
    scale_out->typed_data<float>()[state] = next_scale(window, scale.typed_data<float>()[state], attributes);
    uses->typed_data<float>()[state] = 1.f;
  }
  return ffi::Error::Success();
}

ffi::Error MendState(In scale, In history, In uses, Out scale_out, Out scale_inv, Out history_out,
                     StateAttributes attributes) {
  const Check check = check_mend(scale, history, uses, scale_out, scale_inv, history_out);
  if (check.failed()) return check.error();
  const Matrix h = matrix(history, 1);
  for (int64_t state = 0; state < h.rows; ++state) {
    const float n = larger(uses.typed_data<float>()[state], 1.f);
    float window = 0.f;
    for (int64_t i = 0; i < h.cols; ++i) {
      const float amax = mended_amax(h.as<float>()[state * h.cols + i], i, h.cols, n);
      history_out->typed_data<float>()[state * h.cols + i] = amax;
      if (!attributes.most_recent || i == newest_of(h.cols)) window = larger(window, amax);
    }
    const float mended = mended_scale(scale.typed_data<float>()[state], n, window, attributes);
    scale_out->typed_data<float>()[state] = mended;
    scale_inv->typed_data<float>()[state] = 1.f / mended;
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

// Scales and amax histories on the CPU: a few hundred numbers, one thread.
#include "ops/state.h"

#include <algorithm>

namespace te {

namespace {

void update(const StateBuffers& s, int64_t row, const States& all) {
  const float* reports = s.reports + row * all.bins;
  const float* state = s.state + row * (kHistory + all.length);
  float* next = s.next + row * (kHistory + all.length);
  float amax = 0.f;
  for (int bin = 0; bin < all.bins; ++bin) amax = larger(amax, std::min(reports[bin], bin_edge(bin, all.bins)));
  float window = amax;
  for (int64_t i = 1; i < all.length; ++i) {
    if (!all.most_recent) window = larger(window, state[kHistory + i]);
    next[kHistory + (i + 1) % all.length] = state[kHistory + i];
  }
  next[kHistory + newest_of(all.length)] = amax;
  next[kScale] = next_scale(window, state[kScale], s.fp8_max, all.two_to_margin);
  next[kUses] = 1.f;
}

void mend(const StateBuffers& s, int64_t row, const States& all) {
  const float* state = s.state + row * (kHistory + all.length);
  float* next = s.next + row * (kHistory + all.length);
  const float n = larger(state[kUses], 1.f);
  float window = 0.f;
  for (int64_t i = 0; i < all.length; ++i) {
    const float amax = mended_amax(state[kHistory + i], i, all.length, n);
    next[kHistory + i] = amax;
    if (!all.most_recent || i == newest_of(all.length)) window = larger(window, amax);
  }
  const float mended = mended_scale(state[kScale], n, window, s.fp8_max, all.two_to_margin);
  next[kScale] = s.scale[row] = mended;
  next[kUses] = 1.f;
  s.scale_inv[row] = 1.f / mended;
}

ffi::Error run(const States& states, void (*one)(const StateBuffers&, int64_t, const States&)) {
  for (int i = 0; i < states.count; ++i) {
    for (int64_t row = 0; row < states.rows; ++row) one(states.state[i], row, states);
  }
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ReportAmax(In a0, In a1, In a2, Out r0, Out r1, Out r2) {
  Reports all;
  for (const Check& check : {add_report(all, a0, r0), add_report(all, a1, r1), add_report(all, a2, r2)}) {
    if (check.failed()) return check.error();
  }
  for (int i = 0; i < all.count; ++i) {
    std::fill_n(all.report[i], all.rows * all.bins, 0.f);
    for (int64_t row = 0; row < all.rows; ++row) {
      const float amax = all.amax[i][row];
      if (const int bin = bin_of(amax, all.bins); bin >= 0) all.report[i][row * all.bins + bin] = amax;
    }
  }
  return ffi::Error::Success();
}

ffi::Error UpdateState(In r0, In s0, In r1, In s1, In r2, In s2, Out next0, Out next1, Out next2, StateAttributes a) {
  States states(a);
  for (const Check& check :
       {add_update(states, a.fp8_max_0, r0, s0, next0), add_update(states, a.fp8_max_1, r1, s1, next1),
        add_update(states, a.fp8_max_2, r2, s2, next2)}) {
    if (check.failed()) return check.error();
  }
  return run(states, update);
}

ffi::Error MendState(In s0, In s1, In s2, Out scale0, Out inverse0, Out next0, Out scale1, Out inverse1, Out next1,
                     Out scale2, Out inverse2, Out next2, StateAttributes a) {
  States states(a);
  for (const Check& check : {add_mend(states, a.fp8_max_0, s0, scale0, inverse0, next0),
                             add_mend(states, a.fp8_max_1, s1, scale1, inverse1, next1),
                             add_mend(states, a.fp8_max_2, s2, scale2, inverse2, next2)}) {
    if (check.failed()) return check.error();
  }
  return run(states, mend);
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
TE_HANDLER(report_amax, ReportAmax)
TE_HANDLER(update_state, UpdateState)
TE_HANDLER(mend_state, MendState)

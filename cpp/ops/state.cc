// Scales and amax histories on the CPU: a few hundred numbers, one thread.
#include "ops/state.h"

#include <algorithm>

namespace te {
namespace {

void update(const StateBuffers& s, int64_t row, const States& all) {
  const float* reports = s.reports + row * all.bins;
  const float* state = s.state + row * (kHistory + all.length);
  float* next = s.next + row * (kHistory + all.length);
  const float n = larger(state[kUses], 1.f);
  float amax = 0.f, before = 0.f, others = 0.f;
  for (int bin = 0; bin < all.bins; ++bin) amax = larger(amax, std::min(reports[bin], bin_edge(bin, all.bins)));
  for (int64_t i = 0; i < all.length; ++i) {
    before = larger(before, in_window(state + kHistory, i, all.length, n, all.most_recent));
    if (i == 0) continue;  // it leaves
    const float mended = mended_amax(state[kHistory + i], i, all.length, n);
    if (!all.most_recent) others = larger(others, mended);
    next[kHistory + (i + 1) % all.length] = mended;
  }
  next[kHistory + newest_of(all.length)] = amax;
  const float old_scale = mended_scale(state[kScale], n, before, s.fp8_max, all.two_to_margin);
  next[kScale] = next_scale(larger(amax, others), old_scale, s.fp8_max, all.two_to_margin);
  next[kUses] = 1.f;
}

}  // namespace

ffi::Error UpdateState(In r0, In s0, In r1, In s1, In r2, In s2, Out next0, Out next1, Out next2, StateAttributes a) {
  States states(a);
  for (const Check& check :
       {add_state(states, a.fp8_max_0, r0, s0, next0), add_state(states, a.fp8_max_1, r1, s1, next1),
        add_state(states, a.fp8_max_2, r2, s2, next2)}) {
    if (check.failed()) return check.error();
  }
  for (int i = 0; i < states.count; ++i) {
    for (int64_t row = 0; row < states.rows; ++row) update(states.state[i], row, states);
  }
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(update_state, UpdateState)

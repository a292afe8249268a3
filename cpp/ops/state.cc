// Scales and amax histories on the CPU: a few hundred numbers, one thread.
#include "ops/state.h"

#include <algorithm>

namespace te {
namespace {

void update(const States& all, int64_t gemm, int tensor) {
  const float* state = all.state + all.row(gemm, tensor);
  float* next = all.next + all.row(gemm, tensor);
  const float* reports = all.reports[tensor] + gemm * all.bins;
  const float fp8_max = all.fp8_max[tensor];
  const float n = states_in(state[kUses]);
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
  const float old_scale = mended_scale(state[kScale], n, before, fp8_max, all.two_to_margin);
  next[kScale] = next_scale(larger(amax, others), old_scale, fp8_max, all.two_to_margin);
  next[kUses] = 1.f;
}

}  // namespace

ffi::Error UpdateState(In states, In r0, In r1, In r2, Out next, StateAttributes a) {
  States s;
  const Check check = check_states(s, states, {&r0, &r1, &r2}, next, a);
  if (check.failed()) return check.error();
  for (int64_t gemm = 0; gemm < s.gemms; ++gemm) {
    for (int tensor = 0; tensor < s.tensors; ++tensor) update(s, gemm, tensor);
  }
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(update_state, UpdateState)

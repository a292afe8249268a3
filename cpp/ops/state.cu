// Scales and amax histories on the GPU: one block a state, one launch for the states of a GEMM, where XLA would need
// six or seven for each. A launch is mostly latency, so every number is loaded by a thread of its own.
#include "core/cuda.cuh"
#include "ops/state.h"

namespace te {
namespace {

constexpr int kThreads = 128;

// The largest value of the block, in every thread.
__device__ __forceinline__ float largest_of_block(float value) {
  __shared__ float of_warp[kThreads / 32];
  for (int lane = 16; lane; lane /= 2) value = larger(value, __shfl_xor_sync(~0u, value, lane));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) value = larger(value, of_warp[warp]);
  __syncthreads();
  return value;
}

__global__ void __launch_bounds__(kThreads) report_amaxes(const Reports all) {
  const int64_t row = blockIdx.x;
  const float amax = all.amax[blockIdx.y][row];
  float* const report = all.report[blockIdx.y] + row * all.bins;
  const int here = bin_of(amax, all.bins);
  for (int bin = threadIdx.x; bin < all.bins; bin += kThreads) report[bin] = bin == here ? amax : 0.f;
}

__global__ void __launch_bounds__(kThreads) update_states(const States all) {
  const StateBuffers& s = all.state[blockIdx.y];
  const int64_t row = blockIdx.x, length = all.length;
  const float* const state = s.state + row * (kHistory + length);
  float* const next = s.next + row * (kHistory + length);
  const float old_scale = state[kScale];
  float others = 0.f, amax = 0.f;
  for (int64_t i = 1 + threadIdx.x; i < length; i += kThreads) {
    others = larger(others, state[kHistory + i]);
    next[kHistory + (i + 1) % length] = state[kHistory + i];
  }
  for (int bin = threadIdx.x; bin < all.bins; bin += kThreads) {
    amax = larger(amax, fminf(s.reports[row * all.bins + bin], bin_edge(bin, all.bins)));
  }
  amax = largest_of_block(amax);
  if (!all.most_recent) others = largest_of_block(others);
  if (threadIdx.x) return;
  next[kHistory + newest_of(length)] = amax;
  const float window = all.most_recent ? amax : larger(amax, others);
  next[kScale] = next_scale(window, old_scale, s.fp8_max, all.two_to_margin);
  next[kUses] = 1.f;
}

__global__ void __launch_bounds__(kThreads) mend_states(const States all) {
  const StateBuffers& s = all.state[blockIdx.y];
  const int64_t row = blockIdx.x, length = all.length;
  const float* const state = s.state + row * (kHistory + length);
  float* const next = s.next + row * (kHistory + length);
  const float old_scale = state[kScale], n = larger(state[kUses], 1.f);
  float window = 0.f;
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const float amax = mended_amax(state[kHistory + i], i, length, n);
    next[kHistory + i] = amax;
    if (!all.most_recent || i == newest_of(length)) window = larger(window, amax);
  }
  if (n > 1.f) window = largest_of_block(window);
  if (threadIdx.x) return;
  const float mended = mended_scale(old_scale, n, window, s.fp8_max, all.two_to_margin);
  next[kScale] = s.scale[row] = mended;
  next[kUses] = 1.f;
  s.scale_inv[row] = 1.f / mended;
}

__global__ void current_scales(const float* amax, CurrentScaleAttributes a, float* scale, float* scale_inv) {
  const int64_t i = blockIdx.x;
  const float value = current_scale(amax[i], a);
  scale[i] = value;
  scale_inv[i] = 1.f / value;
}

}  // namespace

namespace {

template <typename All>
ffi::Error run(cudaStream_t stream, const All& all, void (*kernel)(All)) {
  if (all.count == 0 || all.rows == 0) return ffi::Error::Success();
  kernel<<<dim3(static_cast<unsigned>(all.rows), all.count), kThreads, 0, stream>>>(all);
  TE_CUDA_CHECK(cudaGetLastError());
  return ffi::Error::Success();
}

}  // namespace

ffi::Error ReportAmax(cudaStream_t stream, In a0, In a1, In a2, Out r0, Out r1, Out r2) {
  Reports all;
  for (const Check& check : {add_report(all, a0, r0), add_report(all, a1, r1), add_report(all, a2, r2)}) {
    if (check.failed()) return check.error();
  }
  return run(stream, all, report_amaxes);
}

ffi::Error UpdateState(cudaStream_t stream, In r0, In s0, In r1, In s1, In r2, In s2, Out next0, Out next1, Out next2,
                       StateAttributes a) {
  States states(a);
  for (const Check& check :
       {add_update(states, a.fp8_max_0, r0, s0, next0), add_update(states, a.fp8_max_1, r1, s1, next1),
        add_update(states, a.fp8_max_2, r2, s2, next2)}) {
    if (check.failed()) return check.error();
  }
  return run(stream, states, update_states);
}

ffi::Error MendState(cudaStream_t stream, In s0, In s1, In s2, Out scale0, Out inverse0, Out next0, Out scale1,
                     Out inverse1, Out next1, Out scale2, Out inverse2, Out next2, StateAttributes a) {
  States states(a);
  for (const Check& check : {add_mend(states, a.fp8_max_0, s0, scale0, inverse0, next0),
                             add_mend(states, a.fp8_max_1, s1, scale1, inverse1, next1),
                             add_mend(states, a.fp8_max_2, s2, scale2, inverse2, next2)}) {
    if (check.failed()) return check.error();
  }
  return run(stream, states, mend_states);
}

ffi::Error CurrentScale(cudaStream_t stream, In amax, Out scale, Out scale_inv, CurrentScaleAttributes attributes) {
  const Check check = check_current_scale(amax, scale, scale_inv);
  if (check.failed()) return check.error();
  if (states_of(amax) == 0) return ffi::Error::Success();
  current_scales<<<static_cast<unsigned>(states_of(amax)), 1, 0, stream>>>(
      amax.typed_data<float>(), attributes, scale->typed_data<float>(), scale_inv->typed_data<float>());
  TE_CUDA_CHECK(cudaGetLastError());
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(current_scale, CurrentScale)
TE_HANDLER(report_amax, ReportAmax)
TE_HANDLER(update_state, UpdateState)
TE_HANDLER(mend_state, MendState)

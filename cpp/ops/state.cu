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

__global__ void __launch_bounds__(kThreads) update_states(const States all) {
  const int64_t gemm = blockIdx.x / all.tensors, length = all.length;
  const int tensor = static_cast<int>(blockIdx.x % all.tensors);
  const float* const state = all.state + all.row(gemm, tensor);
  float* const next = all.next + all.row(gemm, tensor);
  const float* const reports = all.reports[tensor] + gemm * all.bins;
  const float fp8_max = all.fp8_max[tensor];
  const float stored = state[kScale], n = states_in(state[kUses]);
  float before = 0.f, others = 0.f, amax = 0.f;
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    before = larger(before, in_window(state + kHistory, i, length, n, all.most_recent));
    if (i == 0) continue;  // it leaves
    const float mended = mended_amax(state[kHistory + i], i, length, n);
    if (!all.most_recent) others = larger(others, mended);
    next[kHistory + (i + 1) % length] = mended;
  }
  for (int bin = threadIdx.x; bin < all.bins; bin += kThreads) {
    amax = larger(amax, fminf(reports[bin], bin_edge(bin, all.bins)));
  }
  amax = largest_of_block(amax);
  if (!all.most_recent) others = largest_of_block(others);
  if (n != 1.f) before = largest_of_block(before);
  if (threadIdx.x) return;
  next[kHistory + newest_of(length)] = amax;
  const float old_scale = mended_scale(stored, n, before, fp8_max, all.two_to_margin);
  next[kScale] = next_scale(larger(amax, others), old_scale, fp8_max, all.two_to_margin);
  next[kUses] = 1.f;
}

}  // namespace

ffi::Error UpdateState(cudaStream_t stream, In states, In r0, In r1, In r2, Out next, StateAttributes a) {
  States s;
  const Check check = check_states(s, states, {&r0, &r1, &r2}, next, a);
  if (check.failed()) return check.error();
  if (s.gemms == 0) return ffi::Error::Success();
  TE_CUDA_CHECK(launch({s.gemms * s.tensors, kThreads}, stream, update_states, s));
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(update_state, UpdateState)

// Scales and amax histories on the GPU: one block a state, one launch a kernel, where XLA would need six or seven.
// A launch is mostly latency, so every number is loaded by a thread of its own.
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

__global__ void __launch_bounds__(kThreads)
    update_states(const float* reports, int bins, const float* scale, const float* history, int64_t length,
                  StateAttributes a, float* scale_out, float* history_out, float* uses) {
  const int64_t state = blockIdx.x;
  history += state * length, history_out += state * length;
  const float old_scale = scale[state];
  float others = 0.f, amax = 0.f;
  for (int64_t i = 1 + threadIdx.x; i < length; i += kThreads) {
    others = larger(others, history[i]);
    history_out[(i + 1) % length] = history[i];
  }
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    amax = larger(amax, fminf(reports[state * bins + bin], bin_edge(bin, bins)));
  }
  amax = largest_of_block(amax);
  if (!a.most_recent) others = largest_of_block(others);
  if (threadIdx.x) return;
  history_out[1 % length] = amax;
  scale_out[state] = next_scale(a.most_recent ? amax : larger(amax, others), old_scale, a);
  uses[state] = 1.f;
}

__global__ void __launch_bounds__(kThreads)
    mend_states(const float* scale, const float* history, int64_t length, const float* uses, StateAttributes a,
                float* scale_out, float* scale_inv, float* history_out) {
  const int64_t state = blockIdx.x;
  history += state * length, history_out += state * length;
  const float old_scale = scale[state], n = larger(uses[state], 1.f);
  float window = 0.f;
  for (int64_t i = threadIdx.x; i < length; i += kThreads) {
    const float amax = mended_amax(history[i], i, length, n);
    history_out[i] = amax;
    if (!a.most_recent || i == newest_of(length)) window = larger(window, amax);
  }
  if (n > 1.f) window = largest_of_block(window);
  if (threadIdx.x) return;
  const float mended = mended_scale(old_scale, n, window, a);
  scale_out[state] = mended;
  scale_inv[state] = 1.f / mended;
}

__global__ void current_scales(const float* amax, CurrentScaleAttributes a, float* scale, float* scale_inv) {
  const int64_t i = blockIdx.x;
  const float value = current_scale(amax[i], a);
  scale[i] = value;
  scale_inv[i] = 1.f / value;
}

}  // namespace

ffi::Error UpdateState(cudaStream_t stream, In reports, In scale, In history, Out scale_out, Out history_out, Out uses,
                       StateAttributes attributes) {
  const Check check = check_update(reports, scale, history, scale_out, history_out, uses);
  if (check.failed()) return check.error();
  const Matrix r = matrix(reports, 1), h = matrix(history, 1);
  if (h.rows == 0) return ffi::Error::Success();
  update_states<<<static_cast<unsigned>(h.rows), kThreads, 0, stream>>>(
      r.as<float>(), static_cast<int>(r.cols), scale.typed_data<float>(), h.as<float>(), h.cols, attributes,
      scale_out->typed_data<float>(), history_out->typed_data<float>(), uses->typed_data<float>());
  TE_CUDA_CHECK(cudaGetLastError());
  return ffi::Error::Success();
}

ffi::Error MendState(cudaStream_t stream, In scale, In history, In uses, Out scale_out, Out scale_inv, Out history_out,
                     StateAttributes attributes) {
  const Check check = check_mend(scale, history, uses, scale_out, scale_inv, history_out);
  if (check.failed()) return check.error();
  const Matrix h = matrix(history, 1);
  if (h.rows == 0) return ffi::Error::Success();
  mend_states<<<static_cast<unsigned>(h.rows), kThreads, 0, stream>>>(
      scale.typed_data<float>(), h.as<float>(), h.cols, uses.typed_data<float>(), attributes,
      scale_out->typed_data<float>(), scale_inv->typed_data<float>(), history_out->typed_data<float>());
  TE_CUDA_CHECK(cudaGetLastError());
  return ffi::Error::Success();
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
TE_HANDLER(update_state, UpdateState)
TE_HANDLER(mend_state, MendState)

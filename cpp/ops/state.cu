// Scales and amax histories on the GPU: one block a state, one launch a kernel, where XLA would need six or seven.
#include "core/cuda.cuh"
#include "ops/state.h"

namespace te {
namespace {

constexpr int kThreads = 128;

__global__ void update_states(const float* reports, int bins, const float* scale, const float* history, int64_t length,
                              StateAttributes a, float* scale_out, float* history_out) {
  const int64_t i = blockIdx.x;
  float amax = 0.f;
  for (int bin = threadIdx.x; bin < bins; bin += kThreads) {
    amax = larger(amax, fminf(reports[i * bins + bin], bin_edge(bin, bins)));
  }
  for (int lane = 16; lane; lane /= 2) amax = larger(amax, __shfl_xor_sync(~0u, amax, lane));
  __shared__ float of_warp[kThreads / 32];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) amax = larger(amax, of_warp[warp]);
  update_state(amax, scale[i], history + i * length, length, a, scale_out + i, history_out + i * length);
}

__global__ void mend_states(const float* scale, const float* history, int64_t length, const float* uses,
                            StateAttributes a, float* scale_out, float* scale_inv, float* history_out) {
  const int64_t i = blockIdx.x;
  mend_state(scale[i], history + i * length, length, uses[i], a, scale_out + i, scale_inv + i,
             history_out + i * length);
}

__global__ void current_scales(const float* amax, CurrentScaleAttributes a, float* scale, float* scale_inv) {
  const int64_t i = blockIdx.x;
  scale[i] = current_scale(amax[i], a);
  scale_inv[i] = 1.f / scale[i];
}

}  // namespace

ffi::Error UpdateState(cudaStream_t stream, In reports, In scale, In history, Out scale_out, Out history_out,
                       StateAttributes attributes) {
  Check check = check_states("te_update_state", scale, history, scale_out, history_out);
  check.dtype("reports", reports, DType::F32).axes("reports", reports, 1);
  if (check.failed()) return check.error();
  const Matrix r = matrix(reports, 1), h = matrix(history, 1);
  if (check.that(r.rows == h.rows, "reports", "one row for each state", describe(reports)).failed())
    return check.error();
  if (h.rows == 0) return ffi::Error::Success();
  update_states<<<static_cast<unsigned>(h.rows), kThreads, 0, stream>>>(
      r.as<float>(), static_cast<int>(r.cols), scale.typed_data<float>(), h.as<float>(), h.cols, attributes,
      scale_out->typed_data<float>(), history_out->typed_data<float>());
  TE_CUDA_CHECK(cudaGetLastError());
  return ffi::Error::Success();
}

ffi::Error MendState(cudaStream_t stream, In scale, In history, In uses, Out scale_out, Out scale_inv, Out history_out,
                     StateAttributes attributes) {
  Check check = check_states("te_mend_state", scale, history, scale_out, history_out);
  check.dtype("uses", uses, DType::F32).size("uses", uses, states_of(scale), 1);
  check.dtype("scale_inv", *scale_inv, DType::F32).size("scale_inv", *scale_inv, states_of(scale), 1);
  if (check.failed()) return check.error();
  const Matrix h = matrix(history, 1);
  if (h.rows == 0) return ffi::Error::Success();
  mend_states<<<static_cast<unsigned>(h.rows), 1, 0, stream>>>(
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

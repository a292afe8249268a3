// LayerNorm and RMSNorm on CUDA, forward. Bytes a value, with s for x, o for y (1 for FP8) and t = 1 where a transposed
// copy is asked for; statistics, gamma and beta are a fraction of a percent:
//   s + o          whole rows, each in the registers of some warps (norm_rows): y in FP8, or in 16 bits up to 4096
//                  columns
//   s              the same without y: the statistics alone, with the amax of y
//   s + o + t      strips of 32 rows in the registers of a cluster of blocks (norm_strips): where y is transposed too,
//                  or wider; or, where the statistics are given, the tile kernel of tile.cuh
//   2 s + o + t    what these lack: unaligned rows, rows beyond 16384 values, results in E5M2, GPUs without clusters or
//                  with less shared memory. The statistics first (row_statistics), then the tile kernel
// The variance is that of differences from a mean, never a difference of sums that are much larger.
#include "ops/layernorm_strips.cuh"

namespace te {
namespace {

template <typename T>
ffi::Error norm_fwd(cudaStream_t stream, const Norm& a, DType x_dtype, Result out) {
  TE_CUDA_CHECK(prepare(stream, out.rows * out.cols, &out));
  if (out.rows * out.cols == 0) {  // of rows without columns the statistics are NaN
    if (!a.known) TE_CUDA_CHECK(launch({out.rows, kRowThreads}, stream, row_statistics<T>, a, out));
    TE_CUDA_CHECK(finish_amax(stream, out.amax));
    return ffi::Error::Success();
  }
  out.vector = out.vector && aligned(a.x) && aligned(a.gamma.data) && aligned(a.beta.data);
  out.vector_t = aligned(out.y_t) && out.rows % 16 == 0;
  const auto normalize = [&] {
    return out.vector && out.dtype != DType::F8E5M2
               ? launch_tiles(stream, Normalized<T>{a, {a.x, x_dtype}}, out)
               : launch_tiles(stream, Normalized<AnyDtype>{a, {a.x, x_dtype}}, out);
  };
  if (a.known) return normalize();
  auto launch_them = out.vector ? rows_of<T>(out) : nullptr;
  if (!launch_them && out.vector && current_device().architecture >= 90) launch_them = strips_of<T>(out);
  if (launch_them) {
    const cudaError_t error = launch_them(stream, a, out);
    if (error != cudaErrorLaunchOutOfResources) {
      TE_CUDA_CHECK(error);
      TE_CUDA_CHECK(finish_amax(stream, out.amax));
      return ffi::Error::Success();
    }
  }
  TE_CUDA_CHECK(launch({out.rows, kRowThreads}, stream, row_statistics<T>, a, out));
  return normalize();
}

ffi::Error run_norm_fwd(cudaStream_t stream, const In& x, const In& gamma, const In* beta, const Casting& casting,
                        Out& y, Out& y_t, float* mean, const RowStatistic& rstd, const NormFwdAttributes& attributes) {
  const Matrix m = matrix(x, 1);
  const Result out = fp8_or_float_result(y, casting, y_t, m.rows, m.cols);
  const Norm a{m.data,
               {gamma.untyped_data(), gamma.element_type(), attributes.zero_centered_gamma ? 1.f : 0.f},
               {beta ? beta->untyped_data() : nullptr, beta ? beta->element_type() : DType::F32, 0.f},
               mean,
               rstd.data(),
               attributes.epsilon,
               /*centered=*/beta != nullptr,
               /*known=*/present(rstd.known)};
  return with_float(m.dtype, [&](auto t) { return norm_fwd<decltype(t)>(stream, a, m.dtype, out); });
}

}  // namespace

ffi::Error LayerNormFwd(cudaStream_t stream, In x, In gamma, In beta, In scale, In known_mean, In known_rstd, Out y,
                        Out y_t, Out mean, Out rstd, Out amax, Out report, Out scale_inv,
                        NormFwdAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const RowStatistic means{known_mean, mean}, rstds{known_rstd, rstd};
  const Check check = check_layernorm_fwd(x, gamma, beta, casting, y, y_t, means, rstds);
  if (check.failed()) return check.error();
  return run_norm_fwd(stream, x, gamma, &beta, casting, y, y_t, means.data(), rstds, attributes);
}

ffi::Error RmsNormFwd(cudaStream_t stream, In x, In gamma, In scale, In known_rstd, Out y, Out y_t, Out rstd, Out amax,
                      Out report, Out scale_inv, NormFwdAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const RowStatistic rstds{known_rstd, rstd};
  const Check check = check_rmsnorm_fwd(x, gamma, casting, y, y_t, rstds);
  if (check.failed()) return check.error();
  return run_norm_fwd(stream, x, gamma, nullptr, casting, y, y_t, nullptr, rstds, attributes);
}

}  // namespace te

TE_HANDLER(layernorm_fwd, LayerNormFwd)
TE_HANDLER(rmsnorm_fwd, RmsNormFwd)

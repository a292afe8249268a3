// LayerNorm and RMSNorm on CUDA, backward: dx by rows, and dgamma and dbeta by columns from the same read of x and dy.
// With s bytes for x, dy and dx each, 3 s bytes a value, and s more for a residual. One block a multiprocessor goes
// over its share of the rows and keeps the column sums of them in registers; their partial sums, 8 bytes a column and
// block, are 2 % more at 16384 rows, and one more launch adds them up. A row waits for its two sums over K, so the rows
// to come are copied to shared memory meanwhile; a thread reads back only what it copied itself, so that needs no
// barrier.
//
// Rows that are no multiple of 8, too long, or of two dtypes take a plain path of two kernels, 5 s bytes a value.
#include "core/cuda.cuh"
#include "ops/layernorm.h"

namespace te {
namespace {

struct NormBackward {
  const void* dy;
  DType dy_dtype;
  const void* x;
  Parameter gamma;
  const float* mean;  // absent for rmsnorm
  const float* rstd;
  const void* residual;  // may be absent
  void* dx;
  float* dgamma;
  float* dbeta;     // absent for rmsnorm
  float* partials;  // [dgamma | dbeta, parts, cols]
  int64_t rows;
  int64_t cols;
};

constexpr int kThreads = 512;
constexpr int kVectors = 4;  // times 8 values a thread
constexpr int kMaxParts = 256;

template <typename T>
constexpr int kOperandBytes = kVectors * 8 * sizeof(T) * kThreads;  // one row for every group

// Sums of two values over a group of threads. Groups advance independently: a barrier of its own for each.
template <int kGroup>
__device__ __forceinline__ float2 group_sums(float2 v, float2* slots) {
  v = {sum_of_lanes(v.x), sum_of_lanes(v.y)};
  if constexpr (kGroup > 32) {
    constexpr int kWarps = kGroup / 32;
    const int group = threadIdx.x / kGroup;
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = v;
    barrier_of_threads<kGroup>(group + 1);
    v = slots[group * kWarps + threadIdx.x % kWarps];
    v = {sum_of_lanes<kWarps>(v.x), sum_of_lanes<kWarps>(v.y)};
  }
  return v;
}

// kOperands: x and dy, and the residual if there is one.
template <typename T, int kGroup, int kOperands>
__global__ void __launch_bounds__(kThreads, 1) norm_bwd_rows(const NormBackward a, int stages) {
  constexpr int kGroups = kThreads / kGroup;
  constexpr int kQuads = Vec8<T>::kQuads;
  constexpr bool kThroughL1 = kOperands == 2 || kGroup < kThreads;
  extern __shared__ uint4 ring[];  // [stage][x | dy | residual][vector][quad][thread]
  __shared__ float2 slots[2][kThreads / 32];
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % kGroup;
  const int stride = static_cast<int>(gridDim.x) * kGroups, cols = static_cast<int>(a.cols);
  // From the last row to the first, see cuda.cuh.
  const int first = static_cast<int>(a.rows) - 1 - (static_cast<int>(blockIdx.x) * kGroups + group);
  const auto column = [&](int k) { return (k * kGroup + lane) * 8; };
  const auto slot = [&](int stage, int operand, int k, int quad) {
    return ring + (((stage * kOperands + operand) * kVectors + k) * kQuads + quad) * kThreads + threadIdx.x;
  };
  const auto fetch = [&](int row, int stage) {
    if (row >= 0) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (column(k) >= cols) continue;
#pragma unroll
        for (int q = 0; q < kQuads; ++q) {
          const int64_t offset = row * a.cols + column(k) + q * (16 / sizeof(T));
          copy_quad<kThroughL1>(slot(stage, 0, k, q), static_cast<const T*>(a.x) + offset);
          copy_quad<kThroughL1>(slot(stage, 1, k, q), static_cast<const T*>(a.dy) + offset);
          if constexpr (kOperands == 3)
            copy_quad<kThroughL1>(slot(stage, 2, k, q), static_cast<const T*>(a.residual) + offset);
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto read = [&](int stage, int operand, int k) {
    Vec8<T> v;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) v.set_quad(q, *slot(stage, operand, k, q));
    return v;
  };

  // Before the rows, behind which these would come late.
  float gamma[kVectors][8] = {}, dgamma[kVectors][8] = {}, dbeta[kVectors][8] = {};
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (column(k) < cols) a.gamma.get8(column(k), 8, true, gamma[k]);
  }
  const float per_column = 1.f / static_cast<float>(a.cols);
  const auto statistic = [&](const float* p, int row) { return p && row >= 0 ? __ldg(p + row) : 0.f; };
  float next_mean = statistic(a.mean, first), next_rstd = statistic(a.rstd, first);
  for (int s = 0; s < stages; ++s) fetch(first - s * stride, s);

  int stage = 0, parity = 0;
  for (int row = first; row + group >= 0; row -= stride) {
    if (row < 0) {  // of the last rows, where other groups have one: racecheck wants all to pass as many barriers
      group_sums<kGroup>({0.f, 0.f}, slots[parity]);
      break;
    }
    const float mean = next_mean, rstd = next_rstd;
    next_mean = statistic(a.mean, row - stride);
    next_rstd = statistic(a.rstd, row - stride);
    // The copies of this row have landed; the younger ones may be under way.
    if (stages >= 3) {
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (stages == 2) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    float2 sums = {0.f, 0.f};  // of wdy and wdy * xhat
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= cols) continue;
      const Vec8<T> x = read(stage, 0, k), dy = read(stage, 1, k);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float xhat = (x[j] - mean) * rstd, wdy = dy[j] * gamma[k][j];
        sums.x += wdy;
        sums.y += wdy * xhat;
        dgamma[k][j] += dy[j] * xhat;
        dbeta[k][j] += dy[j];
      }
    }
    sums = group_sums<kGroup>(sums, slots[parity]);
    const float of_wdy = a.mean ? sums.x * per_column : 0.f, of_product = sums.y * per_column;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (column(k) >= cols) continue;
      const Vec8<T> x = read(stage, 0, k), dy = read(stage, 1, k);
      float dx[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float xhat = (x[j] - mean) * rstd;
        dx[j] = rstd * (dy[j] * gamma[k][j] - of_wdy - xhat * of_product);
      }
      if constexpr (kOperands == 3) {
        const Vec8<T> past = read(stage, 2, k);
#pragma unroll
        for (int j = 0; j < 8; ++j) dx[j] += past[j];
      }
      store8(static_cast<T*>(a.dx) + row * a.cols + column(k), round8<T>(dx), 8, true);
    }
    fetch(row - stages * stride, stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
    parity ^= 1;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");

  // ---- The block's column sums: over its groups through shared memory, first dgamma's, then dbeta's
  constexpr int kCols = kVectors * kGroup * 8;
  float* const totals = reinterpret_cast<float*>(ring);  // [group][column]
  const auto write = [&](const float (&mine)[kVectors][8], float* partials) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int h = 0; h < 8; h += 4) {
        *reinterpret_cast<float4*>(totals + group * kCols + column(k) + h) =
            make_float4(mine[k][h], mine[k][h + 1], mine[k][h + 2], mine[k][h + 3]);
      }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.cols; c += kThreads) {
      float sum = 0.f;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) sum += totals[g * kCols + c];
      partials[blockIdx.x * a.cols + c] = sum;
    }
  };
  write(dgamma, a.partials);
  if (a.dbeta) write(dbeta, a.partials + gridDim.x * a.cols);
}

// ---- The plain path

template <typename T>
__global__ void __launch_bounds__(kThreads) norm_bwd_dx(const NormBackward a) {
  __shared__ float2 slots[kThreads / 32];
  const int64_t row = blockIdx.x;
  const float mean = a.mean ? a.mean[row] : 0.f, rstd = a.rstd[row];
  const auto at = [&](int64_t c, float& xhat, float& wdy) {
    xhat = (load1(static_cast<const T*>(a.x) + row * a.cols + c) - mean) * rstd;
    wdy = load1(a.dy, a.dy_dtype, row * a.cols + c) * (load1(a.gamma.data, a.gamma.dtype, c) + a.gamma.offset);
  };
  float2 sums = {0.f, 0.f};
  for (int64_t c = threadIdx.x; c < a.cols; c += kThreads) {
    float xhat, wdy;
    at(c, xhat, wdy);
    sums.x += wdy;
    sums.y += wdy * xhat;
  }
  sums = group_sums<kThreads>(sums, slots);
  const float per_column = 1.f / static_cast<float>(a.cols);
  const float of_wdy = a.mean ? sums.x * per_column : 0.f, of_product = sums.y * per_column;
  for (int64_t c = threadIdx.x; c < a.cols; c += kThreads) {
    float xhat, wdy;
    at(c, xhat, wdy);
    const float past = a.residual ? load1(static_cast<const T*>(a.residual) + row * a.cols + c) : 0.f;
    store1(static_cast<T*>(a.dx) + row * a.cols + c, rstd * (wdy - of_wdy - xhat * of_product) + past);
  }
}

// A block sums 32 columns over its part of the rows.
template <typename T>
__global__ void __launch_bounds__(256) norm_bwd_columns(const NormBackward a, int parts) {
  __shared__ float2 lanes[8][33];
  const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
  const int64_t blocks = (a.cols + 31) / 32;
  const int64_t part = blockIdx.x / blocks, col = blockIdx.x % blocks * 32 + tx;
  float2 sums = {0.f, 0.f};
  if (col < a.cols) {
    for (int64_t row = a.rows * part / parts + ty; row < a.rows * (part + 1) / parts; row += 8) {
      const float mean = a.mean ? a.mean[row] : 0.f;
      const float dy = load1(a.dy, a.dy_dtype, row * a.cols + col);
      sums.x += dy * (load1(static_cast<const T*>(a.x) + row * a.cols + col) - mean) * a.rstd[row];
      sums.y += dy;
    }
  }
  lanes[ty][tx] = sums;
  __syncthreads();
  if (ty != 0 || col >= a.cols) return;
  for (int i = 1; i < 8; ++i) sums = {sums.x + lanes[i][tx].x, sums.y + lanes[i][tx].y};
  a.partials[part * a.cols + col] = sums.x;
  if (a.dbeta) a.partials[(parts + part) * a.cols + col] = sums.y;
}

// ---- Launching

template <typename T, int kOperands, int kGroup>
cudaError_t launch_rows(cudaStream_t stream, const NormBackward& a, int64_t& parts) {
  constexpr int kStageBytes = kOperands * kOperandBytes<T>;
  const int stages = std::min(3, current_device().shared_memory / kStageBytes);
  parts = std::min<int64_t>({ceil_div(a.rows, kThreads / kGroup), current_device().multiprocessors, kMaxParts});
  return launch({parts, kThreads, stages * kStageBytes}, stream, norm_bwd_rows<T, kGroup, kOperands>, a, stages);
}

template <typename T, int kOperands>
cudaError_t launch_rows(cudaStream_t stream, const NormBackward& a, int64_t& parts) {
  const auto fits = [&](int group) { return a.cols <= group * kVectors * 8; };
  // 64 threads have no empty shares of 2048 columns; without a residual 128 are faster all the same.
  const bool by_64 = fits(64) && (kOperands == 3 || a.cols <= 1536);
  return fits(32)    ? launch_rows<T, kOperands, 32>(stream, a, parts)
         : by_64     ? launch_rows<T, kOperands, 64>(stream, a, parts)
         : fits(128) ? launch_rows<T, kOperands, 128>(stream, a, parts)
         : fits(256) ? launch_rows<T, kOperands, 256>(stream, a, parts)
                     : launch_rows<T, kOperands, kThreads>(stream, a, parts);
}

template <typename T>
ffi::Error norm_bwd(cudaStream_t stream, const NormBackward& a, bool same_dtype) {
  const bool vector = a.cols % 8 == 0 && a.rows < kMostRows && aligned(a.x) && aligned(a.dy) && aligned(a.dx) &&
                      aligned(a.gamma.data) && aligned(a.residual);
  const bool ring_fits = current_device().shared_memory >= (a.residual ? 3 : 2) * kOperandBytes<T>;
  int64_t parts = 0;
  if (vector && same_dtype && ring_fits && a.cols <= kThreads * kVectors * 8) {
    TE_CUDA_CHECK(a.residual ? launch_rows<T, 3>(stream, a, parts) : launch_rows<T, 2>(stream, a, parts));
  } else {
    TE_CUDA_CHECK(launch({a.cols ? a.rows : 0, kThreads}, stream, norm_bwd_dx<T>, a));
    parts = std::min<int64_t>(ceil_div(a.rows, 64), kMaxParts);
    TE_CUDA_CHECK(launch({parts * ceil_div(a.cols, 32), 256}, stream, norm_bwd_columns<T>, a, static_cast<int>(parts)));
  }
  TE_CUDA_CHECK(launch_sum_partials(stream, a.partials, parts, a.cols, a.dgamma, a.dbeta));
  return ffi::Error::Success();
}

ffi::Error run_norm_bwd(cudaStream_t stream, Check& check, const In& dy, const In& x, const In& gamma,
                        const float* mean, const In& rstd, const In& residual, Out& dx, Out& dgamma, float* dbeta,
                        Out& workspace, const NormBwdAttributes& attributes) {
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, 1);
  check_workspace(check, workspace, 4 * m.cols * std::min<int64_t>(m.rows, kMaxParts) * (dbeta ? 2 : 1));
  if (check.failed()) return check.error();
  const NormBackward a{dy.untyped_data(),
                       dy.element_type(),
                       m.data,
                       {gamma.untyped_data(), gamma.element_type(), attributes.zero_centered_gamma ? 1.f : 0.f},
                       mean,
                       rstd.typed_data<float>(),
                       absent(residual) ? nullptr : residual.untyped_data(),
                       dx->untyped_data(),
                       dgamma->typed_data<float>(),
                       dbeta,
                       static_cast<float*>(workspace->untyped_data()),
                       m.rows,
                       m.cols};
  const bool same_dtype = dy.element_type() == m.dtype;
  return with_float(m.dtype, [&](auto t) { return norm_bwd<decltype(t)>(stream, a, same_dtype); });
}

}  // namespace

// Workspace of both: 8 * K * min(rows, 256) bytes (rmsnorm needs half).
ffi::Error LayerNormBwd(cudaStream_t stream, In dy, In x, In gamma, In mean, In rstd, In residual, Out dx, Out dgamma,
                        Out dbeta, Out workspace, NormBwdAttributes attributes) {
  Check check = check_layernorm_bwd(dy, x, gamma, mean, rstd, residual, dx, dgamma, dbeta);
  return run_norm_bwd(stream, check, dy, x, gamma, static_cast<const float*>(mean.untyped_data()), rstd, residual, dx,
                      dgamma, static_cast<float*>(dbeta->untyped_data()), workspace, attributes);
}

ffi::Error RmsNormBwd(cudaStream_t stream, In dy, In x, In gamma, In rstd, In residual, Out dx, Out dgamma,
                      Out workspace, NormBwdAttributes attributes) {
  Check check = check_rmsnorm_bwd(dy, x, gamma, rstd, residual, dx, dgamma);
  return run_norm_bwd(stream, check, dy, x, gamma, nullptr, rstd, residual, dx, dgamma, nullptr, workspace, attributes);
}

}  // namespace te

TE_HANDLER(layernorm_bwd, LayerNormBwd)
TE_HANDLER(rmsnorm_bwd, RmsNormBwd)

// LayerNorm and RMSNorm on CUDA, forward. Bytes a value, with s for x and o for y (1 for FP8); statistics, gamma and
// beta are a fraction of a percent:
//   y alone         s + o       rows in the registers of 32 to 512 threads each (norm_rows)
//   y and y_t       s + 2       strips of 64 or 32 rows in the registers of a cluster of blocks (norm_strips)
//   what they lack  2 s + o     the statistics first (row_statistics, or norm_rows without y), then the tile kernel
//                               of tile.cuh: unaligned rows, rows beyond 16384 values, y_t on a GPU without clusters
// Two passes would be simpler for y_t, but move half as much again; a row-wise kernel alone would store y_t in single
// bytes. The variance is that of differences from a mean, never a difference of large sums.
#include "core/tile.cuh"
#include "ops/layernorm.h"

namespace te {
namespace {

struct Norm {
  const void* x;
  Parameter gamma;
  Parameter beta;
  float* mean;  // absent for rmsnorm
  float* rstd;
  float epsilon;
  bool centered;  // layernorm
};

__device__ __forceinline__ void normalize(const float (&x)[8], float mean, float rstd, const float (&gamma)[8],
                                          const float (&beta)[8], float (&y)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) y[j] = (x[j] - mean) * rstd * gamma[j] + beta[j];
}

template <typename T>
__device__ __forceinline__ void unpack(const Vec8<T>& raw, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = raw[j];
}

// ---- y alone: a row a group of threads, each with kVectors times 8 values 8 * kGroup apart.

constexpr int kVectors = 4;

// Sum over a group, which is a part of a warp's block or a whole block; `slots` is used once.
template <int kGroup>
__device__ __forceinline__ float group_sum(float x, float* slots) {
  x = sum_of_lanes(x);
  if constexpr (kGroup > 32) {
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
    __syncthreads();
    x = sum_of_lanes<kGroup / 32>(slots[threadIdx.x % (kGroup / 32)]);
  }
  return x;
}

// Without y: the statistics alone.
template <typename T, int kGroup, bool kFp8>
__global__ void __launch_bounds__(kGroup < 128 ? 128 : kGroup) norm_rows(const Norm a, const Result out) {
  __shared__ float slots[2][16];
  constexpr int kRows = kGroup < 128 ? 128 / kGroup : 1;
  const int lane = threadIdx.x % kGroup;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kGroup;
  const bool live = row < out.rows;  // the same for all of a warp
  const T* x = static_cast<const T*>(a.x) + row * out.cols;
  const auto column = [&](int k) { return (k * kGroup + lane) * 8; };
  const auto here = [&](int k) { return live && column(k) < out.cols; };
  const float per_column = 1.f / static_cast<float>(out.cols);

  Vec8<T> raw[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) raw[k] = here(k) ? load8(x + column(k)) : Vec8<T>{};
  float mean = 0.f;
  if (a.centered) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += raw[k][j];
    }
    mean = group_sum<kGroup>(sum, slots[0]) * per_column;
  }
  float squares = 0.f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float d = raw[k][j] - mean;
      squares += here(k) ? d * d : 0.f;
    }
  }
  const float rstd = rsqrtf(group_sum<kGroup>(squares, slots[1]) * per_column + a.epsilon);
  if (live && lane == 0) {
    if (a.mean) a.mean[row] = mean;
    a.rstd[row] = rstd;
  }
  if (!out.y) return;

  const float scale = out.scale ? __ldg(out.scale) : 1.f;
  float most = 0.f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (!here(k)) continue;
    float v[8], gamma[8], beta[8];
    a.gamma.get8(column(k), 8, true, gamma);
    a.beta.get8(column(k), 8, true, beta);
    unpack(raw[k], v);
    normalize(v, mean, rstd, gamma, beta, v);
    store_result<kFp8>(out, row * out.cols + column(k), scale, v, 8, most);
  }
  merge_amax(out.amax, most);
}

// ---- y and y_t: a cluster of blocks holds a strip of rows, each block some columns of it. A row's mean and its sum
// ---- of squared differences are taken per block, exchanged once, and joined (Chan, Golub and LeVeque, 1979).

constexpr int kStripThreads = 256;
constexpr int kLargestCluster = 16;

// A thread holds kSteps times 4 rows x 8 columns, 64 registers; kLanes threads lie along a row. 64 rows give runs of
// 64 bytes in y_t, 32 rows sectors of 32.
template <typename T, int kLanes>
struct Strip {
  static constexpr int kSteps = 8 / sizeof(T);
  static constexpr int kRows = 4 * kStripThreads / kLanes;
  static constexpr int kStepCols = 8 * kLanes;
  static constexpr int kCols = kSteps * kStepCols;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TE_CLUSTERS 1
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Writes to the same shared variable of another block of the cluster.
__device__ __forceinline__ void store_to_block(float2* p, int block, float2 value) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(p))), "r"(block));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}
#endif

template <typename T, int kLanes>
__global__ void __launch_bounds__(kStripThreads, 2) norm_strips(const Norm a, const Result out, int cluster) {
#ifdef TE_CLUSTERS
  using S = Strip<T, kLanes>;
  __shared__ __align__(16) TransposedTile<S::kRows, S::kCols> transposed;
  __shared__ float2 parts[S::kRows][kLargestCluster];  // mean, sum of squared differences; by block of the cluster
  cluster_arrive();                                    // a block's shared memory may be written once the block runs

  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / cluster) * S::kRows, col0 = int64_t{rank} * S::kCols;
  const int tx = threadIdx.x % kLanes, ty = threadIdx.x / kLanes;
  const auto column = [&](int step) { return col0 + step * S::kStepCols + tx * 8; };
  const auto columns_of = [&](int block) {
    return static_cast<float>(min(out.cols - int64_t{block} * S::kCols, int64_t{S::kCols}));
  };

  // ---- Load, and this block's share of the statistics
  Vec8<T> raw[S::kSteps][4];
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + ty * 4 + i;
      raw[step][i] = row < out.rows && column(step) < out.cols
                         ? load8(static_cast<const T*>(a.x) + row * out.cols + column(step))
                         : Vec8<T>{};
    }
  }
  float2 mine[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float mean = 0.f;
    if (a.centered) {
#pragma unroll
      for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
        for (int j = 0; j < 8; ++j) mean += raw[step][i][j];
      }
      mean = sum_of_lanes<kLanes>(mean) / columns_of(rank);
    }
    float squares = 0.f;
#pragma unroll
    for (int step = 0; step < S::kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float d = raw[step][i][j] - mean;
        squares += column(step) < out.cols ? d * d : 0.f;
      }
    }
    mine[i] = {mean, sum_of_lanes<kLanes>(squares)};
  }

  // ---- Exchange: thread tx of a row tells block tx
  cluster_wait();
  if (tx < cluster) {
#pragma unroll
    for (int i = 0; i < 4; ++i) store_to_block(&parts[ty * 4 + i][rank], tx, mine[i]);
  }
  cluster_arrive();
  cluster_wait();
  float mean[4], rstd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 part = tx < cluster ? parts[ty * 4 + i][tx] : float2{0.f, 0.f};
    const float count = tx < cluster ? columns_of(tx) : 0.f;
    mean[i] = sum_of_lanes<kLanes>(part.x * count) / static_cast<float>(out.cols);
    const float d = part.x - mean[i];
    const float squares = sum_of_lanes<kLanes>(part.y + count * (d * d));
    rstd[i] = rsqrtf(squares / static_cast<float>(out.cols) + a.epsilon);
    const int64_t row = row0 + ty * 4 + i;
    if (rank == 0 && tx == 0 && row < out.rows) {
      if (a.mean) a.mean[row] = mean[i];
      a.rstd[row] = rstd[i];
    }
  }

  // ---- y, and the strip's bytes for y_t
  const float scale = __ldg(out.scale);
  float most = 0.f;
#pragma unroll
  for (int step = 0; step < S::kSteps; ++step) {
    if (column(step) >= out.cols) continue;
    float gamma[8], beta[8];
    a.gamma.get8(column(step), 8, true, gamma);
    a.beta.get8(column(step), 8, true, beta);
    uint32_t bytes[2][4] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = row0 + ty * 4 + i;
      if (row >= out.rows) continue;
      float v[8];
      unpack(raw[step][i], v);
      normalize(v, mean[i], rstd[i], gamma, beta, v);
      const uint2 q = store_result<true>(out, row * out.cols + column(step), scale, v, 8, most);
      bytes[0][i] = q.x;
      bytes[1][i] = q.y;
    }
    transposed.put_transposed(step * S::kStepCols + tx * 8, ty, bytes);
  }
  __syncthreads();
  transposed.template store<kStripThreads>(out.y_t, col0, row0, out.cols, out.rows, out.vector_t);
  merge_amax(out.amax, most);
#endif
}

// ---- What the above lack: statistics of any row, then a Producer for the tile kernel.

template <typename T>
__global__ void __launch_bounds__(256) row_statistics(const Norm a, const Result out) {
  __shared__ float slots[2][8];
  const T* x = static_cast<const T*>(a.x) + blockIdx.x * out.cols;
  float mean = 0.f;
  if (a.centered) {
    float sum = 0.f;
    for (int64_t c = threadIdx.x; c < out.cols; c += 256) sum += load1(x + c);
    mean = group_sum<256>(sum, slots[0]) / static_cast<float>(out.cols);
  }
  float squares = 0.f;
  for (int64_t c = threadIdx.x; c < out.cols; c += 256) {
    const float d = load1(x + c) - mean;
    squares += d * d;
  }
  const float rstd = rsqrtf(group_sum<256>(squares, slots[1]) / static_cast<float>(out.cols) + a.epsilon);
  if (threadIdx.x == 0) {
    if (a.mean) a.mean[blockIdx.x] = mean;
    a.rstd[blockIdx.x] = rstd;
  }
}

template <typename T>
struct Normalized {
  static constexpr int kOutputs = 1, kBlocks = 2;
  struct Columns {
    float gamma[8];
    float beta[8];
  };
  struct Raw {
    Vec8<T> x;
    float mean;
    float rstd;
  };
  Norm a;
  int64_t cols;

  __device__ __forceinline__ Columns columns(int64_t col, int n, bool vector) const {
    Columns c;
    a.gamma.get8(col, n, vector, c.gamma);
    a.beta.get8(col, n, vector, c.beta);
    return c;
  }
  __device__ __forceinline__ Raw load(int64_t row, int64_t col, int n, bool vector) const {
    const T* p = static_cast<const T*>(a.x) + row * cols + col;
    return {vector ? load8(p) : load8(p, n), a.mean ? a.mean[row] : 0.f, a.rstd[row]};
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns& c, float (&v)[1][8]) const {
    unpack(raw.x, v[0]);
    normalize(v[0], raw.mean, raw.rstd, c.gamma, c.beta, v[0]);
  }
};

// ---- Launching

template <typename T, bool kFp8>
cudaError_t launch_rows(cudaStream_t stream, const Norm& a, const Result& out) {
  const auto fits = [&](int group) { return out.cols <= group * kVectors * 8; };
  if (fits(32)) return launch({ceil_div(out.rows, 4), 128}, stream, norm_rows<T, 32, kFp8>, a, out);
  if (fits(128)) return launch({out.rows, 128}, stream, norm_rows<T, 128, kFp8>, a, out);
  if (fits(256)) return launch({out.rows, 256}, stream, norm_rows<T, 256, kFp8>, a, out);
  return launch({out.rows, 512}, stream, norm_rows<T, 512, kFp8>, a, out);
}

template <typename T, int kLanes>
cudaError_t launch_strips(cudaStream_t stream, const Norm& a, const Result& out) {
  using S = Strip<T, kLanes>;
  const int cluster = static_cast<int>(ceil_div(out.cols, S::kCols));
  return launch({ceil_div(out.rows, S::kRows) * cluster, kStripThreads, 0, cluster}, stream, norm_strips<T, kLanes>, a,
                out, cluster);
}

template <typename T>
ffi::Error norm_fwd(cudaStream_t stream, const Norm& a, Result out) {
  if (out.amax) TE_CUDA_CHECK(cudaMemsetAsync(out.amax, 0, sizeof(float), stream));
  if (out.rows * out.cols == 0) return ffi::Error::Success();
  out.vector = out.vector && aligned(a.x) && aligned(a.gamma.data) && aligned(a.beta.data);
  out.vector_t = aligned(out.y_t) && out.rows % 16 == 0;
  const bool rows_fit = out.vector && out.cols <= 512 * kVectors * 8;
  if (rows_fit && !out.y_t) {
    TE_CUDA_CHECK(is_fp8(out.dtype) ? launch_rows<T, true>(stream, a, out) : launch_rows<T, false>(stream, a, out));
    return ffi::Error::Success();
  }
  if (out.vector && current_device().architecture >= 90) {
    if (out.cols <= kLargestCluster * Strip<T, 16>::kCols) {
      TE_CUDA_CHECK((launch_strips<T, 16>(stream, a, out)));
      return ffi::Error::Success();
    }
    if (out.cols <= kLargestCluster * Strip<T, 32>::kCols) {
      TE_CUDA_CHECK((launch_strips<T, 32>(stream, a, out)));
      return ffi::Error::Success();
    }
  }
  if (rows_fit) {
    Result statistics = out;
    statistics.y = nullptr;
    TE_CUDA_CHECK((launch_rows<T, false>(stream, a, statistics)));
  } else {
    TE_CUDA_CHECK(launch({out.rows, 256}, stream, row_statistics<T>, a, out));
  }
  return launch_tiles(stream, Normalized<T>{a, out.cols}, out);
}

ffi::Error run_norm_fwd(cudaStream_t stream, const In& x, const In& gamma, const In* beta, const In& scale, Out& y,
                        Out& y_t, float* mean, Out& rstd, Out& amax, const NormFwdAttributes& attributes) {
  const Matrix m = matrix(x, 1);
  const Result out = fp8_or_float_result(y, scale, y_t, amax, m.rows, m.cols);
  const Norm a{m.data,
               {gamma.untyped_data(), gamma.element_type(), attributes.zero_centered_gamma ? 1.f : 0.f},
               {beta ? beta->untyped_data() : nullptr, beta ? beta->element_type() : DType::F32, 0.f},
               mean,
               rstd->typed_data<float>(),
               attributes.epsilon,
               /*centered=*/beta != nullptr};
  return with_float(m.dtype, [&](auto t) { return norm_fwd<decltype(t)>(stream, a, out); });
}

}  // namespace

ffi::Error LayerNormFwd(cudaStream_t stream, In x, In gamma, In beta, In scale, Out y, Out y_t, Out mean, Out rstd,
                        Out amax, NormFwdAttributes attributes) {
  const Check check = check_layernorm_fwd(x, gamma, beta, scale, y, y_t, mean, rstd, amax);
  if (check.failed()) return check.error();
  return run_norm_fwd(stream, x, gamma, &beta, scale, y, y_t, mean->typed_data<float>(), rstd, amax, attributes);
}

ffi::Error RmsNormFwd(cudaStream_t stream, In x, In gamma, In scale, Out y, Out y_t, Out rstd, Out amax,
                      NormFwdAttributes attributes) {
  const Check check = check_rmsnorm_fwd(x, gamma, scale, y, y_t, rstd, amax);
  if (check.failed()) return check.error();
  return run_norm_fwd(stream, x, gamma, nullptr, scale, y, y_t, nullptr, rstd, amax, attributes);
}

}  // namespace te

TE_HANDLER(layernorm_fwd, LayerNormFwd)
TE_HANDLER(rmsnorm_fwd, RmsNormFwd)

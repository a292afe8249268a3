// Norms of whole rows: y in the one pass that finds their statistics, or its amax alone.
#pragma once

#include "ops/layernorm.cuh"

namespace te {

// ---- Rows of whole vectors, each in the registers of one warp or of more: the statistics and y, or its amax alone.
// ---- Each warp's mean and sum of squared differences are joined (Chan, Golub and LeVeque, 1979). Where y is written,
// ---- a thread asks for 8 values of its next row as soon as it is done with those of this one. Where it is not, values
// ---- of y are computed after a warp's first row only where they may exceed the most that is known so far: of a
// ---- thread's, none is larger than its largest |x| and the mean say, times its largest |gamma|, plus its largest
// ---- |beta|.

constexpr int kNormThreads = 512;
constexpr float kBoundError = 1.f + 0x1p-18f;  // of so few roundings

// max |x| of a thread, NaN where one is; pairs of 16 bits at once, whose signs do not matter.
template <typename T, int kVectors>
__device__ __forceinline__ float most_abs(const Vec8<T> (&x)[kVectors]) {
  Vec8<T> most = x[0];
#pragma unroll
  for (int v = 1; v < kVectors; ++v) {
#pragma unroll
    for (int w = 0; w < 4 * Vec8<T>::kQuads; ++w) {
      if constexpr (std::is_same_v<T, bf16>) {
        asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(most.words[w]) : "r"(x[v].words[w]));
      } else if constexpr (std::is_same_v<T, f16>) {
        asm("max.NaN.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(most.words[w]) : "r"(x[v].words[w]));
      } else {
        asm("max.NaN.xorsign.abs.f32 %0, %0, %1;" : "+r"(most.words[w]) : "r"(x[v].words[w]));
      }
    }
  }
  float values[8];
  unpack(most, values);
  return max_abs(0.f, values);
}

// gamma and beta in shared memory, halves of 8 apart so that neighbouring threads read neighbouring words, and the
// largest magnitude of each 8.
struct RowParameters {
  float4* values;  // [gamma or beta, half, cols / 8]
  float* most;     // [gamma or beta, cols / 8]
  int vectors;

  __device__ __forceinline__ RowParameters(void* memory, int cols)
      : values(static_cast<float4*>(memory)), most(reinterpret_cast<float*>(values + cols / 2)), vectors(cols / 8) {}
  static int64_t bytes(int64_t cols) { return cols / 8 * 2 * (2 * sizeof(float4) + sizeof(float)); }

  // By a block, which then meets at a barrier. `ask`: for what is wanted next; behind much else the parameters would
  // come late.
  template <typename Ask>
  __device__ __forceinline__ void fill(const Parameter& gamma, const Parameter& beta, Ask ask) const {
    int at = threadIdx.x;
    float v[2][8];
    const auto load = [&] {
      if (at >= vectors) return;
      gamma.get8(at * 8, 8, true, v[0]);
      beta.get8(at * 8, 8, true, v[1]);
    };
    load();
    ask();
    for (; at < vectors; at += blockDim.x, load()) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* four = v[which] + 4 * h;
          values[(2 * which + h) * vectors + at] = make_float4(four[0], four[1], four[2], four[3]);
        }
        most[which * vectors + at] = max_abs(0.f, v[which]);
      }
    }
  }
  __device__ __forceinline__ void get8(int which, int vector, float (&v)[8]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float4 four = values[(2 * which + h) * vectors + vector];
      v[4 * h] = four.x, v[4 * h + 1] = four.y, v[4 * h + 2] = four.z, v[4 * h + 3] = four.w;
    }
  }
};

// A row takes kWarps warps, whose threads have kVectors times 8 values of it. y is written from the last row to the
// first, see cuda.cuh.
template <typename T, int kWarps, int kVectors, bool kWrites, Stored kStored>
__global__ void __launch_bounds__(kNormThreads, kVectors * sizeof(T) <= 4   ? 3
                                                : kVectors * sizeof(T) <= 8 ? 2
                                                                            : 1)
    norm_rows(const Norm a, const Result out) {
  constexpr int kGroup = kWarps * 32, kAtOnce = kNormThreads / kGroup;
  extern __shared__ __align__(16) unsigned char parameter_memory[];
  __shared__ float2 parts[2][kAtOnce][kWarps];  // by row, as the next one's are sent while some still read
  __shared__ BlockAmax amax;
  const int rows = static_cast<int>(out.rows), cols = static_cast<int>(out.cols), vectors = cols / 8;
  const int lane = threadIdx.x % 32, in_row = threadIdx.x % kGroup, of_block = threadIdx.x / kGroup;
  const bool normalizes = kWrites || out.amax.value;
  const auto vector = [&](int v) { return v * kGroup + in_row; };
  const auto columns_of = [&](int warp) {
    int count = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) count += min(max(cols - (v * kGroup + warp * 32) * 8, 0), 256);
    return static_cast<float>(count);
  };
  const float columns_here = columns_of(in_row / 32);
  const float per_column = 1.f / static_cast<float>(cols), per_column_here = 1.f / columns_here;
  __shared__ float counts[kWarps];
  if (threadIdx.x < kWarps) counts[threadIdx.x] = columns_of(threadIdx.x);

  // The nth row to be taken, the last again beyond it, and where it begins for this thread.
  const auto row_of = [&](int n) { return kWrites ? max(rows - 1 - n, 0) : min(n, rows - 1); };
  const auto offset = [&](int n) { return int64_t{row_of(n)} * cols + in_row * 8; };
  const auto load = [&](int n, int v) {
    return load8</*kOnlyReads=*/!kWrites>(static_cast<const T*>(a.x) + offset(n) + v * kGroup * 8);
  };
  const int stride = static_cast<int>(gridDim.x) * kAtOnce;
  int n = static_cast<int>(blockIdx.x) * kAtOnce + of_block;
  Vec8<T> raw[kVectors];
  const auto fetch = [&] {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      raw[v] = {};
      if (vector(v) < vectors) raw[v] = load(n, v);
    }
  };
  const RowParameters parameters(parameter_memory, cols);
  float gamma_most = 0.f, beta_most = 0.f;
  if (normalizes) {
    parameters.fill(a.gamma, a.beta, fetch);
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kWrites || vector(v) >= vectors) continue;
      gamma_most = max_abs(gamma_most, parameters.most[vector(v)]);
      beta_most = max_abs(beta_most, parameters.most[vectors + vector(v)]);
    }
  } else {
    fetch();
  }
  const float scale = kWrites ? out.scale.get() : 1.f;
  if (kWrites && blockIdx.x == 0 && threadIdx.x == 0) out.scale.store_inverse(scale);

  float most[2] = {}, known = 0.f;
  int turn = 0;
  for (int first = static_cast<int>(blockIdx.x) * kAtOnce; first < rows; first += stride, n += stride, ++turn) {
    if (!kWrites && turn) fetch();
    if (!kWrites && normalizes && turn && !(turn & (turn - 1))) known = out.amax.so_far();
    float mean_here = 0.f, squares = 0.f;
    bool precise = false;
    if constexpr (sizeof(T) == 2) {
      RowMoments<T> moments[2];
#pragma unroll
      for (int v = 0; v < kVectors; ++v) moments[v % 2].add(raw[v]);
      squares = sum_of_lanes(moments[0].squares() + moments[1].squares());
      if (a.centered) mean_here = sum_of_lanes<4>(moments[0].sum() + moments[1].sum()) * per_column_here;
      precise = !a.centered || center(squares, mean_here, columns_here);
    }
    if (!__all_sync(0xffffffffu, precise)) {
      const auto sum_of = [&](auto term) {
        float sum = 0.f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (vector(v) >= vectors) continue;
          float of_vector = 0.f;
#pragma unroll
          for (int j = 0; j < 8; ++j) of_vector += term(raw[v][j]);
          sum += of_vector;
        }
        return sum_of_lanes(sum);
      };
      if (a.centered) mean_here = sum_of([](float x) { return x; }) * per_column_here;
      squares = sum_of([&](float x) { return (x - mean_here) * (x - mean_here); });
    }
    float mean = mean_here;
    if (kWarps > 1) {
      float2(&of_row)[kWarps] = parts[turn % 2][of_block];
      if (lane == 0) of_row[in_row / 32] = {mean_here, squares};
      barrier_of_threads<kGroup>(1 + of_block);
      const float2 part = of_row[lane % kWarps];
      const float count = counts[lane % kWarps];
      mean = sum_of_lanes<kWarps>(part.x * count) * per_column;
      const float off = part.x - mean;
      squares = sum_of_lanes<kWarps>(part.y + count * (off * off));
    }
    const float rstd = rsqrtf(squares * per_column + a.epsilon), shift = -mean * rstd;
    if (n >= rows) break;
    if (in_row == 0) {
      if (a.mean) a.mean[row_of(n)] = mean;
      a.rstd[row_of(n)] = rstd;
    }

    if (!normalizes) continue;
    const auto normalize = [&](int v, float (&y)[8]) {
      float gamma[8], beta[8];
      parameters.get8(0, vector(v), gamma);
      parameters.get8(1, vector(v), beta);
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = normalized(raw[v][j], rstd, shift, gamma[j], beta[j]);
    };
    if constexpr (kWrites) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (vector(v) >= vectors) continue;
        float y[8];
        normalize(v, y);
        raw[v] = load(n + stride, v);
        store_result<kStored>(out, offset(n) + v * kGroup * 8, scale, y, 8, true, most[v % 2]);
      }
    } else {
      most[0] = max_abs(most[0], known);
      const float bound = fmaf((most_abs(raw) + fabsf(mean)) * rstd, gamma_most, beta_most) * kBoundError;
      if (!turn || !(bound <= most[0])) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          if (vector(v) >= vectors) continue;
          float y[8];
          normalize(v, y);
          most[0] = max_abs(most[0], y);
        }
      }
      if (turn || threadIdx.x < 32) out.amax.note(most[0], known);  // of all warps at once they would queue up
    }
  }
  amax.note(max_abs(most[0], most[1]));
  __syncthreads();
  amax.merge(out.amax);
}

// ---- Launching

template <typename T, int kWarps, int kVectors, bool kWrites, Stored kStored>
cudaError_t launch_rows_as(cudaStream_t stream, const Norm& a, const Result& out) {
  static_assert(kWarps * 32 <= kNormThreads);
  const auto kernel = norm_rows<T, kWarps, kVectors, kWrites, kStored>;
  Launch l{0, kNormThreads, kWrites || out.amax.value ? static_cast<int>(RowParameters::bytes(out.cols)) : 0};
  int resident = 0;
  if (const cudaError_t error = resident_clusters(l, kernel, &resident); error != cudaSuccess) return error;
  if (resident == 0) return cudaErrorLaunchOutOfResources;
  l.blocks = std::min<int64_t>(ceil_div(out.rows * kWarps * 32, kNormThreads), resident);
  return launch(l, stream, kernel, a, out);
}

// By the row's width, with kVectors of 8 values a thread up to 8 warps a row.
template <typename T, int kVectors, bool kWrites, Stored kStored>
auto rows_up_to_8_warps(int64_t cols) -> cudaError_t (*)(cudaStream_t, const Norm&, const Result&) {
  constexpr int64_t kOfWarp = kVectors * 256;
  if (cols <= kOfWarp) return launch_rows_as<T, 1, kVectors, kWrites, kStored>;
  if (cols <= 2 * kOfWarp) return launch_rows_as<T, 2, kVectors, kWrites, kStored>;
  if (cols <= 4 * kOfWarp) return launch_rows_as<T, 4, kVectors, kWrites, kStored>;
  return cols <= 8 * kOfWarp ? launch_rows_as<T, 8, kVectors, kWrites, kStored> : nullptr;
}

constexpr int64_t kWidestRow = 16384;  // columns

// The launch of whole rows as these, null where there is none. A thread has 16 registers of a row, so that two blocks
// share a multiprocessor and one loads while another computes; beyond 8192 values of 16 bits 64, as a row of 16 warps
// waits longer. y of 16 bits asks for so little computation that three blocks with 8 are faster; of 8192 columns strips
// are.
template <typename T>
auto rows_of(const Result& out) -> cudaError_t (*)(cudaStream_t, const Norm&, const Result&) {
  if (out.y_t || out.rows >= kMostRows || out.cols > kWidestRow ||
      RowParameters::bytes(out.cols) > current_device().shared_memory) {
    return nullptr;
  }
  constexpr int kVectors = 8 / sizeof(T), kWide = 4 * kVectors, kWideWarps = kWidestRow / (kWide * 256);
  const auto any_width = [&](auto writes, auto stored) {
    const auto narrow = rows_up_to_8_warps<T, kVectors, writes(), stored()>(out.cols);
    return narrow ? narrow : launch_rows_as<T, kWideWarps, kWide, writes(), stored()>;
  };
  using Float = std::integral_constant<Stored, Stored::kFloat>;
  if (!out.y) return any_width(std::false_type{}, Float{});
  if (out.dtype == DType::F8E4M3FN) return any_width(std::true_type{}, std::integral_constant<Stored, Stored::kE4M3>{});
  if constexpr (sizeof(T) == 2) {
    if (!is_fp8(out.dtype)) return rows_up_to_8_warps<T, 2, true, Stored::kFloat>(out.cols);
  }
  return nullptr;
}

}  // namespace te

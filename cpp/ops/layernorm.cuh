// What the norms' kernels share: sums of a row, values of y, y from statistics that are known, and those of any row.
#pragma once

#include "core/tile.cuh"
#include "ops/layernorm.h"

namespace te {

struct Norm {
  const void* x;
  Parameter gamma;
  Parameter beta;
  float* mean;  // absent for rmsnorm
  float* rstd;
  float epsilon;
  bool centered;  // layernorm
  bool known;     // mean and rstd are operands
};

// ---- The sum of a warp's 16-bit values of a row, and that of their squares, by the tensor cores: products are exact,
// ---- sums in f32, and nothing is unpacked. To mma.m16n8k16 two words of a lane are 4 of 16 values of A's row
// ---- lane / 4, and of B's column lane / 4. As both they give products of any two of 8 rows, of which the diagonal is
// ---- wanted; ones in the lower rows of A give the sums of B's columns.

template <typename T>
struct RowMoments {
  float d[4] = {};

  __device__ __forceinline__ void add(const Vec8<T>& x) {
#pragma unroll
    for (int w = 0; w < 4; w += 2) {
      // volatile: all at once, their operands would take too many registers.
      if constexpr (std::is_same_v<T, bf16>) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(x.words[w]), "r"(x.words[w + 1]), "r"(0x3f803f80u));
      } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%4, %5}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(x.words[w]), "r"(x.words[w + 1]), "r"(0x3c003c00u));
      }
    }
  }
  // To be summed over all lanes, and over 4 neighbours.
  __device__ __forceinline__ float squares() const {
    const int lane = threadIdx.x % 32;
    return lane % 4 != lane / 8 ? 0.f : lane & 4 ? d[1] : d[0];
  }
  __device__ __forceinline__ float sum() const { return d[2] + d[3]; }
};

// Makes of the sum of n squares that of squared differences from the mean. False where that loses more than two bits,
// or is not a number: then it has to be summed up.
__device__ __forceinline__ bool center(float& squares, float mean, float n) {
  const float of_mean = n * mean * mean;
  squares -= of_mean;
  return of_mean <= 2.f * squares;
}

// A value of y. factor: rstd, shift: -mean * rstd. Spelled out, so that all kernels find the same bits: the amax that
// is found first is that of the values that are stored then, and a transposed copy that is made later that of y.
__device__ __forceinline__ float normalized(float x, float factor, float shift, float gamma, float beta) {
  return fmaf(fmaf(x, factor, shift), gamma, beta);
}

// ---- y from known statistics: a Producer for the tile kernel.

template <typename T>
struct Normalized {
  static constexpr int kOutputs = 1, kAtOnce = 1;
  static constexpr int kBlocks = std::is_same_v<T, bf16> || std::is_same_v<T, f16> ? 4 : 2;
  static constexpr bool kSummed = false;
  static constexpr Formats kFormats = Formats::kE4M3;
  using Type = T;
  struct Columns {
    float gamma[8];
    float beta[8];
  };
  struct Raw {
    typename Operand<T>::Raw x;
    float factor;
    float shift;
  };
  Norm a;
  Operand<T> x;

  __device__ __forceinline__ Columns columns(int64_t col, int n, bool vector) const {
    Columns c;
    a.gamma.get8(col, n, vector, c.gamma);
    a.beta.get8(col, n, vector, c.beta);
    return c;
  }
  __device__ __forceinline__ Raw load(int64_t row, int64_t before, int64_t col, int n, bool vector) const {
    const float mean = a.mean ? a.mean[row] : 0.f, rstd = a.rstd[row];
    return {x.load(before + col, n, vector), rstd, -mean * rstd};
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns& c, float (&v)[1][8]) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[0][j] = normalized(raw.x[j], raw.factor, raw.shift, c.gamma[j], c.beta[j]);
  }
};

// ---- The statistics of any row.

constexpr int kRowThreads = 256;

// Over a block; `slots` is used once.
__device__ __forceinline__ float sum_of_block(float x, float* slots) {
  x = sum_of_lanes(x);
  if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_lanes<kRowThreads / 32>(slots[threadIdx.x % (kRowThreads / 32)]);
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads) row_statistics(const Norm a, const Result out) {
  __shared__ float slots[2][kRowThreads / 32];
  const T* x = static_cast<const T*>(a.x) + blockIdx.x * out.cols;
  float mean = 0.f;
  if (a.centered) {
    float sum = 0.f;
    for (int64_t c = threadIdx.x; c < out.cols; c += kRowThreads) sum += load1(x + c);
    mean = sum_of_block(sum, slots[0]) / static_cast<float>(out.cols);
  }
  float squares = 0.f;
  for (int64_t c = threadIdx.x; c < out.cols; c += kRowThreads) {
    const float d = load1(x + c) - mean;
    squares += d * d;
  }
  const float rstd = rsqrtf(sum_of_block(squares, slots[1]) / static_cast<float>(out.cols) + a.epsilon);
  if (threadIdx.x == 0) {
    if (a.mean) a.mean[blockIdx.x] = mean;
    a.rstd[blockIdx.x] = rstd;
  }
}

}  // namespace te

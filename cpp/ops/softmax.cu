// Softmax on CUDA. Bytes a score, with s for its dtype: 2 s forward (1 / H more for a mask of H heads, where the L2
// cache keeps it for them), 3 s backward; causal rows are read as far as they are visible, which halves what is read.
//
// Rows of up to 16384 scores lie in the registers of 8 to 512 threads (softmax_rows); longer ones are read twice, with
// maximum and sum kept up while reading (Milakov and Gimelshein, 2018).
#include "core/cuda.cuh"
#include "ops/softmax.h"

namespace te {
namespace {

struct Softmax {
  const void* x;        // backward: dy
  const void* weights;  // backward: y of the forward pass
  void* result;
  const uint8_t* mask;
  const float* offset;
  float* statistic;  // rest, backward: dot
  SoftmaxShape shape;
  SoftmaxAttributes attributes;
  bool vector;  // 8 scores of every buffer can be accessed as 16-byte words

  // Scores of a row that causality leaves.
  __device__ __forceinline__ int64_t visible(int64_t row) const {
    return attributes.causal ? min(shape.keys, row % shape.queries + 1) : shape.keys;
  }
  __device__ __forceinline__ const uint8_t* mask_row(int64_t row) const {
    const int64_t example = row / shape.queries / shape.heads;
    return mask + (example * shape.queries + row % shape.queries) * shape.keys;
  }
};

constexpr float kNone = -__builtin_huge_valf();

// ---- Reductions over a group of threads: part of a warp, or the whole block

struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// `slots` is used once.
template <int kGroup, typename Op>
__device__ __forceinline__ float reduce_group(float x, Op op, float* slots) {
#pragma unroll
  for (int d = min(kGroup, 32) / 2; d > 0; d /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, d));
  if constexpr (kGroup > 32) {
    constexpr int kWarps = kGroup / 32;
    if (threadIdx.x % 32 == 0) slots[threadIdx.x / 32] = x;
    __syncthreads();
    x = slots[threadIdx.x % kWarps];
#pragma unroll
    for (int d = kWarps / 2; d > 0; d /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, d));
  }
  return x;
}

// What a row's maximum and sum make of its offset. Rows of nothing but -infinity are 0: `top` is finite then.
struct Denominator {
  float top, extra;
  __device__ __forceinline__ Denominator(const Softmax& a, int64_t row, float top_of_row) {
    const float offset = a.offset ? __ldg(a.offset + row / a.shape.queries) : kNone;
    top = fmaxf(top_of_row, offset);
    top = top == kNone ? 0.f : top;
    extra = exponential_below(top, offset);
  }
  __device__ __forceinline__ float inverse(float sum) const { return sum + extra == 0.f ? 0.f : 1.f / (sum + extra); }
};

// ---- Rows in registers: a thread has kVectors times 8 scores, 8 * kGroup apart

constexpr int kVectors = 4;
template <int kGroup>
constexpr int kBlock = kGroup < 64 ? 128 : kGroup;
// Blocks of a multiprocessor, at least: of the largest two, so that one loads while the other awaits its sums. In f32 a
// row leaves registers for one.
template <typename T, int kGroup>
constexpr int kBlocks = kGroup == 512 && sizeof(T) == 2 ? 2 : 1;

template <int kGroup>
struct Place {
  int lane = threadIdx.x % kGroup;
  int64_t row = static_cast<int64_t>(blockIdx.x) * (kBlock<kGroup> / kGroup) + threadIdx.x / kGroup;
  __device__ __forceinline__ int64_t column(int k) const { return (k * kGroup + lane) * 8; }
};

// How many of the 8 scores from `column` on lie before `end`.
__device__ __forceinline__ int scores_left(int64_t column, int64_t end) {
  return static_cast<int>(max(int64_t{0}, min(end - column, int64_t{8})));
}

// The first n of 8 scores at p, then zeros.
template <typename T>
__device__ __forceinline__ Vec8<T> load_scores(const T* p, int n, bool vector) {
  if (n == 0) return {};
  return vector ? load8(p) : load8(p, n);
}

// A byte a score, not 0 for those that are hidden by the mask, or that come after the first n.
__device__ __forceinline__ uint64_t load_hidden(const uint8_t* p, int n, bool vector) {
  uint64_t flags = 0;
  if (p && n > 0 && vector) {
    flags = __ldg(reinterpret_cast<const unsigned long long*>(p));
  } else if (p) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j < n) flags |= static_cast<uint64_t>(__ldg(p + j)) << (8 * j);
    }
  }
  return n < 8 ? flags | ~uint64_t{0} << (8 * n) : flags;
}

template <typename T>
__device__ __forceinline__ void store_scores(const Softmax& a, int64_t row, int64_t column, const float (&v)[8]) {
  const int n = scores_left(column, a.shape.keys);
  T* p = static_cast<T*>(a.result) + row * a.shape.keys + column;
  if (n > 0) store8(p, round8<T>(v), n, a.vector);
}

// e^(v - top); for results of 16 bits in 3 instructions for 8, with a relative error of 2^-22 + (top - v) / 2^23, which
// within e^20 of the largest is less than a hundredth of what f16 may take by rounding.
template <typename T>
__device__ __forceinline__ float exponential_for(float top, float v) {
  if constexpr (sizeof(T) == 4) return exponential_below(top, v);
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((v - top) * 1.44269504f));
  return power;
}

template <typename T, int kGroup, bool kMasked>
__global__ void __launch_bounds__(kBlock<kGroup>, kBlocks<T, kGroup>) softmax_rows(const Softmax a) {
  __shared__ float slots[2][16];
  const Place<kGroup> at;
  const bool live = at.row < a.shape.rows();
  const int64_t end = live ? a.visible(at.row) : 0;
  const T* x = static_cast<const T*>(a.x) + at.row * a.shape.keys;
  const uint8_t* mask = kMasked && live ? a.mask_row(at.row) : nullptr;
  Vec8<T> raw[kVectors];
  uint64_t hidden[kMasked ? kVectors : 1];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int n = scores_left(at.column(k), end);
    raw[k] = load_scores(x + at.column(k), n, a.vector);
    if (kMasked) hidden[k] = load_hidden(mask ? mask + at.column(k) : nullptr, n, a.vector);
  }

  float v[kVectors][8], top = kNone;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int n = scores_left(at.column(k), end);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[k][j] = raw[k][j] * a.attributes.scale_factor;
    if (kMasked || n < 8) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (kMasked ? (hidden[k] >> (8 * j) & 0xff) != 0 : j >= n) v[k][j] = kNone;
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) top = fmaxf(top, v[k][j]);
  }
  const Denominator by(a, live ? at.row : 0, reduce_group<kGroup>(top, Max(), slots[0]));
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[k][j] = exponential_for<T>(by.top, v[k][j]);
      sum += v[k][j];
    }
  }
  const float inverse = by.inverse(reduce_group<kGroup>(sum, Sum(), slots[1]));
  if (!live) return;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[k][j] *= inverse;
    store_scores<T>(a, at.row, at.column(k), v[k]);
  }
  if (a.statistic && at.lane == 0) a.statistic[at.row] = by.extra * inverse;
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(kBlock<kGroup>, kBlocks<T, kGroup>) softmax_gradient_rows(const Softmax a) {
  __shared__ float slots[16];
  const Place<kGroup> at;
  const bool live = at.row < a.shape.rows();
  const int64_t end = live ? a.visible(at.row) : 0, row = at.row * a.shape.keys;
  Vec8<T> dy[kVectors], y[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int n = scores_left(at.column(k), end);
    dy[k] = load_scores(static_cast<const T*>(a.x) + row + at.column(k), n, a.vector);
    y[k] = load_scores(static_cast<const T*>(a.weights) + row + at.column(k), n, a.vector);
  }
  // The last vector may reach beyond what causality leaves, where dy may be anything.
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int n = scores_left(at.column(k), end);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += j < n ? dy[k][j] * y[k][j] : 0.f;
  }
  const float dot = reduce_group<kGroup>(sum, Sum(), slots);
  if (!live) return;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int n = scores_left(at.column(k), end);
    float dx[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      dx[j] = j < n ? a.attributes.scale_factor * y[k][j] * (dy[k][j] - dot) : 0.f;
    }
    store_scores<T>(a, at.row, at.column(k), dx);
  }
  if (a.statistic && at.lane == 0) a.statistic[at.row] = dot;
}

// ---- Long rows: a block a row, a score a thread at a time

constexpr int kLongBlock = 512;

template <typename T>
__global__ void __launch_bounds__(kLongBlock) softmax_long_rows(const Softmax a) {
  __shared__ float slots[2][16];
  const int64_t row = blockIdx.x, end = a.visible(row);
  const T* x = static_cast<const T*>(a.x) + row * a.shape.keys;
  T* y = static_cast<T*>(a.result) + row * a.shape.keys;
  const uint8_t* mask = a.mask ? a.mask_row(row) : nullptr;
  const auto score = [&](int64_t c) {
    return c >= end || (mask && __ldg(mask + c)) ? kNone : load1(x + c) * a.attributes.scale_factor;
  };
  float top = kNone, sum = 0.f;  // of this thread's scores; the sum is that of e^(score - top)
  for (int64_t c = threadIdx.x; c < end; c += kLongBlock) {
    const float v = score(c);
    if (v == kNone) continue;
    const float higher = fmaxf(top, v);
    sum = sum * exponential_below(higher, top) + exponential_below(higher, v);
    top = higher;
  }
  const Denominator by(a, row, reduce_group<kLongBlock>(top, Max(), slots[0]));
  const float inverse = by.inverse(reduce_group<kLongBlock>(sum * exponential_below(by.top, top), Sum(), slots[1]));
  for (int64_t c = threadIdx.x; c < a.shape.keys; c += kLongBlock) {
    store1(y + c, exponential_below(by.top, score(c)) * inverse);
  }
  if (a.statistic && threadIdx.x == 0) a.statistic[row] = by.extra * inverse;
}

template <typename T>
__global__ void __launch_bounds__(kLongBlock) softmax_gradient_long_rows(const Softmax a) {
  __shared__ float slots[16];
  const int64_t row = blockIdx.x, end = a.visible(row);
  const T* dy = static_cast<const T*>(a.x) + row * a.shape.keys;
  const T* y = static_cast<const T*>(a.weights) + row * a.shape.keys;
  T* dx = static_cast<T*>(a.result) + row * a.shape.keys;
  float sum = 0.f;
  for (int64_t c = threadIdx.x; c < end; c += kLongBlock) sum += load1(dy + c) * load1(y + c);
  const float dot = reduce_group<kLongBlock>(sum, Sum(), slots);
  for (int64_t c = threadIdx.x; c < a.shape.keys; c += kLongBlock) {
    store1(dx + c, c < end ? a.attributes.scale_factor * load1(y + c) * (load1(dy + c) - dot) : 0.f);
  }
  if (a.statistic && threadIdx.x == 0) a.statistic[row] = dot;
}

// ---- Launching

// Calls f(std::integral_constant<int, group>{}) with the smallest group whose registers hold a row, 0 for none.
template <typename F>
cudaError_t with_group(int64_t keys, F&& f) {
  if (keys <= 8 * 8 * kVectors) return f(std::integral_constant<int, 8>{});
  if (keys <= 16 * 8 * kVectors) return f(std::integral_constant<int, 16>{});
  if (keys <= 32 * 8 * kVectors) return f(std::integral_constant<int, 32>{});
  if (keys <= 64 * 8 * kVectors) return f(std::integral_constant<int, 64>{});
  if (keys <= 128 * 8 * kVectors) return f(std::integral_constant<int, 128>{});
  if (keys <= 256 * 8 * kVectors) return f(std::integral_constant<int, 256>{});
  if (keys <= 512 * 8 * kVectors) return f(std::integral_constant<int, 512>{});
  return f(std::integral_constant<int, 0>{});
}

ffi::Error run(cudaStream_t stream, DType dtype, Softmax a) {
  const int64_t rows = a.shape.rows(), keys = a.shape.keys;
  if (rows == 0) return ffi::Error::Success();
  a.vector = keys % 8 == 0 && aligned(a.x) && aligned(a.weights) && aligned(a.result) && aligned(a.mask);
  return with_float(dtype, [&](auto t) {
    using T = decltype(t);
    TE_CUDA_CHECK(with_group(keys, [&](auto group) {
      constexpr int kGroup = decltype(group)::value;
      if constexpr (kGroup == 0) {
        const auto kernel = a.weights ? softmax_gradient_long_rows<T> : softmax_long_rows<T>;
        return launch({rows, kLongBlock}, stream, kernel, a);
      } else {
        const auto kernel = a.weights ? softmax_gradient_rows<T, kGroup>
                            : a.mask  ? softmax_rows<T, kGroup, true>
                                      : softmax_rows<T, kGroup, false>;
        return launch({ceil_div(rows, kBlock<kGroup> / kGroup), kBlock<kGroup>}, stream, kernel, a);
      }
    }));
    return ffi::Error::Success();
  });
}

}  // namespace

ffi::Error SoftmaxFwd(cudaStream_t stream, In x, In mask, In offset, Out y, Out rest, SoftmaxAttributes attributes) {
  Check check("te_softmax_fwd");
  const SoftmaxShape shape = check_softmax_fwd(check, x, mask, offset, y, rest);
  if (check.failed()) return check.error();
  return run(stream, x.element_type(),
             {x.untyped_data(), nullptr, y->untyped_data(), data_or_null<uint8_t>(mask), data_or_null<float>(offset),
              data_or_null<float>(rest), shape, attributes, false});
}

ffi::Error SoftmaxBwd(cudaStream_t stream, In dy, In y, Out dx, Out dot, SoftmaxAttributes attributes) {
  Check check("te_softmax_bwd");
  const SoftmaxShape shape = check_softmax_bwd(check, dy, y, dx, dot);
  if (check.failed()) return check.error();
  return run(stream, y.element_type(),
             {dy.untyped_data(), y.untyped_data(), dx->untyped_data(), nullptr, nullptr, data_or_null<float>(dot),
              shape, attributes, false});
}

}  // namespace te

TE_HANDLER(softmax_fwd, SoftmaxFwd)
TE_HANDLER(softmax_bwd, SoftmaxBwd)

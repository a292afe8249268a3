// te_dropout on CUDA: s bytes each for x, the residual and y, with s for their dtype. A thread takes 8 values of a row
// and ends, which is how memory moves most. Their bits take 20 products of 32 bits to 64 and 20 xors: with the rest
// about 130 instructions, where there is time for 240.
#include "core/cuda.cuh"
#include "ops/dropout.h"

namespace te {
namespace {

constexpr int kThreads = 256;

template <typename T>
struct Drop {
  const T *x, *residual;
  T* y;
  const uint32_t* seed;
  const int32_t *row, *column;
  uint32_t threshold;
  float scale;
  uint32_t rows, cols, units;  // units: of 8 columns in a row
  bool vector;
};

// The bits of 8 columns from `column` on, which need not be a multiple of 8.
__device__ __forceinline__ Draw draw_from(uint32_t key0, uint32_t key1, uint32_t column, uint32_t row) {
  Draw draw = philox(key0, key1, column / kDrawn, row);
  if (const uint32_t past = column % kDrawn) {  // a shard begins amid 8
    const Draw next = philox(key0, key1, column / kDrawn + 1, row);
    uint32_t words[kDrawn];
#pragma unroll
    for (int i = 0; i < kDrawn; ++i) words[i] = i < kDrawn / 2 ? draw.words[i] : next.words[i - kDrawn / 2];
#pragma unroll 1
    for (uint32_t pairs = past / 2; pairs; --pairs) {
#pragma unroll
      for (int i = 0; i + 1 < kDrawn; ++i) words[i] = words[i + 1];
    }
#pragma unroll
    for (int i = 0; i < kDrawn / 2; ++i) draw.words[i] = __funnelshift_r(words[i], words[i + 1], past % 2 * 16);
  }
  return draw;
}

// From the last values to the first, see cuda.cuh.
template <typename T, bool kAdds>
__global__ void __launch_bounds__(kThreads) drop_units(const Drop<T> a) {
  const uint32_t thread = (gridDim.x - 1 - blockIdx.x) * kThreads + threadIdx.x;
  const uint32_t r = thread / a.units, col = (thread - r * a.units) * 8;
  if (r >= a.rows) return;
  const int64_t offset = int64_t{r} * a.cols + col;
  const int n = static_cast<int>(min(8u, a.cols - col));
  const auto load = [&](const T* p) { return a.vector ? load8(p + offset) : load8(p + offset, n); };
  const Vec8<T> x = load(a.x);
  Vec8<T> residual;
  if constexpr (kAdds) residual = load(a.residual);
  const Draw draw = draw_from(__ldg(a.seed), __ldg(a.seed + 1), static_cast<uint32_t>(__ldg(a.column)) + col,
                              static_cast<uint32_t>(__ldg(a.row + r)));
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    v[j] = draw[j] < a.threshold ? 0.f : __fmul_rn(x[j], a.scale);
    if constexpr (kAdds) v[j] = __fadd_rn(v[j], residual[j]);
  }
  store8(a.y + offset, round8<T>(v), n, a.vector);
}

}  // namespace

ffi::Error Dropout(cudaStream_t stream, In x, In residual, In seed, In row, In column, Out y, DropoutAttributes a) {
  const Check check = check_dropout(x, residual, seed, row, column, y, a);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, 1);
  const int64_t units = ceil_div(m.cols, 8);
  if (m.cols >= int64_t{1} << 32 || m.rows * units > ~0u - kThreads)
    return ffi::Error::InvalidArgument("te_dropout: expected rows * ceil(columns / 8) below 2^32");
  return with_float(m.dtype, [&](auto t) {
    using T = decltype(t);
    const T* const past = data_or_null<T>(residual);
    T* const result = static_cast<T*>(y->untyped_data());
    const bool vector = m.cols % 8 == 0 && aligned(m.data) && aligned(past) && aligned(result);
    const Drop<T> drop{m.as<T>(),
                       past,
                       result,
                       seed.typed_data<uint32_t>(),
                       row.typed_data<int32_t>(),
                       column.typed_data<int32_t>(),
                       static_cast<uint32_t>(a.threshold),
                       a.scale,
                       static_cast<uint32_t>(m.rows),
                       static_cast<uint32_t>(m.cols),
                       static_cast<uint32_t>(units),
                       vector};
    const Launch all{ceil_div(m.rows * units, kThreads), kThreads};
    TE_CUDA_CHECK(past ? launch(all, stream, drop_units<T, true>, drop)
                       : launch(all, stream, drop_units<T, false>, drop));
    return ffi::Error::Success();
  });
}

}  // namespace te

TE_HANDLER(dropout, Dropout)

// Quantization on CUDA. Bytes a value of x, s bytes wide:
//   te_quantize    s + 1 for each of q and q_t (a tile a block, tile.cuh); column sums add 1/16 and a second launch
//   te_measure     s
//   te_dequantize  s + 1
#include "core/tile.cuh"
#include "ops/quantize.h"

namespace te {
namespace {

// ---- te_quantize

template <typename T>
struct Cast {
  static constexpr int kOutputs = 1, kAtOnce = 2, kBlocks = sizeof(T) == 2 ? 4 : 2;
  static constexpr bool kSummed = true;
  static constexpr Formats kFormats = Formats::kBoth;
  using Type = T;
  using Raw = typename Operand<T>::Raw;
  struct Columns {};
  Operand<T> x;

  __device__ __forceinline__ Columns columns(int64_t, int, bool) const { return {}; }
  __device__ __forceinline__ Raw load(int64_t, int64_t before, int64_t col, int n, bool vector) const {
    return x.load(before + col, n, vector);
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns&, float (&v)[1][8]) const { unpack(raw, v[0]); }
};

// The same of matrices side by side, `part_cols` columns each; groups of 8 columns are of one part.
template <typename T>
struct StackedCast {
  static constexpr int kOutputs = 1, kAtOnce = 2, kBlocks = sizeof(T) == 2 ? 4 : 2;
  static constexpr bool kSummed = true;
  static constexpr Formats kFormats = Formats::kBoth;
  using Type = T;
  using Raw = typename Operand<T>::Raw;
  struct Columns {};
  const void* parts[3];
  DType dtype;
  int64_t part_cols;

  __device__ __forceinline__ Columns columns(int64_t, int, bool) const { return {}; }
  __device__ __forceinline__ Raw load(int64_t row, int64_t, int64_t col, int n, bool vector) const {
    const bool second = col >= part_cols, third = col >= 2 * part_cols;
    const Operand<T> x{third ? parts[2] : second ? parts[1] : parts[0], dtype};
    return x.load(row * part_cols + col - (second + third) * part_cols, n, vector);
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns&, float (&v)[1][8]) const { unpack(raw, v[0]); }
};

// ---- te_measure. Two large blocks a multiprocessor: all end at about the same time, and each one's atomic operations
// ---- on the maximum wait for the others'. A thread has 128 bytes on their way.

constexpr int kMeasureThreads = 512;
constexpr int kMeasureBlocks = 2;  // on a multiprocessor
template <typename T>
constexpr int kMeasureLoads = 8 / Vec8<T>::kQuads;  // of 8 values, neighbouring threads 8 apart
template <typename T>
constexpr int kMeasureChunk = kMeasureThreads * kMeasureLoads<T> * 8;

// Matrices of one size, measured together.
template <typename T>
struct Parts {
  const T* part[3];
  int64_t size;    // of each
  int64_t chunks;  // of each
};

template <typename T>
__global__ void __launch_bounds__(kMeasureThreads, kMeasureBlocks)
    amax_flat(const Parts<T> parts, int64_t chunks, bool vector, AmaxTarget amax) {
  const int64_t size = parts.size;
  float most = 0.f;
  for (int64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const int64_t number = chunk / parts.chunks;
    const T* const x = parts.part[number];
    const int64_t first = (chunk - number * parts.chunks) * kMeasureChunk<T> + threadIdx.x * 8;
    Vec8<T> raw[kMeasureLoads<T>];
#pragma unroll
    for (int k = 0; k < kMeasureLoads<T>; ++k) {
      const int64_t i = first + k * kMeasureThreads * 8;
      raw[k] = vector && i + 8 <= size ? load8<true>(x + i) : load8(x + i, static_cast<int>(min(size - i, int64_t{8})));
    }
#pragma unroll
    for (int k = 0; k < kMeasureLoads<T>; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) most = max_abs(most, raw[k][j]);
    }
  }
  __shared__ BlockAmax of_block;
  of_block.note(most);
  __syncthreads();
  of_block.merge(amax);
}

// ---- te_dequantize: a thread takes kFlatLoads times 8 values a turn, neighbours 16 bytes apart.

constexpr int kFlatThreads = 256;
constexpr int kFlatLoads = 4;
constexpr int kFlatChunk = kFlatThreads * kFlatLoads * 8;

template <typename T, __nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kFlatThreads)
    dequantize_flat(const uint8_t* q, const float* scale_inv, T* x, int64_t size, bool vector) {
  const float factor = __ldg(scale_inv);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kFlatChunk + threadIdx.x * 8;
  uint2 codes[kFlatLoads] = {};
#pragma unroll
  for (int k = 0; k < kFlatLoads; ++k) {
    const int64_t i = first + k * kFlatThreads * 8;
    if (vector && i + 8 <= size) {
      codes[k] = __ldg(reinterpret_cast<const uint2*>(q + i));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (i + j < size) (j < 4 ? codes[k].x : codes[k].y) |= static_cast<uint32_t>(q[i + j]) << (j % 4 * 8);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kFlatLoads; ++k) {
    const int64_t i = first + k * kFlatThreads * 8;
    if (i >= size) continue;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>((j < 4 ? codes[k].x : codes[k].y) >> (j % 4 * 8));
      const float2 decoded = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kFormat)));
      v[j] = decoded.x * factor;
      v[j + 1] = decoded.y * factor;
    }
    store8(x + i, round8<T>(v), static_cast<int>(min(size - i, int64_t{8})), vector && i + 8 <= size);
  }
}

}  // namespace

// Workspace: 4 * cols * ceil(rows / 128) bytes where colsum is asked for.
ffi::Error Quantize(cudaStream_t stream, In x, In scale, Out q, Out q_t, Out amax, Out colsum, Out report,
                    Out scale_inv, Out workspace, QuantizeAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  Check check = check_quantize(x, casting, q, q_t, colsum, attributes.k_axes);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, attributes.k_axes);
  if (present(colsum)) check_workspace(check, workspace, tile_partials(m.rows, m.cols));
  if (check.failed()) return check.error();
  Result out = fp8_or_float_result(q, casting, q_t, m.rows, m.cols, format_of(q, q_t));
  out.vector = m.cols % 8 == 0 && aligned(out.y) && aligned(m.data);
  const auto run = [&](auto t) {
    return launch_tiles(stream, Cast<decltype(t)>{{m.data, m.dtype}}, out, data_or_null<float>(colsum),
                        workspace->untyped_data());
  };
  return out.vector ? with_float(m.dtype, run) : run(AnyDtype{});
}

// Workspace: as te_quantize's of the stack.
ffi::Error QuantizeStack(cudaStream_t stream, In x0, In x1, In x2, In scale, Out q, Out q_t, Out amax, Out colsum,
                         Out report, Out scale_inv, Out workspace, Scaling scaling) {
  const Casting casting{scale, amax, report, scale_inv, scaling};
  Check check = check_quantize_stack(x0, x1, x2, casting, q, q_t, colsum);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x0, 1);
  const int64_t cols = parts_of(x2) * m.cols;
  if (present(colsum)) check_workspace(check, workspace, tile_partials(m.rows, cols));
  if (check.failed()) return check.error();
  const void* const parts[3] = {m.data, x1.untyped_data(), x2.untyped_data()};
  Result out = fp8_or_float_result(q, casting, q_t, m.rows, cols, format_of(q, q_t));
  out.vector = aligned(out.y) && aligned(parts[0]) && aligned(parts[1]) && (absent(x2) || aligned(parts[2]));
  const auto run = [&](auto t) {
    return launch_tiles(stream, StackedCast<decltype(t)>{{parts[0], parts[1], parts[2]}, m.dtype, m.cols}, out,
                        data_or_null<float>(colsum), workspace->untyped_data());
  };
  return out.vector ? with_float(m.dtype, run) : run(AnyDtype{});
}

ffi::Error Measure(cudaStream_t stream, In x0, In x1, In x2, Out amax, Out report) {
  const Check check = check_measure(x0, x1, x2, amax, report);
  if (check.failed()) return check.error();
  AmaxTarget target(amax, report);
  if (!target.value) return ffi::Error::Success();
  return with_float(x0.element_type(), [&](auto t) {
    using T = decltype(t);
    Parts<T> parts = {{}, static_cast<int64_t>(x0.element_count()), 0};
    parts.chunks = ceil_div(parts.size, kMeasureChunk<T>);
    int count = 0;
    bool vector = true;
    for (const In& x : {x0, x1, x2}) {
      if (absent(x)) continue;
      vector = vector && aligned(x.untyped_data());
      parts.part[count++] = static_cast<const T*>(x.untyped_data());
    }
    const int64_t chunks = count * parts.chunks,
                  blocks = std::min<int64_t>(chunks, kMeasureBlocks * current_device().multiprocessors);
    TE_CUDA_CHECK(prepare_amax(stream, blocks, &target));
    TE_CUDA_CHECK(launch({blocks, kMeasureThreads}, stream, amax_flat<T>, parts, chunks, vector, target));
    TE_CUDA_CHECK(finish_amax(stream, target));
    return ffi::Error::Success();
  });
}

ffi::Error Dequantize(cudaStream_t stream, In q, In scale_inv, Out x) {
  const Check check = check_dequantize(q, scale_inv, x);
  if (check.failed()) return check.error();
  const Matrix m = matrix(q, 0);
  void* target = x->untyped_data();
  const bool vector = aligned(m.data) && aligned(target);
  return with_float(x->element_type(), [&](auto t) {
    using T = decltype(t);
    const auto kernel = m.dtype == DType::F8E5M2 ? dequantize_flat<T, __NV_E5M2> : dequantize_flat<T, __NV_E4M3>;
    TE_CUDA_CHECK(launch({ceil_div(m.rows, kFlatChunk), kFlatThreads}, stream, kernel, m.as<uint8_t>(),
                         scale_inv.typed_data<float>(), static_cast<T*>(target), m.rows, vector));
    return ffi::Error::Success();
  });
}

}  // namespace te

TE_HANDLER(quantize, Quantize)
TE_HANDLER(quantize_stack, QuantizeStack)
TE_HANDLER(measure, Measure)
TE_HANDLER(dequantize, Dequantize)

// Quantization on CUDA. Bytes a value of x, s bytes wide:
//   te_quantize    s + 1 for each of q and q_t (a tile a block, tile.cuh); column sums add 1/16 and a second launch
//   te_amax        s
//   te_dequantize  s + 1
#include "core/tile.cuh"
#include "ops/quantize.h"

namespace te {
namespace {

// ---- te_quantize

template <typename T>
struct Cast {
  static constexpr int kOutputs = 1, kAhead = 2, kBlocks = sizeof(T) == 2 ? 4 : 2;
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
  static constexpr int kOutputs = 1, kAhead = 2, kBlocks = sizeof(T) == 2 ? 4 : 2;
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

// ---- Flat kernels: a thread takes kFlatLoads times 8 values a turn, neighbours 16 bytes apart.

constexpr int kFlatThreads = 256;
constexpr int kFlatLoads = 4;
constexpr int kFlatChunk = kFlatThreads * kFlatLoads * 8;

template <typename T>
__global__ void __launch_bounds__(kFlatThreads) amax_flat(const T* x, int64_t size, bool vector, AmaxTarget amax) {
  float most = 0.f;
  for (int64_t chunk = static_cast<int64_t>(blockIdx.x) * kFlatChunk; chunk < size;
       chunk += static_cast<int64_t>(gridDim.x) * kFlatChunk) {
    const int64_t first = chunk + threadIdx.x * 8;
    Vec8<T> raw[kFlatLoads];
#pragma unroll
    for (int k = 0; k < kFlatLoads; ++k) {
      const int64_t i = first + k * kFlatThreads * 8;
      raw[k] = vector && i + 8 <= size ? load8(x + i) : load8(x + i, static_cast<int>(min(size - i, int64_t{8})));
    }
#pragma unroll
    for (int k = 0; k < kFlatLoads; ++k) {
#pragma unroll
      for (int j = 0; j < 8; ++j) most = max_abs(most, raw[k][j]);
    }
  }
  __shared__ BlockAmax of_block;
  of_block.note(most);
  __syncthreads();
  of_block.merge(amax);
}

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
      codes[k] = __ldcs(reinterpret_cast<const uint2*>(q + i));
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
ffi::Error Quantize(cudaStream_t stream, In x, In scale, Out q, Out q_t, Out amax, Out colsum, Out workspace,
                    QuantizeAttributes attributes) {
  Check check = check_quantize(x, scale, q, q_t, amax, colsum, attributes.k_axes);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, attributes.k_axes);
  if (present(colsum)) check_workspace(check, workspace, tile_partials(m.rows, m.cols));
  if (check.failed()) return check.error();
  Result out = fp8_or_float_result(q, scale, q_t, amax, m.rows, m.cols);
  out.dtype = format_of(q, q_t);
  out.vector = m.cols % 8 == 0 && aligned(out.y) && aligned(m.data);
  const auto run = [&](auto t) {
    return launch_tiles(stream, Cast<decltype(t)>{{m.data, m.dtype}}, out, data_or_null<float>(colsum),
                        workspace->untyped_data());
  };
  return out.vector ? with_float(m.dtype, run) : run(AnyDtype{});
}

// Workspace: as te_quantize's of the stack.
ffi::Error QuantizeStack(cudaStream_t stream, In x0, In x1, In x2, In scale, Out q, Out q_t, Out amax, Out colsum,
                         Out workspace) {
  Check check = check_quantize_stack(x0, x1, x2, scale, q, q_t, amax, colsum);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x0, 1);
  const int64_t cols = parts_of(x2) * m.cols;
  if (present(colsum)) check_workspace(check, workspace, tile_partials(m.rows, cols));
  if (check.failed()) return check.error();
  const void* const parts[3] = {m.data, x1.untyped_data(), x2.untyped_data()};
  Result out = fp8_or_float_result(q, scale, q_t, amax, m.rows, cols);
  out.dtype = format_of(q, q_t);
  out.vector = aligned(out.y) && aligned(parts[0]) && aligned(parts[1]) && (absent(x2) || aligned(parts[2]));
  const auto run = [&](auto t) {
    return launch_tiles(stream, StackedCast<decltype(t)>{{parts[0], parts[1], parts[2]}, m.dtype, m.cols}, out,
                        data_or_null<float>(colsum), workspace->untyped_data());
  };
  return out.vector ? with_float(m.dtype, run) : run(AnyDtype{});
}

ffi::Error Amax(cudaStream_t stream, In x, Out amax) {
  Check check("te_amax");
  check.high_precision("x", x).scalar("amax", *amax);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, 0);
  const int64_t blocks = std::min<int64_t>(ceil_div(m.rows, kFlatChunk), 8 * current_device().multiprocessors);
  AmaxTarget target{amax->typed_data<float>()};
  TE_CUDA_CHECK(prepare_amax(stream, blocks, &target));
  return with_float(m.dtype, [&](auto t) {
    using T = decltype(t);
    TE_CUDA_CHECK(launch({blocks, kFlatThreads}, stream, amax_flat<T>, m.as<T>(), m.rows, aligned(m.data), target));
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
TE_HANDLER(amax, Amax)
TE_HANDLER(dequantize, Dequantize)

// Activations on CUDA: curve values, or their gradients, produced into the tile kernel of tile.cuh in one pass. Bytes
// an element of y, with s for z (and dy), o for the result (1 for FP8), t = 1 where a transposed copy is asked for:
//   forward   s A + o + t          backward   s (A + 1) + (o + t) A; dbias adds A/16 and a second launch
#include "core/tile.cuh"
#include "ops/activation.h"

namespace te {
namespace {

// A curve known at compile time, and one that every block branches to, 8 values at a time: 2 instructions a value more.
template <typename C>
struct Fixed {
  static constexpr bool kBounded = C::kBounded;
  C curve;

  template <typename F>
  __device__ __forceinline__ void with(F&& f) const {
    f(curve);
  }
};
struct AnyCurve {
  static constexpr bool kBounded = false;
  Curve curve;

  template <typename F>
  __device__ __forceinline__ void with(F&& f) const {
    switch (curve) {
      case Curve::kGelu: return f(Gelu{});
      case Curve::kSilu: return f(Silu{});
      case Curve::kRelu: return f(Relu{});
      case Curve::kQuickGelu: return f(QuickGelu{});
      case Curve::kSquaredRelu: return f(SquaredRelu{});
      default: return f(Sigmoid{});
    }
  }
};

// The bias of a thread's 8 columns, once for all its rows; an empty type where there is none.
template <int kInputs, bool kBias>
struct BiasColumns {
  Vec8<float> bias[kInputs];

  __device__ __forceinline__ void load(const Operand<AnyDtype>& from, int64_t cols, int64_t col, int n, bool vector) {
#pragma unroll
    for (int a = 0; a < kInputs; ++a) bias[a] = from.load(a * cols + col, n, vector);
  }
  __device__ __forceinline__ float add(float z, int a, int j) const { return z + bias[a][j]; }
};
template <int kInputs>
struct BiasColumns<kInputs, false> {
  __device__ __forceinline__ void load(const Operand<AnyDtype>&, int64_t, int64_t, int, bool) {}
  __device__ __forceinline__ float add(float z, int, int) const { return z; }
};

template <typename T, bool kGated, bool kBias, typename C>
struct Forward {
  static constexpr int kOperands = kGated ? 2 : 1, kOutputs = 1;
  static constexpr int kAhead = 1, kBlocks = sizeof(T) != 2 ? 2 : kGated ? 3 : 4;
  static constexpr bool kBounded = !std::is_same_v<T, AnyDtype> && C::kBounded;
  using Type = T;
  using Columns = BiasColumns<kGated ? 2 : 1, kBias>;
  struct Raw {
    typename Operand<T>::Raw z;
    typename Operand<T>::Raw gate;  // unused where the activation has none
  };
  Operand<T> z;
  Operand<AnyDtype> bias;
  int64_t cols;
  C curve;

  __device__ __forceinline__ Columns columns(int64_t col, int n, bool vector) const {
    Columns c;
    c.load(bias, cols, col, n, vector);
    return c;
  }
  __device__ __forceinline__ Raw load(int64_t, int64_t before, int64_t col, int n, bool vector) const {
    const int64_t offset = (kGated ? 2 : 1) * before + col;
    Raw raw;
    raw.z = z.load(offset, n, vector);
    if constexpr (kGated) raw.gate = z.load(offset + cols, n, vector);
    return raw;
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns& columns, float (&v)[1][8]) const {
    curve.with([&](auto c) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[0][j] = c.at(columns.add(raw.z[j], 0, j)).value;
        if constexpr (kGated) v[0][j] *= c.gate(columns.add(raw.gate[j], 1, j)).value;
      }
    });
  }
};

template <typename T, bool kGated, bool kBias, typename C>
struct Backward {
  static constexpr int kOperands = kGated ? 3 : 2, kOutputs = kGated ? 2 : 1, kAhead = 1;
  static constexpr int kBlocks = (kGated ? 1 : 2) + (sizeof(T) == 2);
  static constexpr bool kBounded = !std::is_same_v<T, AnyDtype> && C::kBounded;
  using Type = T;
  using Columns = BiasColumns<kOutputs, kBias>;
  struct Raw {
    typename Operand<T>::Raw dy;
    typename Operand<T>::Raw z;
    typename Operand<T>::Raw gate;
  };
  Operand<T> dy;
  Operand<T> z;
  Operand<AnyDtype> bias;
  int64_t cols;
  C curve;

  __device__ __forceinline__ Columns columns(int64_t col, int n, bool vector) const {
    Columns c;
    c.load(bias, cols, col, n, vector);
    return c;
  }
  __device__ __forceinline__ Raw load(int64_t, int64_t before, int64_t col, int n, bool vector) const {
    const int64_t offset = kOutputs * before + col;
    Raw raw;
    raw.dy = dy.load(before + col, n, vector);
    raw.z = z.load(offset, n, vector);
    if constexpr (kGated) raw.gate = z.load(offset + cols, n, vector);
    return raw;
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns& columns, float (&v)[kOutputs][8]) const {
    curve.with([&](auto c) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Point p = c.at(columns.add(raw.z[j], 0, j));
        const Point g = kGated ? c.gate(columns.add(raw.gate[j], 1, j)) : Point{1.f, 0.f};
        v[0][j] = raw.dy[j] * g.value * p.slope;
        if constexpr (kGated) v[1][j] = raw.dy[j] * p.value * g.slope;
      }
    });
  }
};

// ---- The maximum alone, as a recipe without history needs it before the cast

// |v| of 8 columns, at most.
template <typename T, bool kGated, bool kBias, typename C>
__device__ __forceinline__ float bound(const Forward<T, kGated, kBias, Fixed<C>>&,
                                       const typename Forward<T, kGated, kBias, Fixed<C>>::Raw& raw,
                                       const BiasColumns<kGated ? 2 : 1, kBias>& columns) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float gate = kGated ? columns.add(raw.gate[j], kGated, j) : 1.f;
    most = max_abs(most, C::most(columns.add(raw.z[j], 0, j)).value * gate);
  }
  return most;
}
template <typename T, bool kGated, bool kBias, typename C>
__device__ __forceinline__ float bound(const Backward<T, kGated, kBias, Fixed<C>>&,
                                       const typename Backward<T, kGated, kBias, Fixed<C>>::Raw& raw,
                                       const BiasColumns<kGated ? 2 : 1, kBias>& columns) {
  float most = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float z = columns.add(raw.z[j], 0, j);
    const Point p = C::most(z);
    if constexpr (kGated) {
      most = max_abs(max_abs(most, raw.dy[j] * columns.add(raw.gate[j], 1, j) * p.slope), raw.dy[j] * p.value);
    } else {
      most = max_abs(most, raw.dy[j] * p.slope + 0.f * z);  // NaN where z is
    }
  }
  return most;
}

// Blocks stay and take tiles in turn. Values are computed only where they may exceed the most that is known so far, of
// all blocks: after the first tiles, next to nowhere, and a bound is cheap.
constexpr int kAmaxBlocks = 4;  // on a multiprocessor

template <typename Producer>
__global__ void __launch_bounds__(kTileThreads, kAmaxBlocks)
    amax_tiles(const Producer in, const Result out, int64_t tiles) {
  constexpr int kRows = 8 / Producer::kOperands;  // of a thread at a time
  __shared__ BlockAmax amax;
  float most = 0.f;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TilePlace place(out, static_cast<unsigned>(tile));
    const int64_t col = place.col * kTileSide + threadIdx.x % 16 * 8;
    const float known = out.amax.so_far();
    typename Producer::Columns columns = {};
    if (col < out.cols) columns = in.columns(col, 8, true);
#pragma unroll 1
    for (int first = threadIdx.x / 16 * kRows; first < kTileSide; first += kTileThreads / 16 * kRows) {
      const int64_t row = place.row * kTileSide + first;
      const int64_t rows_here = col < out.cols ? out.rows - row : 0;
      typename Producer::Raw raw[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i < rows_here) raw[i] = in.load(row + i, (row + i) * out.cols, col, 8, true);
      }
      most = max_abs(most, known);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (i >= rows_here || bound(in, raw[i], columns) <= most) continue;
        float v[Producer::kOutputs][8];
        in.values(raw[i], columns, v);
#pragma unroll
        for (int o = 0; o < Producer::kOutputs; ++o) most = max_abs(most, v[o]);
      }
    }
    out.amax.note(most, known);
  }
  amax.note(most);
  __syncthreads();
  amax.merge(out.amax);
}

template <typename Producer>
ffi::Error launch_amax(cudaStream_t stream, const Producer& in, Result out) {
  const int64_t tiles = out.row_tiles() * ceil_div(out.cols, kTileSide);
  const int64_t blocks = std::min<int64_t>(tiles, kAmaxBlocks * current_device().multiprocessors);
  TE_CUDA_CHECK(prepare(stream, blocks, &out));
  if (out.amax.value) TE_CUDA_CHECK(launch({blocks, kTileThreads}, stream, amax_tiles<Producer>, in, out, tiles));
  TE_CUDA_CHECK(finish_amax(stream, out.amax));
  return ffi::Error::Success();
}

// What a handler does with its producer.
template <typename Producer>
ffi::Error run(cudaStream_t stream, const Producer& in, const Result& out, float* colsum, void* workspace) {
  if constexpr (Producer::kBounded) {
    if (!out.y && !out.y_t && !colsum) return launch_amax(stream, in, out);
  }
  return launch_tiles(stream, in, out, colsum, workspace);
}

// Calls f(T{}, std::bool_constant<gated>{}, curve), with AnyDtype where operands differ in dtype or are not whole
// vectors. The two curves of most models have kernels of their own in bf16, and so has the one with parameters.
template <typename F>
ffi::Error with_variant(DType dtype, bool vector, const Activation& activation, const ActivationAttributes& attributes,
                        F&& f) {
  if (activation.curve == Curve::kClampedSilu) {
    const Fixed<ClampedSilu> clamped{clamped_silu(attributes)};
    if (vector && dtype == DType::BF16) return f(bf16{}, std::true_type{}, clamped);
    return f(AnyDtype{}, std::true_type{}, clamped);
  }
  const auto run = [&](auto t, auto curve) {
    return activation.gated ? f(t, std::true_type{}, curve) : f(t, std::false_type{}, curve);
  };
  const AnyCurve any{activation.curve};
  if (!vector) return run(AnyDtype{}, any);
  if (dtype == DType::BF16 && activation.curve == Curve::kGelu) return run(bf16{}, Fixed<Gelu>{});
  if (dtype == DType::BF16 && activation.curve == Curve::kSilu) return run(bf16{}, Fixed<Silu>{});
  return with_float(dtype, [&](auto t) { return run(t, any); });
}

// Calls f(std::bool_constant<there is a bias>{}).
template <typename F>
ffi::Error with_bias(const In& bias, F&& f) {
  return present(bias) ? f(std::true_type{}) : f(std::false_type{});
}
Operand<AnyDtype> operand(const In& bias) { return {data_or_null<void>(bias), bias.element_type()}; }

}  // namespace

ffi::Error ActivationFwd(cudaStream_t stream, In z, In scale, In bias, Out y, Out y_t, Out amax, Out report,
                         Out scale_inv, ActivationAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const Check check = check_activation_fwd(z, casting, bias, y, y_t, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m = matrix(z, 2);
  const int64_t cols = matrix(z, 1).cols;
  Result out = fp8_or_float_result(y, casting, y_t, m.rows, cols);
  const Operand<AnyDtype> added = operand(bias);
  out.vector = out.vector && aligned(z.untyped_data()) && aligned(added.data);
  return with_variant(z.element_type(), out.vector, activation, attributes, [&](auto t, auto gated, auto curve) {
    return with_bias(bias, [&](auto biased) {
      const Forward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
          {z.untyped_data(), z.element_type()}, added, cols, curve};
      return run(stream, in, out, nullptr, nullptr);
    });
  });
}

// Workspace: 4 * A * N * ceil(rows / 128) bytes where dbias is asked for.
ffi::Error ActivationBwd(cudaStream_t stream, In dy, In z, In scale, In bias, Out dz, Out dz_t, Out amax, Out dbias,
                         Out report, Out scale_inv, Out workspace, ActivationAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  Check check = check_activation_bwd(dy, z, casting, bias, dz, dz_t, dbias, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m{dy.untyped_data(), dy.element_type(), matrix(z, 2).rows, matrix(z, 1).cols};
  if (present(dbias)) check_workspace(check, workspace, tile_partials(m.rows, m.cols * activation.inputs()));
  if (check.failed()) return check.error();
  Result out = fp8_or_float_result(dz, casting, dz_t, m.rows, m.cols);
  const Operand<AnyDtype> added = operand(bias);
  out.vector = out.vector && aligned(z.untyped_data()) && aligned(m.data) && aligned(added.data);
  const bool fast = out.vector && m.dtype == z.element_type();
  return with_variant(z.element_type(), fast, activation, attributes, [&](auto t, auto gated, auto curve) {
    return with_bias(bias, [&](auto biased) {
      const Backward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
          {m.data, m.dtype}, {z.untyped_data(), z.element_type()}, added, m.cols, curve};
      return run(stream, in, out, data_or_null<float>(dbias), workspace->untyped_data());
    });
  });
}

}  // namespace te

TE_HANDLER(activation_fwd, ActivationFwd)
TE_HANDLER(activation_bwd, ActivationBwd)

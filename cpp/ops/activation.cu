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
  C curve;

  template <typename F>
  __device__ __forceinline__ void with(F&& f) const {
    f(curve);
  }
};
struct AnyCurve {
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
  static constexpr int kOutputs = 1, kAhead = 1, kBlocks = sizeof(T) != 2 ? 2 : kGated ? 3 : 4;
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
  static constexpr int kOutputs = kGated ? 2 : 1, kAhead = 1;
  static constexpr int kBlocks = (kGated ? 1 : 2) + (sizeof(T) == 2);
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

ffi::Error ActivationFwd(cudaStream_t stream, In z, In scale, In bias, Out y, Out y_t, Out amax,
                         ActivationAttributes attributes) {
  const Check check = check_activation_fwd(z, scale, bias, y, y_t, amax, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m = matrix(z, 2);
  const int64_t cols = matrix(z, 1).cols;
  Result out = fp8_or_float_result(y, scale, y_t, amax, m.rows, cols);
  const Operand<AnyDtype> added = operand(bias);
  out.vector = out.vector && aligned(z.untyped_data()) && aligned(added.data);
  return with_variant(z.element_type(), out.vector, activation, attributes, [&](auto t, auto gated, auto curve) {
    return with_bias(bias, [&](auto biased) {
      const Forward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
          {z.untyped_data(), z.element_type()}, added, cols, curve};
      return launch_tiles<!decltype(biased)::value>(stream, in, out);
    });
  });
}

// Workspace: 4 * A * N * ceil(rows / 128) bytes where dbias is asked for.
ffi::Error ActivationBwd(cudaStream_t stream, In dy, In z, In scale, In bias, Out dz, Out dz_t, Out amax, Out dbias,
                         Out workspace, ActivationAttributes attributes) {
  Check check = check_activation_bwd(dy, z, scale, bias, dz, dz_t, amax, dbias, attributes);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m{dy.untyped_data(), dy.element_type(), matrix(z, 2).rows, matrix(z, 1).cols};
  if (present(dbias)) check_workspace(check, workspace, tile_partials(m.rows, m.cols * activation.inputs()));
  if (check.failed()) return check.error();
  Result out = fp8_or_float_result(dz, scale, dz_t, amax, m.rows, m.cols);
  const Operand<AnyDtype> added = operand(bias);
  out.vector = out.vector && aligned(z.untyped_data()) && aligned(m.data) && aligned(added.data);
  const bool fast = out.vector && m.dtype == z.element_type();
  return with_variant(z.element_type(), fast, activation, attributes, [&](auto t, auto gated, auto curve) {
    return with_bias(bias, [&](auto biased) {
      const Backward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
          {m.data, m.dtype}, {z.untyped_data(), z.element_type()}, added, m.cols, curve};
      return launch_tiles<!decltype(biased)::value>(stream, in, out, data_or_null<float>(dbias),
                                                    workspace->untyped_data());
    });
  });
}

}  // namespace te

TE_HANDLER(activation_fwd, ActivationFwd)
TE_HANDLER(activation_bwd, ActivationBwd)

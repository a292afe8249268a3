// te_activation_bwd on CUDA.
#include "ops/activation.cuh"

namespace te {
namespace {

template <typename T, bool kGated, bool kBias, typename C>
struct Backward {
  static constexpr int operands() { return kGated ? 3 : 2; }
  static constexpr int kOutputs = kGated ? 2 : 1, kAtOnce = 1;
  static constexpr int kBlocks = (kGated ? 1 : 2) + (sizeof(T) == 2);
  static constexpr bool kSummed = true;
  static constexpr Formats kFormats = std::is_same_v<C, AnyCurve> ? Formats::kEither : Formats::kBoth;
  static constexpr bool kBounded = std::is_same_v<T, bf16> && C::kBounded;
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
    return Columns::of(bias, cols, col, n, vector);
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

  // |v| of all outputs, at most.
  template <int kRows>
  __device__ __forceinline__ float bound(const Raw (&raw)[kRows], const Columns& columns) const {
    Vec8<T> dy = {}, z = raw[0].z, gate = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      raise_abs(dy, raw[i].dy);
      raise(z, raw[i].z);
      if constexpr (kGated) raise_abs(gate, raw[i].gate);
    }
    float most = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float biased = columns.add(z[j], 0, j);
      const Point p = curve.most(biased);
      if constexpr (kGated) {
        most = max_abs(max_abs(most, dy[j] * columns.most(gate[j], 1, j) * p.slope), dy[j] * p.value);
      } else {
        most = max_abs(most, dy[j] * p.slope + 0.f * biased);  // NaN where z or its bias is
      }
    }
    return most;
  }
};

}  // namespace

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
  const auto launch = [&](auto t, auto gated, auto biased, auto curve) {
    const Backward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
        {m.data, m.dtype}, {z.untyped_data(), z.element_type()}, added, m.cols, curve};
    return run(stream, in, out, data_or_null<float>(dbias), workspace->untyped_data());
  };
  return with_variant(z.element_type(), fast, activation, attributes, bias, launch);
}

}  // namespace te

TE_HANDLER(activation_bwd, ActivationBwd)

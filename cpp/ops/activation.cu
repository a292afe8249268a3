// te_activation_fwd on CUDA.
#include "ops/activation.cuh"

namespace te {
namespace {

template <typename T, bool kGated, bool kBias, typename C>
struct Forward {
  static constexpr int operands() { return kGated ? 2 : 1; }
  static constexpr int kOutputs = 1;
  static constexpr int kAtOnce = 1, kBlocks = sizeof(T) != 2 ? 2 : kGated ? 3 : 4;
  static constexpr bool kSummed = false;
  static constexpr Formats kFormats = std::is_same_v<C, AnyCurve> ? Formats::kEither : Formats::kE4M3;
  static constexpr bool kBounded = std::is_same_v<T, bf16> && C::kBounded;
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
    return Columns::of(bias, cols, col, n, vector);
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

  // |v|, at most.
  template <int kRows>
  __device__ __forceinline__ float bound(const Raw (&raw)[kRows], const Columns& columns) const {
    Vec8<T> z = raw[0].z, gate = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      raise(z, raw[i].z);
      if constexpr (kGated) raise_abs(gate, raw[i].gate);
    }
    float most = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float value = curve.most(columns.add(z[j], 0, j)).value;
      most = max_abs(most, kGated ? value * columns.most(gate[j], kGated, j) : value);
    }
    return most;
  }
};

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
  const auto launch = [&](auto t, auto gated, auto biased, auto curve) {
    const Forward<decltype(t), decltype(gated)::value, decltype(biased)::value, decltype(curve)> in{
        {z.untyped_data(), z.element_type()}, added, cols, curve};
    return run(stream, in, out, nullptr, nullptr);
  };
  const bool fast = out.vector && out.dtype != DType::F8E5M2;
  return with_variant(z.element_type(), fast, activation, attributes, bias, launch);
}

}  // namespace te

TE_HANDLER(activation_fwd, ActivationFwd)

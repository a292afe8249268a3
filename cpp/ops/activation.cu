// Activations on CUDA: curve values, or their gradients, produced into the tile kernel of tile.cuh in one pass. Bytes
// an element of y, with s for z (and dy), o for the result (1 for FP8), t = 1 where a transposed copy is asked for:
//   forward   s A + o + t          backward   s (A + 1) + (o + t) A; dbias adds A/16 and a second launch
#include "core/tile.cuh"
#include "ops/activation.h"

namespace te {
namespace {

// Which curve is a branch that a block takes as one; only the curves' code, not the tile's, is there six times.
template <typename F>
__device__ __forceinline__ void with_device_curve(Curve curve, F&& f) {
  switch (curve) {
    case Curve::kGelu: return f(Gelu{});
    case Curve::kSilu: return f(Silu{});
    case Curve::kRelu: return f(Relu{});
    case Curve::kQuickGelu: return f(QuickGelu{});
    case Curve::kSquaredRelu: return f(SquaredRelu{});
    default: return f(Sigmoid{});
  }
}

template <typename T, bool kGated>
struct Forward {
  static constexpr int kOutputs = 1, kBlocks = kGated && sizeof(T) == 4 ? 2 : 3;
  struct Columns {};
  struct Raw {
    Vec8<T> z;
    Vec8<T> gate;  // unused where the activation has none
  };
  const T* z;
  int64_t cols;
  Curve curve;

  __device__ __forceinline__ Columns columns(int64_t, int, bool) const { return {}; }
  __device__ __forceinline__ Raw load(int64_t row, int64_t col, int n, bool vector) const {
    const T* p = z + row * (kGated ? 2 : 1) * cols + col;
    Raw raw;
    raw.z = vector ? load8(p) : load8(p, n);
    if constexpr (kGated) raw.gate = vector ? load8(p + cols) : load8(p + cols, n);
    return raw;
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns&, float (&v)[1][8]) const {
    with_device_curve(curve, [&](auto c) {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[0][j] = c.at(raw.z[j]).value * (kGated ? raw.gate[j] : 1.f);
    });
  }
};

// dy of another dtype than z's is converted as it is loaded.
struct AnyDtype {};

template <typename T, typename D, bool kGated>
struct Backward {
  static constexpr bool kAnyDtype = std::is_same_v<D, AnyDtype>;
  static constexpr int kOutputs = kGated ? 2 : 1, kBlocks = kGated && sizeof(T) == 4 ? 1 : 2;
  struct Columns {};
  struct Raw {
    Vec8<std::conditional_t<kAnyDtype, float, D>> dy;
    Vec8<T> z;
    Vec8<T> gate;
  };
  const void* dy;
  DType dy_dtype;
  const T* z;
  int64_t cols;
  Curve curve;

  __device__ __forceinline__ Columns columns(int64_t, int, bool) const { return {}; }
  __device__ __forceinline__ Raw load(int64_t row, int64_t col, int n, bool vector) const {
    Raw raw;
    if constexpr (kAnyDtype) {
      float v[8];
      load8(dy, dy_dtype, row * cols + col, n, vector, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) raw.dy.words[j] = __float_as_uint(v[j]);
    } else {
      const D* p = static_cast<const D*>(dy) + row * cols + col;
      raw.dy = vector ? load8(p) : load8(p, n);
    }
    const T* p = z + row * kOutputs * cols + col;
    raw.z = vector ? load8(p) : load8(p, n);
    if constexpr (kGated) raw.gate = vector ? load8(p + cols) : load8(p + cols, n);
    return raw;
  }
  __device__ __forceinline__ void values(const Raw& raw, const Columns&, float (&v)[kOutputs][8]) const {
    with_device_curve(curve, [&](auto c) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const Point p = c.at(raw.z[j]);
        v[0][j] = raw.dy[j] * (kGated ? raw.gate[j] : 1.f) * p.slope;
        if constexpr (kGated) v[1][j] = raw.dy[j] * p.value;
      }
    });
  }
};

// Calls f(T{}, std::bool_constant<gated>{}).
template <typename F>
ffi::Error with_variant(DType dtype, bool gated, F&& f) {
  return with_float(dtype, [&](auto t) { return gated ? f(t, std::true_type{}) : f(t, std::false_type{}); });
}

}  // namespace

ffi::Error ActivationFwd(cudaStream_t stream, In z, In scale, Out y, Out y_t, Out amax,
                         ActivationAttributes attributes) {
  const Check check = check_activation_fwd(z, scale, y, y_t, amax, attributes.activation);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m = matrix(y, 1);
  Result out = fp8_or_float_result(y, scale, y_t, amax, m.rows, m.cols);
  out.vector = out.vector && aligned(z.untyped_data());
  return with_variant(z.element_type(), activation.gated, [&](auto t, auto gated) {
    using T = decltype(t);
    const Forward<T, decltype(gated)::value> in{static_cast<const T*>(z.untyped_data()), m.cols, activation.curve};
    return launch_tiles(stream, in, out);
  });
}

// Workspace: 4 * A * N * ceil(rows / 128) bytes where dbias is asked for.
ffi::Error ActivationBwd(cudaStream_t stream, In dy, In z, In scale, Out dz, Out dz_t, Out amax, Out dbias,
                         Out workspace, ActivationAttributes attributes) {
  Check check = check_activation_bwd(dy, z, scale, dz, dz_t, amax, dbias, attributes.activation);
  if (check.failed()) return check.error();
  const Activation activation = *parse_activation(attributes.activation);
  const Matrix m = matrix(dy, 1);
  if (present(dbias)) check_workspace(check, workspace, tile_partials(m.rows, m.cols * activation.inputs()));
  if (check.failed()) return check.error();
  Result out = fp8_or_float_result(dz, scale, dz_t, amax, m.rows, m.cols);
  out.vector = out.vector && aligned(z.untyped_data()) && aligned(m.data);
  return with_variant(z.element_type(), activation.gated, [&](auto t, auto gated) {
    using T = decltype(t);
    const auto run = [&](auto d) {
      const Backward<T, decltype(d), decltype(gated)::value> in{
          m.data, m.dtype, static_cast<const T*>(z.untyped_data()), m.cols, activation.curve};
      return launch_tiles(stream, in, out, data_or_null<float>(dbias), workspace->untyped_data());
    };
    return m.dtype == z.element_type() ? run(t) : run(AnyDtype{});
  });
}

}  // namespace te

TE_HANDLER(activation_fwd, ActivationFwd)
TE_HANDLER(activation_bwd, ActivationBwd)

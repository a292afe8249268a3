// te_activation_fwd, te_activation_bwd: their signatures, and the curves that CPU and CUDA share.
//
//   activation_fwd: z[rows, A, N], scale?, bias[A, N]? -> y[rows, N]?, y_t[N, rows]?, amax?, report?, scale_inv?
//   activation_bwd: dy[rows, N], z[rows, A, N], scale?, bias[A, N]? -> dz[rows, A, N]?, dz_t[A, N, rows]?, amax?,
//                   dbias f32[A, N]?, the sum of dz over rows before its cast, report?, scale_inv?
//
// What a cast is told of its scale, and tells of it, is core/scaling.h's Casting.
//
// A = 1: y = curve(z[0]). A = 2 (names that end in "_linear"): y = curve(z[0]) * z[1], or a curve's own gate(z[1]). All
// arithmetic is in f32. A bias is added to z before.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>

#include "core/math.h"
#include "core/result.h"

namespace te {

// ---- Curves: value and slope at x, branch-free so that they vectorise. A caller that drops one of the two
// ---- pays for neither. NaN stays NaN; at -Inf and +Inf they take their limits.

struct Point {
  float value;
  float slope;
};

// 1 / (1 + e^-x), for -89 <= x <= 87; exactly 0 below -88.4. To 2 ulp on the CPU. On a GPU by the hardware's 2^x and
// 1 / x, 4 instructions: the rounding of x / ln2 adds |x| ulp where x < 0, as rounding x itself to f32 does.
TE_MATH float logistic(float x) {
#ifdef __CUDA_ARCH__
  float power, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + power));
  return s;
#else
  return 1.f / (1.f + exponential(-x));
#endif
}

// The larger and the smaller of two; x where x is NaN.
TE_MATH float at_least(float low, float x) {
#ifdef __CUDA_ARCH__
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(low), "f"(x));
  return x;
#else
  return x < low ? low : x;
#endif
}
TE_MATH float at_most(float high, float x) {
#ifdef __CUDA_ARCH__
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(high), "f"(x));
  return x;
#else
  return x > high ? high : x;
#endif
}

// x * logistic(v). The caller takes v and its derivative dv at c, x within bounds beyond which the curve is flat: that
// keeps products with a vanished slope finite. v spans [-88.7, 16] or more between the bounds, so that the logistic
// reaches exactly 0 and 1. x may be given from the lower bound up.
TE_MATH Point gated_by_logistic(float x, float c, float v, float dv) {
  const float s = logistic(v);
  return {x * s, s + c * (s * (1.f - s)) * dv};
}

// What curve(z[0]) is multiplied by where A = 2, as a function of z[1].
struct LinearGate {
  static constexpr bool kBounded = false;
  TE_MATH static Point gate(float x) { return {x, 1.f}; }
};

// x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), Hendrycks and Gimpel; it equals x * logistic(2u),
// which keeps its relative precision where 1 + tanh(u) cancels.
struct Gelu : LinearGate {
  TE_MATH static Point at(float x) {
    constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 sqrt(2/pi), and that times 0.044715
    x = at_least(-10.06f, x);
    const float c = at_most(9.9f, x);
    return gated_by_logistic(x, c, c * (kLinear + kCubic * (c * c)), kLinear + 3.f * kCubic * (c * c));
  }
  // Bounds of |value| and |slope| that are cheaper than these; NaN where x is, and never less for a larger x.
  static constexpr bool kBounded = true;
  TE_MATH static Point most(float x) { return {at_least(0.1701f, x), 1.13f}; }
};
struct Silu : LinearGate {
  TE_MATH static Point at(float x) {
    x = at_least(-88.7f, x);
    const float c = at_most(87.f, x);
    return gated_by_logistic(x, c, c, 1.f);
  }
  static constexpr bool kBounded = true;
  TE_MATH static Point most(float x) { return {at_least(0.2785f, x), 1.1f}; }
};
struct QuickGelu : LinearGate {
  TE_MATH static Point at(float x) {
    x = at_least(-52.12f, x);
    const float c = at_most(51.f, x);
    return gated_by_logistic(x, c, 1.702f * c, 1.702f);
  }
};
struct Sigmoid : LinearGate {
  TE_MATH static Point at(float x) {
    const float s = logistic(at_most(87.f, at_least(-88.7f, x)));
    return {s, s * (1.f - s)};
  }
};
struct Relu : LinearGate {
  TE_MATH static Point at(float x) { return {x <= 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f}; }
};
struct SquaredRelu : LinearGate {
  TE_MATH static Point at(float x) {
    const float positive = Relu::at(x).value;
    return {positive * positive, 2.f * positive};
  }
};

// GPT-OSS's swiglu: c logistic(alpha c) with c = min(x, limit), times x + offset with x within [-limit, limit]. Flat
// beyond the limits. limit and alpha are positive and finite.
struct ClampedSilu {
  static constexpr bool kBounded = false;
  float limit;
  float alpha;
  float offset;
  float lowest;  // where alpha x = -88.7

  ClampedSilu(float limit, float alpha, float offset)
      : limit(limit), alpha(alpha), offset(offset), lowest(-88.7f / alpha) {}
  TE_MATH Point at(float x) const {
    const float c = at_most(limit, at_least(lowest, x));
    const Point p = gated_by_logistic(c, c, at_most(87.f, alpha * c), alpha);
    return {p.value, x > limit ? 0.f : p.slope};
  }
  TE_MATH Point gate(float x) const {
    const float c = at_most(limit, at_least(-limit, x));
    return {c + offset, c == x ? 1.f : 0.f};
  }
};

// ---- Names

// Every curve without parameters: its name and its type, of which all else here is made.
#define TE_CURVES(CURVE)           \
  CURVE(gelu, Gelu)                \
  CURVE(silu, Silu)                \
  CURVE(relu, Relu)                \
  CURVE(quick_gelu, QuickGelu)     \
  CURVE(squared_relu, SquaredRelu) \
  CURVE(sigmoid, Sigmoid)

#define TE_CURVE(name, type) k##type,
enum class Curve { TE_CURVES(TE_CURVE) kClampedSilu };
#undef TE_CURVE

struct ActivationAttributes : Scaling {
  std::string_view activation;
  float limit;  // the rest is of clamped activations
  float alpha;
  float glu_linear_offset;
};

struct Activation {
  Curve curve;
  bool gated;
  int64_t inputs() const { return gated ? 2 : 1; }
};

inline std::optional<Activation> parse_activation(std::string_view name) {
  if (name == "clamped_silu_clamped_linear") return Activation{Curve::kClampedSilu, true};
  constexpr std::string_view kSuffix = "_linear";
  constexpr struct {
    std::string_view name;
    Curve curve;
#define TE_CURVE(name, type) {#name, Curve::k##type},
  } kCurves[] = {TE_CURVES(TE_CURVE)};
#undef TE_CURVE
  const bool gated = name.size() > kSuffix.size() && name.substr(name.size() - kSuffix.size()) == kSuffix;
  if (gated) name.remove_suffix(kSuffix.size());
  for (const auto& known : kCurves) {
    if (known.name == name) return Activation{known.curve, gated};
  }
  return std::nullopt;
}

inline ClampedSilu clamped_silu(const ActivationAttributes& attributes) {
  return {attributes.limit, attributes.alpha, attributes.glu_linear_offset};
}

// Calls f(Gelu{}) and so on; f must return ffi::Error.
template <typename F>
ffi::Error with_curve(Curve curve, const ActivationAttributes& attributes, F&& f) {
  switch (curve) {
#define TE_CURVE(name, type) \
  case Curve::k##type: return f(type{});
    TE_CURVES(TE_CURVE)
#undef TE_CURVE
    case Curve::kClampedSilu: return f(clamped_silu(attributes));
  }
  return ffi::Error::InvalidArgument("unknown activation");
}

// ---- Signatures

// z, what is added to it, and the attributes. Without an error, z's last two axes are [A, N] with the activation's A.
inline Check check_activation_input(const char* op, const In& z, const In& bias,
                                    const ActivationAttributes& attributes) {
  Check check(op);
  const std::string_view name = attributes.activation;
  const std::optional<Activation> activation = parse_activation(name);
  check.that(activation.has_value(), "activation",
#define TE_CURVE(name, type) #name ", "
             TE_CURVES(TE_CURVE) "one of these with _linear, or clamped_silu_clamped_linear",
#undef TE_CURVE
             name);
  if (activation.has_value() && activation->curve == Curve::kClampedSilu) {
    const auto positive = [](float x) { return x > 0.f && std::isfinite(x); };
    check.that(positive(attributes.limit), "limit", "a positive number", attributes.limit);
    check.that(positive(attributes.alpha), "alpha", "a positive number", attributes.alpha);
  }
  check.high_precision("z", z).axes("z", z, 2);
  if (check.failed()) return check;
  const int64_t inputs = z.dimensions()[z.dimensions().size() - 2];
  check.that(
      inputs == activation->inputs(), "z",
      [&] { return std::to_string(activation->inputs()) + " in the axis before the last for " + std::string(name); },
      z);
  if (absent(bias)) return check;
  return check.high_precision("bias", bias).size("bias", bias, 1, matrix(z, 2).cols);
}

inline Check check_activation_fwd(const In& z, const Casting& casting, const In& bias, Out& y, Out& y_t,
                                  const ActivationAttributes& attributes) {
  Check check = check_activation_input("te_activation_fwd", z, bias, attributes);
  if (check.failed()) return check;
  const Matrix m = matrix(z, 2);
  return check_result(check, casting, "y", y, "y_t", y_t, m.rows, matrix(z, 1).cols, /*optional_y=*/true);
}

inline Check check_activation_bwd(const In& dy, const In& z, const Casting& casting, const In& bias, Out& dz, Out& dz_t,
                                  Out& dbias, const ActivationAttributes& attributes) {
  Check check = check_activation_input("te_activation_bwd", z, bias, attributes);
  if (check.failed()) return check;
  const Matrix m = matrix(z, 2);
  check.high_precision("dy", dy).size("dy", dy, m.rows, matrix(z, 1).cols);
  check_result(check, casting, "dz", dz, "dz_t", dz_t, m.rows, m.cols, /*optional_y=*/true);
  if (present(dbias)) check.dtype("dbias", *dbias, DType::F32).size("dbias", *dbias, 1, m.cols);
  return check;
}

}  // namespace te

TE_ATTRIBUTES(te::ActivationAttributes, TE_SCALING, TE_ATTRIBUTE(std::string_view, activation),
              TE_ATTRIBUTE(float, limit), TE_ATTRIBUTE(float, alpha), TE_ATTRIBUTE(float, glu_linear_offset));

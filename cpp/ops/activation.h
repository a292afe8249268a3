// te_activation_fwd, te_activation_bwd: their signatures, and the curves that CPU and CUDA share.
//
//   activation_fwd: z[rows, A, N], scale f32[]? -> y[rows, N], y_t[N, rows]?, amax f32[]?
//   activation_bwd: dy[rows, N], z[rows, A, N], scale f32[]? -> dz[rows, A, N], dz_t[A, N, rows]?, amax f32[]?,
//                   dbias f32[A, N]?, the sum of dz over rows before its cast
//
// A = 1: y = curve(z[0]). A = 2 (names that end in "_linear"): y = curve(z[0]) * z[1]. All arithmetic is in f32.
#pragma once

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

// x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), Hendrycks and Gimpel; it equals x * logistic(2u),
// which keeps its relative precision where 1 + tanh(u) cancels.
struct Gelu {
  TE_MATH static Point at(float x) {
    constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 sqrt(2/pi), and that times 0.044715
    x = at_least(-10.06f, x);
    const float c = at_most(9.9f, x);
    return gated_by_logistic(x, c, c * (kLinear + kCubic * (c * c)), kLinear + 3.f * kCubic * (c * c));
  }
};
struct Silu {
  TE_MATH static Point at(float x) {
    x = at_least(-88.7f, x);
    const float c = at_most(87.f, x);
    return gated_by_logistic(x, c, c, 1.f);
  }
};
struct QuickGelu {
  TE_MATH static Point at(float x) {
    x = at_least(-52.12f, x);
    const float c = at_most(51.f, x);
    return gated_by_logistic(x, c, 1.702f * c, 1.702f);
  }
};
struct Sigmoid {
  TE_MATH static Point at(float x) {
    const float s = logistic(at_most(87.f, at_least(-88.7f, x)));
    return {s, s * (1.f - s)};
  }
};
struct Relu {
  TE_MATH static Point at(float x) { return {x <= 0.f ? 0.f : x, x > 0.f ? 1.f : 0.f}; }
};
struct SquaredRelu {
  TE_MATH static Point at(float x) {
    const float positive = Relu::at(x).value;
    return {positive * positive, 2.f * positive};
  }
};

// ---- Names

enum class Curve { kGelu, kSilu, kRelu, kQuickGelu, kSquaredRelu, kSigmoid };

struct Activation {
  Curve curve;
  bool gated;
  int64_t inputs() const { return gated ? 2 : 1; }
};

inline std::optional<Activation> parse_activation(std::string_view name) {
  constexpr std::string_view kSuffix = "_linear";
  constexpr struct {
    std::string_view name;
    Curve curve;
  } kCurves[] = {{"gelu", Curve::kGelu},
                 {"silu", Curve::kSilu},
                 {"relu", Curve::kRelu},
                 {"quick_gelu", Curve::kQuickGelu},
                 {"squared_relu", Curve::kSquaredRelu},
                 {"sigmoid", Curve::kSigmoid}};
  const bool gated = name.size() > kSuffix.size() && name.substr(name.size() - kSuffix.size()) == kSuffix;
  if (gated) name.remove_suffix(kSuffix.size());
  for (const auto& known : kCurves) {
    if (known.name == name) return Activation{known.curve, gated};
  }
  return std::nullopt;
}

// Calls f(Gelu{}) and so on; f must return ffi::Error.
template <typename F>
ffi::Error with_curve(Curve curve, F&& f) {
  switch (curve) {
    case Curve::kGelu: return f(Gelu{});
    case Curve::kSilu: return f(Silu{});
    case Curve::kRelu: return f(Relu{});
    case Curve::kQuickGelu: return f(QuickGelu{});
    case Curve::kSquaredRelu: return f(SquaredRelu{});
    case Curve::kSigmoid: return f(Sigmoid{});
  }
  return ffi::Error::InvalidArgument("unknown activation");
}

// ---- Signatures

struct ActivationAttributes {
  std::string_view activation;
};

// z and the attribute. Without an error, z's last two axes are [A, N] with the activation's A.
inline Check check_activation_input(const char* op, const In& z, std::string_view name) {
  Check check(op);
  const std::optional<Activation> activation = parse_activation(name);
  check.that(activation.has_value(), "activation",
             "gelu, silu, relu, quick_gelu, squared_relu, sigmoid, or one of these with _linear", std::string(name));
  check.high_precision("z", z).axes("z", z, 2);
  if (check.failed()) return check;
  const int64_t inputs = z.dimensions()[z.dimensions().size() - 2];
  return check.that(inputs == activation->inputs(), "z",
                    std::to_string(activation->inputs()) + " in the axis before the last for " + std::string(name),
                    describe(z));
}

inline Check check_activation_fwd(const In& z, const In& scale, Out& y, Out& y_t, Out& amax, std::string_view name) {
  Check check = check_activation_input("te_activation_fwd", z, name);
  if (check.failed()) return check;
  const Matrix m = matrix(z, 2);
  return check_result(check, scale, "y", y, "y_t", y_t, amax, m.rows, matrix(z, 1).cols);
}

inline Check check_activation_bwd(const In& dy, const In& z, const In& scale, Out& dz, Out& dz_t, Out& amax, Out& dbias,
                                  std::string_view name) {
  Check check = check_activation_input("te_activation_bwd", z, name);
  if (check.failed()) return check;
  const Matrix m = matrix(z, 2);
  check.high_precision("dy", dy).size("dy", dy, m.rows, matrix(z, 1).cols);
  check_result(check, scale, "dz", dz, "dz_t", dz_t, amax, m.rows, m.cols);
  if (present(dbias)) check.dtype("dbias", *dbias, DType::F32).size("dbias", *dbias, 1, m.cols);
  return check;
}

}  // namespace te

TE_ATTRIBUTES(te::ActivationAttributes, TE_ATTRIBUTE(std::string_view, activation));

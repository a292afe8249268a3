// te_activation_fwd, te_activation_bwd: their signatures, and the curves that CPU and CUDA share.
//
//   activation_fwd: z[rows, A, N], scale f32[]? -> y[rows, N], y_t[N, rows]?, amax f32[]?
//   activation_bwd: dy[rows, N], z[rows, A, N], scale f32[]? -> dz[rows, A, N], dz_t[A, N, rows]?, amax f32[]?,
//                   dbias f32[A, N]?, the sum of dz over rows before its cast
//
// A = 1: y = curve(z[0]). A = 2 (names that end in "_linear"): y = curve(z[0]) * z[1]. All arithmetic is in f32.
#pragma once

#include <limits>
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

// 1 / (1 + e^-x) to 2 ulp, for -89 <= x <= 87; exactly 0 below -88.4.
TE_MATH float logistic(float x) {
#ifdef __CUDA_ARCH__
  // The hardware's 2^x, given -x / ln2 as a rounded product and its remainder: 8 instructions in place of 30.
  // __fdividef gives 0 for divisors above 2^126.
  const float high = x * -1.44269504f;
  const float low = fmaf(x, -1.44269504f, -high) + x * -1.92596303e-8f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
  return __fdividef(1.f, fmaf(power, fmaf(low, 0.693147182f, 1.f), 1.f));
#else
  return 1.f / (1.f + exponential(-x));
#endif
}

// x, or the nearest of two bounds beyond which a curve is flat: it keeps arguments in the range above, and products
// with a vanished slope finite.
TE_MATH float within(float low, float x, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// x * logistic(v): v and its derivative dv are taken at c = within(.., x, ..), where v spans [-88.7, 16] or more, so
// that the logistic reaches exactly 0 and 1.
TE_MATH Point gated_by_logistic(float x, float c, float v, float dv) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  const float s = logistic(v);
  return {(x < kLowest ? kLowest : x) * s, s + c * (s * (1.f - s)) * dv};
}

// x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), Hendrycks and Gimpel; it equals x * logistic(2u),
// which keeps its relative precision where 1 + tanh(u) cancels.
struct Gelu {
  TE_MATH static Point at(float x) {
    constexpr float kLinear = 1.59576912f, kCubic = 0.0713548163f;  // 2 sqrt(2/pi), and that times 0.044715
    const float c = within(-10.06f, x, 9.9f);
    return gated_by_logistic(x, c, c * (kLinear + kCubic * (c * c)), kLinear + 3.f * kCubic * (c * c));
  }
};
struct Silu {
  TE_MATH static Point at(float x) {
    const float c = within(-88.7f, x, 87.f);
    return gated_by_logistic(x, c, c, 1.f);
  }
};
struct QuickGelu {
  TE_MATH static Point at(float x) {
    const float c = within(-52.12f, x, 51.f);
    return gated_by_logistic(x, c, 1.702f * c, 1.702f);
  }
};
struct Sigmoid {
  TE_MATH static Point at(float x) {
    const float s = logistic(within(-88.7f, x, 87.f));
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

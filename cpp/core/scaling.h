// Scales: the arithmetic between an amax and a scale, in one place for CPU and CUDA, so that both give the same bits
// (XLA's division on GPUs is not correctly rounded); and what an op that casts is told of its scale.
//
// A state is one row of numbers, [scale, uses, history...]: kScale, kUses, kHistory; those of a GEMM's tensors are the
// rows of one array. What they mean, and what a report is, is said in transformer_engine_jax/quantized.py and
// ops/state.py.
#pragma once

#include <cstring>
#include <string_view>

#include "core/check.h"

#ifdef __CUDACC__
#define TE_EVERYWHERE __host__ __device__ __forceinline__
#else
#define TE_EVERYWHERE inline __attribute__((always_inline))
#endif

namespace te {

// ---- Arithmetic

constexpr int64_t kScale = 0, kUses = 1, kHistory = 2;

struct CurrentScaleAttributes {
  float fp8_max;
  float amax_epsilon;  // amaxes below it count as it
  bool power_of_2;     // round the scale down to one
};

constexpr int kReportShift = 21;           // a report's bin is the exponent and two bits of the mantissa ...
constexpr int kReportFirst = 63 * 4;       // ... counted from 2^-64
constexpr float kLargestScale = 0x1p126f;  // it and its reciprocal are normal numbers

TE_EVERYWHERE bool finite_positive(float x) { return x > 0.f && x <= 3.402823466e38f; }

// The upper edge of a report's bin; the last bin has none.
TE_EVERYWHERE float bin_edge(int bin, int bins) {
  const uint32_t bits = bin == bins - 1 ? 0x7f800000u : static_cast<uint32_t>(bin + 1 + kReportFirst) << kReportShift;
  float edge;
  memcpy(&edge, &bits, sizeof edge);
  return edge;
}

// The bin that reports an amax, -1 for 0, NaN and Inf, which none does.
TE_EVERYWHERE int bin_of(float amax, int bins) {
  if (!finite_positive(amax)) return -1;
  uint32_t bits;
  memcpy(&bits, &amax, sizeof bits);
  const int bin = static_cast<int>(bits >> kReportShift) - kReportFirst;
  return bin < 0 ? 0 : bin >= bins ? bins - 1 : bin;
}

TE_EVERYWHERE float next_scale(float amax, float old_scale, float fp8_max, float two_to_margin) {
  if (!finite_positive(amax)) return old_scale;
  const float scale = (fp8_max / amax) / two_to_margin;
  return scale > kLargestScale ? kLargestScale : scale < 1.f / kLargestScale ? 1.f / kLargestScale : scale;
}

TE_EVERYWHERE float larger(float a, float b) { return a > b ? a : b; }

// The slot of a stored history that the last step filled.
TE_EVERYWHERE int64_t newest_of(int64_t length) { return 1 % length; }

// How many states were added together, by the `uses` of their sum: less than one, or negative, where somebody scaled
// the sum as gradients are scaled; 1 for a sum of none.
TE_EVERYWHERE float states_in(float uses) { return finite_positive(uses < 0.f ? -uses : uses) ? uses : 1.f; }

// Slot i of the history in a sum of n states: all but the newest amax are n times what they were, and what is no amax
// counts as none.
TE_EVERYWHERE float mended_amax(float amax, int64_t i, int64_t length, float n) {
  if (n <= 1.f || i != newest_of(length)) amax /= n;
  return finite_positive(amax) ? amax : 0.f;
}

// What slot i of it adds to the window that sets the scale.
TE_EVERYWHERE float in_window(const float* history, int64_t i, int64_t length, float n, bool most_recent) {
  return most_recent && i != newest_of(length) ? 0.f : mended_amax(history[i], i, length, n);
}

// The scale of a sum of n states whose window holds this amax, or of none.
TE_EVERYWHERE float mended_scale(float scale, float n, float window, float fp8_max, float two_to_margin) {
  const float mean = scale / n, last = finite_positive(mean) ? mean : 1.f;
  return n == 1.f ? last : next_scale(window, last, fp8_max, two_to_margin);
}

TE_EVERYWHERE float current_scale(float amax, const CurrentScaleAttributes& a) {
  if (amax < a.amax_epsilon) amax = a.amax_epsilon;
  float scale = next_scale(amax, 1.f, a.fp8_max, 1.f);
  if (a.power_of_2) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits &= 0xff800000u;
    memcpy(&scale, &bits, sizeof bits);
  }
  return scale;
}

// ---- What an op that casts is told

// Where its scale comes from; Scaling in ops/state.py.
struct Scaling {
  std::string_view scale_from;  // what the operand `scale` holds: "scale" f32[]; "amax" f32[]; "states" f32[T, 2 + H]
  float amax_epsilon;           // amax: as current_scale
  bool power_of_2;
  float two_to_margin;  // states: as ScaleSource has it
  bool most_recent;
  int64_t tensor;  // states: whose
};

// A maximum as it is, f32[], or as its report, f32[bins]; either may be absent.
inline Check& check_measured(Check& check, Out& amax, Out& report) {
  check.scalar("amax", *amax, /*optional=*/true);
  if (absent(*report)) return check;
  check.that(report->element_type() == DType::F32 && report->dimensions().size() == 1, "report", "f32[bins]", *report);
  return check.that(absent(*amax), "report", "none beside amax", *report);
}

// The operand and the results that go with it. All optional, amax or report.
struct Casting {
  const In& scale;
  Out& amax;       // f32[] max |value|
  Out& report;     // f32[bins] its report
  Out& scale_inv;  // f32[] 1 / scale
  const Scaling& scaling;

  void check(Check& check) const {
    const std::string_view source = scaling.scale_from;
    const bool of_states = source == "states";
    check.that(source == "scale" || source == "amax" || of_states, "scale_from", "scale, amax or states", source);
    if (of_states) {
      const auto dims = scale.dimensions();
      check.that(scale.element_type() == DType::F32 && dims.size() == 2 && dims[1] > kHistory, "scale",
                 "f32[T, 2 + H] of states", scale);
      check.that(dims.size() == 2 && scaling.tensor >= 0 && scaling.tensor < dims[0], "scale",
                 "the state of the tensor that is asked for", scale);
    } else {
      check.scalar("scale", scale, /*optional=*/true);
    }
    check.scalar("scale_inv", *scale_inv, /*optional=*/true);
    check.that(present(scale) || absent(*scale_inv), "scale_inv", "none without a scale", *scale_inv);
    check_measured(check, amax, report);
  }
};

// A scale where it is needed. Plain values: a kernel gets it as a parameter.
struct ScaleSource {
  enum Kind { kGiven, kAmax, kState } kind = kGiven;
  const float* data = nullptr;  // absent: the scale is 1
  float* inverse = nullptr;     // where its reciprocal goes
  int64_t length = 0;           // of a state's history
  CurrentScaleAttributes current = {};
  float two_to_margin = 1.f;
  bool most_recent = false;

  ScaleSource() = default;
  ScaleSource(const Casting& c, DType dtype)
      : kind(c.scaling.scale_from == "amax"     ? kAmax
             : c.scaling.scale_from == "states" ? kState
                                                : kGiven),
        data(data_or_null<float>(c.scale)),
        inverse(data_or_null<float>(c.scale_inv)),
        length(kind == kState ? c.scale.dimensions()[1] - kHistory : 0),
        current{dtype == DType::F8E5M2 ? 57344.f : 448.f, c.scaling.amax_epsilon, c.scaling.power_of_2},
        two_to_margin(c.scaling.two_to_margin),
        most_recent(c.scaling.most_recent) {
    if (kind == kState) data += c.scaling.tensor * (kHistory + length);
  }

  TE_EVERYWHERE float get() const {
    if (!data) return 1.f;
    if (kind == kGiven) return *data;
    if (kind == kAmax) return current_scale(*data, current);
    const float n = states_in(data[kUses]);
    float window = 0.f;
    if (n != 1.f) {  // seldom
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
      for (int64_t i = 0; i < length; ++i)
        window = larger(window, in_window(data + kHistory, i, length, n, most_recent));
    }
    return mended_scale(data[kScale], n, window, current.fp8_max, two_to_margin);
  }
  TE_EVERYWHERE void store_inverse(float scale) const {
    if (inverse) *inverse = 1.f / scale;
  }
};

}  // namespace te

// The members of Scaling, first among those of an op's attributes.
#define TE_SCALING                                                                                               \
  TE_ATTRIBUTE(std::string_view, scale_from), TE_ATTRIBUTE(float, amax_epsilon), TE_ATTRIBUTE(bool, power_of_2), \
      TE_ATTRIBUTE(float, two_to_margin), TE_ATTRIBUTE(bool, most_recent), TE_ATTRIBUTE(int64_t, tensor)

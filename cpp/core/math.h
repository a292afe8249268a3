// Functions of one number that CPU and CUDA handlers share, so that the two cannot drift. They have no branches: loops
// over them vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TE_MATH __host__ __device__ __forceinline__
#else
#define TE_MATH inline __attribute__((always_inline))
#endif

namespace te {

// e^x to 1 ulp on the CPU and 2 on CUDA, for -87.3 <= x <= 88.3, which callers see to; NaN stays NaN.
TE_MATH float exponential(float x) {
#ifdef __CUDA_ARCH__
  // The hardware's 2^x, given x / ln2 as a rounded product and its remainder.
  const float high = x * 1.44269504f;
  const float low = fmaf(x, 1.44269504f, -high) + x * 1.92596303e-8f;
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(high));
  return fmaf(power, low * 0.693147182f, power);
#else
  // x = n ln2 + r with |r| <= ln2 / 2, and e^r - 1 - r as r^2 times a quartic (minimax, 2^-28).
  const float shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the low bits hold round(x / ln2)
  const float n = shifted - 12582912.f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln2 in two parts, the first of 9 bits
  float p = 1.38131448e-3f;
  p = p * r + 8.36941879e-3f;
  p = p * r + 4.16684561e-2f;
  p = p * r + 1.66665152e-1f;
  p = p * r + 4.99999940e-1f;
  const float e_r = (p * r) * r + r + 1.f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127u) << 23;
  float two_n;
  std::memcpy(&two_n, &bits, 4);
  return e_r * two_n;
#endif
}

// Cosine and sine of multiplier * step, to 1e-7 for products up to 2^31: the product and its reduction by quarter turns
// are taken in f64, where both are exact to 2^-53 of the product, and only what remains is rounded to f32.
struct Turn {
  float cos;
  float sin;
};
TE_MATH Turn turn(int32_t multiplier, float step) {
  constexpr double kShift = 6755399441055744.0;  // 1.5 * 2^52: the low bits hold the number of quarter turns
  const double angle = static_cast<double>(multiplier) * static_cast<double>(step);
  const double shifted = angle * 0.63661977236758138 + kShift;
  const float r = static_cast<float>(angle - (shifted - kShift) * 1.5707963267948966);
  uint64_t bits;
  std::memcpy(&bits, &shifted, 8);
  const uint32_t quarter = static_cast<uint32_t>(bits);
  // Minimax on |r| <= pi / 4, relative errors 2^-27 and 2^-32.
  const float z = r * r;
  const float sine = r + r * (z * (-1.666665524e-01f + z * (8.332159370e-03f + z * -1.951515296e-04f)));
  const float cosine = 1.f - 0.5f * z + z * z * (4.166664556e-02f + z * (-1.388731529e-03f + z * 2.443300764e-05f));
  const float c = quarter & 1u ? sine : cosine;
  const float s = quarter & 1u ? cosine : sine;
  return {(quarter + 1u) & 2u ? -c : c, quarter & 2u ? -s : s};
}

}  // namespace te

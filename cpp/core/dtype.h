// The floating-point formats on the host, and the one definition of the FP8 cast.
//
// Cast: values and scales below the smallest normal f32 count as (signed) zero, so results do not depend on the
// processor's denormal mode; round to nearest even; saturate to +-max, infinities too; NaN becomes 0x7f.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/ffi.h"

// Hot loops are compiled for several instruction sets; the loader picks one (GNU ifunc; clang has no clones of
// templates, and compiles for the one set that it is told). GCC knows these names from 12 on.
#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__) && !defined(__clang__) && !defined(TE_CUDA)
#if __GNUC__ >= 12
#define TE_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TE_SIMD __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define TE_SIMD
#endif
#define TE_INLINE inline __attribute__((always_inline))

namespace te {

TE_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
TE_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
  static constexpr int kMantissa = 3, kBias = 7;
};
struct e5m2 {
  uint8_t bits;
  static constexpr int kMantissa = 2, kBias = 15;
};

template <typename T>
inline constexpr bool is_fp8_v = std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>;

TE_INLINE float to_float(float x) { return x; }
TE_INLINE float to_float(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
TE_INLINE float to_float(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  const uint32_t value = magnitude < 0x400u ? bits_of(subnormal) : magnitude >= 0x7c00u ? special : normal;
  return float_of(value | sign);
}
template <typename F8>
TE_INLINE float fp8_to_float(uint8_t code) {
  constexpr int kShift = 23 - F8::kMantissa;
  const uint32_t magnitude = code & 0x7fu;
  // Subnormal codes are integers times 2^(1 - bias - mantissa); both paths are exact.
  constexpr float kStep = 1.f / static_cast<float>(1u << (F8::kBias - 1 + F8::kMantissa));
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * kStep;
  const float normal = float_of((magnitude << kShift) + ((127u - F8::kBias) << 23));
  float value = magnitude < (1u << F8::kMantissa) ? subnormal : normal;
  if constexpr (std::is_same_v<F8, e4m3>) {
    value = magnitude == 0x7f ? float_of(0x7fc00000u) : value;
  } else {
    value = magnitude > 0x7c ? float_of(0x7fc00000u) : magnitude == 0x7c ? float_of(0x7f800000u) : value;
  }
  return float_of(bits_of(value) | (static_cast<uint32_t>(code & 0x80u) << 24));
}
TE_INLINE float to_float(e4m3 x) { return fp8_to_float<e4m3>(x.bits); }
TE_INLINE float to_float(e5m2 x) { return fp8_to_float<e5m2>(x.bits); }

TE_INLINE float flush(float x) {
  const uint32_t u = bits_of(x);
  return float_of((u & 0x7fffffffu) < 0x00800000u ? (u & 0x80000000u) : u);
}

template <typename F8>
TE_INLINE uint8_t fp8_from_float(float x) {
  constexpr int kShift = 23 - F8::kMantissa;
  constexpr uint32_t kMaxBits = F8::kMantissa == 3 ? 0x43e00000u : 0x47600000u;   // 448, 57344
  constexpr uint32_t kMinNormal = (127u - F8::kBias + 1) << 23;                   // 2^(1 - bias)
  constexpr uint32_t kMagic = (127u - F8::kBias + 1 - F8::kMantissa + 23) << 23;  // its ulp is one subnormal step
  const uint32_t u = bits_of(x);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t a = magnitude > kMaxBits ? kMaxBits : magnitude;
  const uint32_t odd = (a >> kShift) & 1u;
  const uint32_t normal = ((a + (1u << (kShift - 1)) - 1u + odd) >> kShift) - ((127u - F8::kBias) << F8::kMantissa);
  const uint32_t subnormal = bits_of(float_of(a) + float_of(kMagic)) - kMagic;
  uint32_t code = (a < kMinNormal ? subnormal : normal) | sign;
  code = magnitude > 0x7f800000u ? 0x7fu : code;
  return static_cast<uint8_t>(code);
}

template <typename T>
TE_INLINE T from_float(float x) {
  if constexpr (std::is_same_v<T, float>) {
    return x;
  } else if constexpr (std::is_same_v<T, bf16>) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return bf16{static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u | (u >> 16 & 0x8000u) : rounded)};
  } else if constexpr (std::is_same_v<T, f16>) {
    const uint32_t u = bits_of(x);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t a = u & 0x7fffffffu;
    const uint32_t odd = (a >> 13) & 1u;
    const uint32_t normal = (a + 0xfffu + odd - (112u << 23)) >> 13;
    const uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;  // ulp of [0.5, 1) is 2^-24
    uint32_t code = a < 0x38800000u ? subnormal : normal;
    code = a >= 0x477ff000u ? 0x7c00u : code;  // rounds to at least 65520: infinity
    code = a > 0x7f800000u ? 0x7e00u : code;
    return f16{static_cast<uint16_t>(code | sign)};
  } else {
    return T{fp8_from_float<T>(x)};
  }
}

// Calls f(T{}) with the host type of a dtype; f must return ffi::Error.
template <typename F>
ffi::Error with_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::F32: return f(float{});
    case DType::BF16: return f(bf16{});
    case DType::F16: return f(f16{});
    default: return ffi::Error::InvalidArgument("expected f32, f16 or bf16");
  }
}
template <typename F>
ffi::Error with_fp8(DType dtype, F&& f) {
  switch (dtype) {
    case DType::F8E4M3FN: return f(e4m3{});
    case DType::F8E5M2: return f(e5m2{});
    default: return ffi::Error::InvalidArgument("expected f8_e4m3fn or f8_e5m2");
  }
}
template <typename F>
ffi::Error with_any(DType dtype, F&& f) {
  return dtype == DType::F8E4M3FN || dtype == DType::F8E5M2 ? with_fp8(dtype, f) : with_float(dtype, f);
}

}  // namespace te

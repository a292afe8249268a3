// te_gemm: what the CPU and the CUDA handler of the one matrix product agree on.
//
//   d[M, N] = a[M, K] b[N, K]^T * a_scale_inv * b_scale_inv + bias[N] + c_scale * c[M, N]
//
//   a, b        both FP8 (of either kind), or both f32, f16 or bf16; the contracted axes last
//   *_scale_inv f32[], what a unit of an FP8 operand stands for (absent: 1)
//   bias, c     f32, f16 or bf16, each absent where not wanted; c of d's dtype may be in d's buffer
//   d           FP8 exactly where d_scale f32[] is given, cast(value * d_scale); else f32, f16 or bf16
//   amax        f32[], max |value|: of the f32 value before an FP8 cast, of d itself otherwise; may be absent
//   workspace   CUDA only: scratch
//
// Attributes: k_axes, how many of the last axes of a and b are contracted; split_accumulator: keep FP8 partial sums in
// f32, slower on Hopper's tensor cores; k_first, "", "a", "b" or "ab": on CUDA, which operands that are not FP8 lie in
// memory with those axes first, whatever their dimensions say; c_scale, a device's part of c in a sum over devices.
#pragma once

#include <algorithm>

#include "core/check.h"

namespace te {

struct GemmAttributes {
  int64_t k_axes;
  bool split_accumulator;    // as it always is on the CPU
  std::string_view k_first;  // nothing to XLA on the CPU, where all lies as its dimensions say
  float c_scale;
#ifdef TE_CUDA
  Buffers buffers;
#endif
};

struct GemmOperands {
  const In &a, &b, &a_scale_inv, &b_scale_inv, &bias, &c, &d_scale;
};

struct GemmShape {
  int64_t m, n, k;
};

inline GemmShape gemm_shape(const GemmOperands& in, int64_t k_axes) {
  const Matrix a = matrix(in.a, k_axes);
  return {a.rows, matrix(in.b, k_axes).rows, a.cols};
}

inline Check check_gemm(const GemmOperands& in, Out& d, Out& amax, int64_t k_axes) {
  Check check("te_gemm");
  check.axes("a", in.a, k_axes).axes("b", in.b, k_axes);
  if (check.failed()) return check;
  const DType a = in.a.element_type(), b = in.b.element_type(), out = d->element_type();
  check.that(is_fp8(a) || is_float(a), "a", "an FP8 dtype, f32, f16 or bf16", in.a);
  check.that(is_fp8(a) ? is_fp8(b) : a == b, "b", is_fp8(a) ? "an FP8 dtype, as a" : name_of(a), in.b);
  const auto a_dims = in.a.dimensions(), b_dims = in.b.dimensions();
  check.that(
      std::equal(a_dims.end() - k_axes, a_dims.end(), b_dims.end() - k_axes), "b",
      [&] { return "the last " + std::to_string(k_axes) + " axes of a " + describe(in.a); }, in.b);
  check.that(is_fp8(a) || absent(in.a_scale_inv), "a_scale_inv", "absent for an operand that is not FP8",
             in.a_scale_inv);
  check.that(is_fp8(b) || absent(in.b_scale_inv), "b_scale_inv", "absent for an operand that is not FP8",
             in.b_scale_inv);
  check.scalar("a_scale_inv", in.a_scale_inv, /*optional=*/true).scalar("b_scale_inv", in.b_scale_inv, true);
  check.scalar("d_scale", in.d_scale, true).scalar("amax", *amax, true);
  check.that(present(in.d_scale) ? is_fp8(out) : is_float(out), "d",
             present(in.d_scale) ? "FP8 with a d_scale" : "f32, f16 or bf16 without a d_scale", *d);
  if (check.failed()) return check;
  const GemmShape s = gemm_shape(in, k_axes);
  check.size("d", *d, s.m, s.n);
  if (present(in.bias)) check.high_precision("bias", in.bias).size("bias", in.bias, 1, s.n);
  if (present(in.c)) check.high_precision("c", in.c).size("c", in.c, s.m, s.n);
  return check;
}

}  // namespace te

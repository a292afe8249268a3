// te_dropout: zeros at random places, and a residual added.
//
//   x[rows.., N], residual[rows.., N]?, seed u32[2], row s32[rows..], column s32[N] -> y[rows.., N], all of x's dtype
//
// y = (bits < threshold ? 0 : x * scale) + residual, each step rounded to f32, and the sum to y's dtype. The 16 bits of
// a value are those of Philox-4x32-10 (Salmon et al., 2011) under the key `seed`, of the counter (column / 8, row, 0,
// 0): value i of the 8 has half i % 2 of word i / 2, the low one first. `row` and `column`, which counts up, are the
// numbers of what may be a part of an array; so the gradient, which draws the same bits again, needs no mask.
#pragma once

#include "core/check.h"
#include "core/math.h"

namespace te {

struct DropoutAttributes {
  int64_t threshold;  // of 2^16
  float scale;
};

constexpr int kDrawn = 8;  // values, by one call

struct Draw {
  uint32_t words[kDrawn / 2];

  TE_MATH uint32_t operator[](int i) const { return words[i / 2] >> (i % 2 * 16) & 0xffffu; }
};

TE_MATH Draw philox(uint32_t key0, uint32_t key1, uint32_t unit, uint32_t row) {
  uint32_t c0 = unit, c1 = row, c2 = 0, c3 = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

inline Check check_dropout(const In& x, const In& residual, const In& seed, const In& row, const In& column, Out& y,
                           const DropoutAttributes& a) {
  Check check("te_dropout");
  check.high_precision("x", x).axes("x", x, 1).dtype("seed", seed, DType::U32).size("seed", seed, 2, 1);
  check.dtype("row", row, DType::S32).dtype("column", column, DType::S32).dtype("y", *y, x.element_type());
  check.that(a.threshold >= 0 && a.threshold < 1 << 16, "threshold", "0 to 65535",
             [&] { return std::to_string(a.threshold); });
  if (check.failed()) return check;
  const Matrix m = matrix(x, 1);
  if (present(residual)) {
    check.dtype("residual", residual, x.element_type()).size("residual", residual, m.rows, m.cols);
  }
  return check.size("row", row, m.rows, 1).size("column", column, m.cols, 1).size("y", *y, m.rows, m.cols);
}

}  // namespace te

TE_ATTRIBUTES(te::DropoutAttributes, TE_ATTRIBUTE(int64_t, threshold), TE_ATTRIBUTE(float, scale));

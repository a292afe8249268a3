// te_rope_rotate, te_rope_rotate_qkv: rotary position embedding (Su et al., 2021), and its inverse, which is its
// gradient too.
//
//   rope_rotate:     x[tokens.., H, D], frequencies f32[F], positions s32[tokens..] -> y as x
//   rope_rotate_qkv: x[tokens.., 3, H, D], ... -> y as x, with queries and keys turned: in the buffer of x, or with the
//                    values copied where XLA gives another, as it does for the slices of a loop
//
// Turns F pairs of features of each head by position * frequency, or back where `inverse`. `group` tells which:
// "consecutive" the pairs (2i, 2i + 1), "alternate" the pairs (i, i + F). Features from 2 F on pass unchanged. The
// angles are those of core/math.h, so the only roundings are those of cos, sin, the two products and y, in f32.
#pragma once

#include <string_view>

#include "core/check.h"
#include "core/math.h"

namespace te {

struct RopeAttributes {
  std::string_view group;
  bool inverse;
};

struct RopeShape {
  int64_t tokens, heads, turned, features, pairs;  // the first `turned` of a token's heads
};

// The shape means something only where the check did not fail. parts: 3 of queries, keys and values, else 1.
inline RopeShape check_rope_rotate(Check& check, const In& x, const In& frequencies, const In& positions, Out& y,
                                   std::string_view group, int64_t parts) {
  const int64_t axes = parts == 1 ? 2 : 3;
  check.that(group == "consecutive" || group == "alternate", "group", "consecutive or alternate", group);
  check.high_precision("x", x).axes("x", x, axes).dtype("frequencies", frequencies, DType::F32);
  check.dtype("positions", positions, DType::S32).dtype("y", *y, x.element_type());
  if (check.failed()) return {};
  const Matrix m = matrix(x, axes);
  const int64_t features = matrix(x, 1).cols, pairs = static_cast<int64_t>(frequencies.element_count());
  const int64_t heads = features ? m.cols / features : 0;
  check.that(
      2 * pairs <= features, "frequencies", [&] { return "at most " + std::to_string(features / 2) + " elements"; },
      frequencies);
  check.size("positions", positions, m.rows, 1).size("y", *y, m.rows, m.cols);
  if (parts > 1) {
    const auto dims = x.dimensions();
    check.that(dims[dims.size() - 3] == parts, "x", "[tokens.., 3, H, D]", x);
  }
  return {m.rows, heads, parts == 1 ? heads : heads / parts * 2, features, pairs};
}

}  // namespace te

TE_ATTRIBUTES(te::RopeAttributes, TE_ATTRIBUTE(std::string_view, group), TE_ATTRIBUTE(bool, inverse));

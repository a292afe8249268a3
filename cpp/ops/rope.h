// te_rope_rotate: rotary position embedding (Su et al., 2021), and its inverse, which is its gradient too.
//
//   rope_rotate: x[tokens.., H, D], frequencies f32[F], positions s32[tokens..] -> y as x
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
  int64_t tokens, heads, features, pairs;
};

// The shape means something only where the check did not fail.
inline RopeShape check_rope_rotate(Check& check, const In& x, const In& frequencies, const In& positions, Out& y,
                                   std::string_view group) {
  check.that(group == "consecutive" || group == "alternate", "group", "consecutive or alternate", group);
  check.high_precision("x", x).axes("x", x, 2).dtype("frequencies", frequencies, DType::F32);
  check.dtype("positions", positions, DType::S32).dtype("y", *y, x.element_type());
  if (check.failed()) return {};
  const Matrix m = matrix(x, 2);
  const int64_t features = matrix(x, 1).cols, pairs = static_cast<int64_t>(frequencies.element_count());
  check.that(
      2 * pairs <= features, "frequencies", [&] { return "at most " + std::to_string(features / 2) + " elements"; },
      frequencies);
  check.size("positions", positions, m.rows, 1).size("y", *y, m.rows, m.cols);
  return {m.rows, features ? m.cols / features : 0, features, pairs};
}

}  // namespace te

TE_ATTRIBUTES(te::RopeAttributes, TE_ATTRIBUTE(std::string_view, group), TE_ATTRIBUTE(bool, inverse));

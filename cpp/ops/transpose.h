// te_transpose: y[k.., m..] = x[m.., k..] of FP8 codes.
#pragma once

#include <cstdint>

namespace te {

struct TransposeAttributes {
  int64_t k_axes;  // how many of x's last axes are the columns
};

}  // namespace te

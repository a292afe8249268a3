// te_after: x as it is, in its buffer, once `other` is there; see transformer_engine_jax/ops/after.py. Both have any
// shape and dtype, and no byte of them is read.
#pragma once

#include "core/check.h"

namespace te {

inline Check check_after(const In& x, Out& y) {
  Check check("te_after");
  return check.that(y->untyped_data() == x.untyped_data() && y->size_bytes() == x.size_bytes(), "y", "the buffer of x",
                    *y);
}

}  // namespace te

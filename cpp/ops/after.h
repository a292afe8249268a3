// te_after: x as it is, in its buffer, once `other` is there; see transformer_engine_jax/ops/after.py. Both have any
// shape and dtype, and no byte of them is read, unless XLA gives y another buffer: where x is a slice, which XLA has
// the call read where it lies, and then forgets its alias. There x is copied.
#pragma once

#include "core/check.h"

namespace te {

inline Check check_after(const In& x, Out& y) {
  Check check("te_after");
  return check.that(y->size_bytes() == x.size_bytes(), "y", "the size of x", *y);
}

inline bool in_place(const In& x, Out& y) { return y->untyped_data() == x.untyped_data(); }

}  // namespace te

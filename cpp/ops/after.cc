// te_after on the CPU: nothing to do.
#include "ops/after.h"

namespace te {

ffi::Error After(In x, In, Out y) {
  const Check check = check_after(x, y);
  return check.failed() ? check.error() : ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(after, After)

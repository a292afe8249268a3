// An FP8 product of our own for Hopper: long sums with split accumulation, into f32 or bf16, as a kernel's gradient is.
#pragma once

#include "core/cublaslt.h"

namespace te {

// Whether it is built, and computes products like this one on the current device.
bool has_fp8_product(const CublasLtProduct& p);

// Issues d = a b^T * a_scale_inv * b_scale_inv, or d += ... where c is d.
cudaError_t fp8_product(const CublasLtProduct& p, cudaStream_t stream);

}  // namespace te

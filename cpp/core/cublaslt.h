// Matrix products of cuBLASLt, from the library that JAX's CUDA plugin brings: found at run time, so that the
// module needs no version of it in particular. Handles and plans are made once and kept.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/ffi.h"

namespace te {

// Scratch that every product may use: what cuBLASLt's algorithms ask for at most on Hopper.
constexpr int64_t kCublasLtScratch = int64_t{32} << 20;

// d[m, n] = a[m, k] b[n, k]^T (+ bias[n]) (+ c_scale * c[m, n]), all row-major and dense, but for an operand that lies
// as [k, m] or [k, n]: not of FP8, where Hopper has no such product. An absent pointer is null.
struct CublasLtProduct {
  int64_t m, n, k;
  DType a_dtype, b_dtype, c_dtype, d_dtype;  // c_dtype counts where c is absent too: it decides the kernel
  DType bias_dtype;
  bool split_accumulator;  // FP8 only
  bool a_k_first, b_k_first;

  float c_scale;  // nothing to the choice of an algorithm

  const void *a, *b, *c, *bias;
  const void *a_scale_inv, *b_scale_inv;  // f32[], FP8 operands only
  const void* d_scale;                    // f32[], FP8 result only
  void *d, *amax;                         // amax f32[], FP8 result only
};

// Chooses and keeps an algorithm for products like this one, whose pointers are not followed: multiply() finds it.
ffi::Error prepare(const CublasLtProduct& product);

// Runs it. `scratch` is kCublasLtScratch bytes, aligned to 256.
ffi::Error multiply(const CublasLtProduct& product, void* scratch, cudaStream_t stream);

// "m=512 n=64 k=256 f8_e4m3fn x f8_e5m2 -> f32, split accumulation: cuBLASLt's algorithm 3: 0.02 ms, 0.03 by the first
// of 8 offered" of a product that prepare() or multiply() saw, on the current device; "" of another.
std::string algorithm_of(const CublasLtProduct& product);

// "cuBLASLt 13.1.0, algorithms: the fastest measured, kept in FOLDER", or why there is none.
std::string cublaslt_version();

}  // namespace te

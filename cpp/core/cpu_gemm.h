// The inner kernels of matrix products on the CPU, one for each instruction set, behind one description.
//
// All of them multiply packed panels of 32-bit units, a unit being one f32, or two neighbours along k in
// bf16. A panel of `a` is mr rows of `units`; a panel of `b` is `units` rows of nr. Both are padded with
// zeros, so a kernel knows no edges.
#pragma once

#include <cstdint>
#include <string>

namespace te {

struct CpuGemmKernel {
  const char* name;
  int64_t mr, nr;      // the output tile that stays in registers
  int64_t k_per_unit;  // 1: f32, 2: bf16
  int64_t unit_step;   // units are padded to a multiple of it

  // acc[panels * mr, nr] (+)= a[panels, mr, units] * b[units, nr], acc with row stride ld; `fresh` overwrites.
  // Successive panels of a are a_stride units apart.
  void (*multiply)(const uint32_t* a, int64_t a_stride, int64_t panels, const uint32_t* b, int64_t units, float* acc,
                   int64_t ld, bool fresh);

  // out[units, nr] <- rows[nr, units], all of row stride `stride`.
  void (*transpose)(const uint32_t* rows, int64_t stride, int64_t units, uint32_t* out);
};

// The kernels of this processor. TE_CPU_ISA=portable|avx2|avx512|amx lowers the level (read once).
struct CpuGemmKernels {
  const CpuGemmKernel* f32;   // products of f32, f16
  const CpuGemmKernel* bf16;  // products of values that bf16 holds: bf16, FP8. May be the f32 kernel.
  std::string error;          // what is wrong with TE_CPU_ISA
};
const CpuGemmKernels& cpu_gemm_kernels();

}  // namespace te

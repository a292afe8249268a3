#include <cuda_runtime_api.h>

#include "core/cublaslt.h"
#include "core/cuda.h"

namespace te {
namespace {

std::string dotted(int version) {  // CUDA's 1000 * major + 10 * minor
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

std::string cuda_versions() {
  constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
  std::string text = "CUDA runtime " + dotted(CUDART_VERSION) + ", compiled for ";
  for (const int& architecture : kArchitectures) {
    text += (&architecture == kArchitectures ? "" : ", ") + std::to_string(architecture / 10);
#ifdef TE_HOPPER
    if (architecture == 900) text += "a";
#endif
  }
  int driver = 0;
  const bool known = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  return text + (known ? "; driver supports CUDA " + dotted(driver) : "; no driver found") + "; " + cublaslt_version();
}

}  // namespace te

// cuBLASLt, found at run time: the functions that are used of it, and what they fail with.
#pragma once

#include <cublasLt.h>

#include <string>

#include "core/ffi.h"

namespace te::lt {

struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) status_text;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) create_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatmulDescDestroy) destroy_product;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  std::string error;
};

const Library& library();  // loaded when first asked for; `error` says why there is none

// The first failure among calls that build on each other.
class Status {
 public:
  explicit Status(const Library& lt) : lt_(lt) {}
  bool ok(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS && text_.empty()) {
      text_ = std::string("te_gemm: cuBLASLt: ") + what + ": " + lt_.status_text(status);
    }
    return text_.empty();
  }
  bool ok(cudaError_t status, const char* what) {
    if (status != cudaSuccess && text_.empty()) {
      text_ = std::string("te_gemm: CUDA: ") + what + ": " + cudaGetErrorString(status);
    }
    return text_.empty();
  }
  bool ok() const { return text_.empty(); }
  ffi::Error error() const { return ffi::Error::Internal(text_); }

 private:
  const Library& lt_;
  std::string text_;
};

}  // namespace te::lt

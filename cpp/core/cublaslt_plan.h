// A product as cuBLASLt knows it: made by cublaslt.cu, timed by cublaslt_timing.cu.
#pragma once

#include <mutex>
#include <string>

#include "core/check.h"
#include "core/cublaslt.h"
#include "core/cublaslt_library.h"

namespace te::lt {

// A product ready to run but for its pointers. Kept for the life of the process.
struct Plan {
  std::mutex mutex;    // while it is made; and the description holds the pointers of the call that is being issued
  bool ready = false;  // made without an error
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};

  bool sets_memory = false;  // before its kernel
  bool ours = false;         // where it can, our kernel runs instead, see fp8_product.h
  std::string chosen;        // what runs, and why

  // What is there of one that failed, which the next call makes anew.
  void clear() {
    if (product) library().destroy_product(product);
    for (cublasLtMatrixLayout_t* layout : {&a, &b, &c, &d}) {
      if (*layout) library().destroy_layout(*layout);
      *layout = nullptr;
    }
    product = nullptr;
  }
};

bool set_pointers(Status& status, cublasLtMatmulDesc_t product, const CublasLtProduct& p);

// Issues a product whose pointers are set by one of the algorithms offered for it.
cublasStatus_t run(cublasLtHandle_t handle, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                   const CublasLtProduct& p, void* scratch, cudaStream_t stream);

// The fastest of the algorithms offered, the first unless another is clearly faster; index -1 where nothing could be
// measured. ours: our kernel is faster than that, in our_ms.
struct Fastest {
  int index;
  float ms, first_ms;
  bool ours = false;
  float our_ms = 0.f;
};
Fastest fastest(Status& status, cublasLtHandle_t handle, const Plan& plan, const CublasLtProduct& p,
                const cublasLtMatmulHeuristicResult_t* offered, int count);

}  // namespace te::lt

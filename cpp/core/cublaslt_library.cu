#include <type_traits>

#include "core/cublaslt_library.h"
#include "core/libraries.h"

namespace te::lt {
namespace {

Library load() {
  Library lt = {};
  void* library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"},
                               {"nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"});
  if (!library) {
    lt.error =
        "te_gemm: cuBLASLt (libcublasLt.so.13 or .12) was not found; install JAX with its CUDA libraries, "
        "`pip install 'jax[cuda13]'`, or put the CUDA toolkit's libraries on LD_LIBRARY_PATH";
    return lt;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) lt.error = std::string("te_gemm: the cuBLASLt library that was found lacks ") + name;
  };
  find(lt.create, "cublasLtCreate");
  find(lt.version, "cublasLtGetVersion");
  find(lt.status_text, "cublasLtGetStatusString");
  find(lt.matmul, "cublasLtMatmul");
  find(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(lt.create_product, "cublasLtMatmulDescCreate");
  find(lt.set_product, "cublasLtMatmulDescSetAttribute");
  find(lt.destroy_product, "cublasLtMatmulDescDestroy");
  find(lt.create_layout, "cublasLtMatrixLayoutCreate");
  find(lt.destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(lt.create_preference, "cublasLtMatmulPreferenceCreate");
  find(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(lt.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  return lt;
}

}  // namespace

const Library& library() {
  static const Library& loaded = *new Library(load());
  return loaded;
}

}  // namespace te::lt

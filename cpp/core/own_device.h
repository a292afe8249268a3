// The GPU that XLA runs on, while a program is compiled: XLA makes none current then, and CUDA's first may be another
// process's.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace te {

// Whether this process has a context on a device. CUDA's runtime can't tell without making one.
inline bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);
  static const auto get_state = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return driver ? reinterpret_cast<GetState>(dlsym(driver, "cuDevicePrimaryCtxGetState")) : nullptr;
  }();
  unsigned flags = 0;
  int active = 0;
  return get_state && get_state(device, &flags, &active) == 0 && active;
}

// Makes a device of this process current, where none is; false where it has none, and compiles for another's.
inline bool use_own_device() {
  int current = 0, count = 0;
  if (cudaGetDevice(&current) != cudaSuccess || cudaGetDeviceCount(&count) != cudaSuccess) return false;
  if (has_context(current)) return true;
  for (int device = 0; device < count; ++device) {
    if (has_context(device)) return cudaSetDevice(device) == cudaSuccess;
  }
  return false;
}

}  // namespace te

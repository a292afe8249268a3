// The GPU that XLA runs on, made current while a program is compiled: XLA makes none current then, and CUDA's first may
// be another process's.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace te {

class OwnDevice {
 public:
  OwnDevice() {
    int count = 0;
    if (cudaGetDevice(&before_) != cudaSuccess || cudaGetDeviceCount(&count) != cudaSuccess) return;
    found_ = in_use(before_);
    for (int i = 0; i < count && !found_; ++i) found_ = in_use(i) && cudaSetDevice(i) == cudaSuccess;
  }
  ~OwnDevice() {
    if (found_) cudaSetDevice(before_);
  }
  OwnDevice(const OwnDevice&) = delete;

  // False where this process runs on no GPU: it compiles for another.
  bool found() const { return found_; }

 private:
  // Whether the process has a context on the device. CUDA's runtime can't tell without making one.
  static bool in_use(int device) {
    using GetState = int (*)(int device, unsigned* flags, int* active);
    static const auto get_state = [] {
      void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
      return driver ? reinterpret_cast<GetState>(dlsym(driver, "cuDevicePrimaryCtxGetState")) : nullptr;
    }();
    unsigned flags = 0;
    int active = 0;
    return get_state && get_state(device, &flags, &active) == 0 && active;
  }

  int before_ = 0;
  bool found_ = false;
};

}  // namespace te

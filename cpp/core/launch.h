// What the CUDA handlers need on the host: devices, and launches of kernels.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <string>

#include "core/check.h"

// Returns the error of a CUDA call from a handler.
#define TE_CUDA_CHECK(...)                                                                                \
  do {                                                                                                    \
    if (const cudaError_t te_error = (__VA_ARGS__); te_error != cudaSuccess) {                            \
      return ::te::ffi::Error::Internal(std::string(#__VA_ARGS__) + ": " + cudaGetErrorString(te_error)); \
    }                                                                                                     \
  } while (0)

namespace te {

constexpr int kStaticSharedMemory = 1 << 10;  // bytes, the most that a kernel has whose launch asks for dynamic ones

struct Device {
  int id = 0;  // below kDevices
  int multiprocessors = 0;
  int shared_memory = 0;  // dynamic, bytes that a launch may ask for
  int architecture = 0;   // 90 for compute capability 9.0
};

constexpr int kDevices = 64;

// Read once a device: a handler may run while a graph is captured, hundreds of times a step.
inline const Device& current_device() {
  static Device devices[kDevices];
  static std::once_flag known[kDevices];
  int id = 0;
  cudaGetDevice(&id);
  id = id < kDevices ? id : 0;
  std::call_once(known[id], [id] {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&devices[id].multiprocessors, cudaDevAttrMultiProcessorCount, id);
    cudaDeviceGetAttribute(&devices[id].shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
    devices[id].shared_memory -= kStaticSharedMemory;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id);
    devices[id].architecture = 10 * major + minor;
    devices[id].id = id;
  });
  return devices[id];
}

struct Launch {
  int64_t blocks;
  int threads;
  int shared_memory = 0;  // dynamic, bytes
  int cluster = 1;        // blocks that run together and share their memory
};

// A launch as the driver wants it. Not to be copied.
struct LaunchConfig : cudaLaunchConfig_t {
  cudaLaunchAttribute attribute = {};

  LaunchConfig(const Launch& l, cudaStream_t launch_stream) : cudaLaunchConfig_t{} {
    gridDim = dim3(static_cast<unsigned>(l.blocks));
    blockDim = dim3(static_cast<unsigned>(l.threads));
    dynamicSmemBytes = l.shared_memory;
    stream = launch_stream;
    if (l.cluster == 1) return;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(l.cluster), 1, 1};
    attrs = &attribute;
    numAttrs = 1;
  }
};

template <typename... Parameters>
cudaError_t allow(const Launch& l, void (*kernel)(Parameters...)) {
  cudaError_t error = cudaSuccess;
  // 48 KiB are there unasked, the static ones included. Asked for is all, not what this launch needs: another thread
  // may be about to launch the kernel with more.
  if (l.shared_memory > (48 << 10) - kStaticSharedMemory) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, current_device().shared_memory);
  }
  if (error == cudaSuccess && l.cluster > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  return error;
}

// Does nothing for a grid of no blocks, which an empty operand gives.
template <typename... Parameters, typename... Arguments>
cudaError_t launch(const Launch& l, cudaStream_t stream, void (*kernel)(Parameters...), const Arguments&... arguments) {
  if (l.blocks == 0) return cudaSuccess;
  if (l.blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (const cudaError_t error = allow(l, kernel); error != cudaSuccess) return error;
  const LaunchConfig config(l, stream);
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// How many clusters of a launch the device runs at once.
template <typename... Parameters>
cudaError_t resident_clusters(const Launch& l, void (*kernel)(Parameters...), int* count) {
  if (const cudaError_t error = allow(l, kernel); error != cudaSuccess) return error;
  if (l.cluster == 1) {
    const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(count, kernel, l.threads, l.shared_memory);
    *count *= current_device().multiprocessors;
    return error;
  }
  const LaunchConfig config(l, nullptr);
  return cudaOccupancyMaxActiveClusters(count, kernel, &config);
}

// May every address `base + 8 * i` elements be accessed 16 bytes at a time? Absent buffers don't object.
inline bool aligned(const void* base) { return reinterpret_cast<uintptr_t>(base) % 16 == 0; }

inline Check& check_workspace(Check& check, Out& workspace, int64_t bytes) {
  return check.that(
      static_cast<int64_t>(workspace->size_bytes()) >= bytes, "workspace",
      [&] { return "at least " + std::to_string(bytes) + " bytes"; }, *workspace);
}

}  // namespace te

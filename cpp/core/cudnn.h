// cuDNN's graphs by its frontend: each is made once, when a program is compiled, and kept. Only the host's compiler is
// needed.
#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

#include "core/ffi.h"

namespace te::cudnn {

namespace fe = ::cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
using Pointers = std::unordered_map<int64_t, void*>;  // by the uid of a graph's tensor

// One graph: what tells it from all others, the kind of operation first, and how it is made.
struct Call {
  const char* op;
  std::vector<int64_t> key;
  std::function<void(fe::graph::Graph&)> build;
};

struct Workspace {
  void* data;
  int64_t bytes;
};

inline Workspace workspace_of(Out& buffer) {
  return {buffer->untyped_data(), static_cast<int64_t>(buffer->size_bytes())};
}

// Before any CUDA graph is captured: cuDNN's handle, its graph of this call, and the graph's kernels.
ffi::Error prepare(const Call& call, Workspace workspace);

// Runs what was prepared.
ffi::Error execute(const Call& call, Pointers pointers, Workspace workspace, cudaStream_t stream);

}  // namespace te::cudnn

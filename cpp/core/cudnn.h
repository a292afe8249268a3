// cuDNN's graphs by its frontend: each is made once, when a program is compiled, and kept. Only the host's compiler is
// needed. Who builds a graph includes core/cudnn_frontend.h, which takes a compiler many seconds; who runs one does
// not.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <unordered_map>
#include <vector>

#include "core/ffi.h"

namespace cudnn_frontend::graph {
class Graph;
}

namespace te::cudnn {

using Pointers = std::unordered_map<int64_t, void*>;  // by the uid of a graph's tensor

// One graph: what tells it from all others, the kind of operation first, and how it is made.
struct Call {
  const char* op;
  std::vector<int64_t> key;
  std::function<void(cudnn_frontend::graph::Graph&)> build;
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

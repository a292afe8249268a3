#include <vector>

#include "core/cuda_graph.h"

namespace te {
namespace {

constexpr int kThreads = 128;
constexpr size_t kMostBytes = 16 << 10;  // for one block; a larger memset stays what it is

using Nodes = std::vector<cudaGraphNode_t>;

__global__ void __launch_bounds__(kThreads) set_memory(unsigned char* to, unsigned value, int element, int bytes) {
  for (int i = threadIdx.x; i < bytes; i += kThreads) to[i] = static_cast<unsigned char>(value >> i % element * 8);
}

// CUDA 13 gave these functions a parameter for the kinds of edges; all here are plain ones.
#if CUDART_VERSION >= 13000
#define TE_PLAIN_EDGES nullptr,
#else
#define TE_PLAIN_EDGES
#define cudaStreamGetCaptureInfo cudaStreamGetCaptureInfo_v2
#endif

#define TE_TRY(call) \
  if (const cudaError_t error = (call); error != cudaSuccess) return error

// The nodes that `list` gives.
template <typename List>
cudaError_t nodes_of(List list, Nodes& nodes) {
  size_t count = 0;
  TE_TRY(list(nullptr, &count));
  nodes.resize(count);
  return count ? list(nodes.data(), &count) : cudaSuccess;
}

// A graph of its own, captured from a stream that nobody else captures.
class Captured {
 public:
  ~Captured() {
    if (graph) cudaGraphDestroy(graph);
  }
  cudaError_t capture(const Issue& issue) {
    TE_TRY(cudaStreamBeginCapture(cudaStreamPerThread, cudaStreamCaptureModeRelaxed));
    const auto issued = [&] {
      try {
        return issue(cudaStreamPerThread);
      } catch (...) {  // the thread's stream must not stay in capture
        cudaStreamEndCapture(cudaStreamPerThread, &graph);
        throw;
      }
    };
    const bool worked = issued();
    TE_TRY(cudaStreamEndCapture(cudaStreamPerThread, &graph));
    return worked ? cudaSuccess : cudaErrorStreamCaptureInvalidated;
  }
  // The memset nodes that may become kernels.
  cudaError_t memsets(Nodes& found) const {
    Nodes all;
    TE_TRY(
        nodes_of([&](cudaGraphNode_t* nodes, size_t* count) { return cudaGraphGetNodes(graph, nodes, count); }, all));
    for (const cudaGraphNode_t node : all) {
      cudaGraphNodeType type;
      TE_TRY(cudaGraphNodeGetType(node, &type));
      if (type != cudaGraphNodeTypeMemset) continue;
      cudaMemsetParams p;
      TE_TRY(cudaGraphMemsetNodeGetParams(node, &p));
      if (p.height == 1 && p.width * p.elementSize <= kMostBytes) found.push_back(node);
    }
    return cudaSuccess;
  }
  cudaError_t to_kernel(cudaGraphNode_t memset) const {
    cudaMemsetParams p;
    Nodes earlier, later;
    TE_TRY(cudaGraphMemsetNodeGetParams(memset, &p));
    TE_TRY(nodes_of([&](cudaGraphNode_t* nodes,
                        size_t* count) { return cudaGraphNodeGetDependencies(memset, nodes, TE_PLAIN_EDGES count); },
                    earlier));
    TE_TRY(nodes_of([&](cudaGraphNode_t* nodes,
                        size_t* count) { return cudaGraphNodeGetDependentNodes(memset, nodes, TE_PLAIN_EDGES count); },
                    later));
    int element = static_cast<int>(p.elementSize), bytes = element * static_cast<int>(p.width);
    void* arguments[] = {&p.dst, &p.value, &element, &bytes};
    cudaKernelNodeParams kernel = {};
    kernel.func = reinterpret_cast<void*>(&set_memory);
    kernel.gridDim = dim3(1), kernel.blockDim = dim3(kThreads);
    kernel.kernelParams = arguments;
    cudaGraphNode_t added;
    TE_TRY(cudaGraphAddKernelNode(&added, graph, earlier.data(), earlier.size(), &kernel));
    for (const cudaGraphNode_t node : later) TE_TRY(cudaGraphAddDependencies(graph, &added, &node, TE_PLAIN_EDGES 1));
    return cudaGraphDestroyNode(memset);
  }

  cudaGraph_t graph = nullptr;
};

}  // namespace

cudaError_t sets_memory(const Issue& issue, bool* answer) {
  Captured part;
  Nodes memsets;
  TE_TRY(part.capture(issue));
  TE_TRY(part.memsets(memsets));
  *answer = !memsets.empty();
  return cudaSuccess;
}

cudaError_t issue_as_kernels(cudaStream_t stream, const Issue& issue) {
  cudaStreamCaptureStatus status;
  TE_TRY(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusActive) return issue(stream) ? cudaSuccess : cudaErrorUnknown;
  Captured part;
  Nodes memsets;
  TE_TRY(part.capture(issue));
  TE_TRY(part.memsets(memsets));
  for (const cudaGraphNode_t node : memsets) TE_TRY(part.to_kernel(node));
  cudaGraph_t whole;
  const cudaGraphNode_t* earlier;
  size_t count;
  cudaGraphNode_t added;
  TE_TRY(cudaStreamGetCaptureInfo(stream, &status, nullptr, &whole, &earlier, TE_PLAIN_EDGES & count));
  TE_TRY(cudaGraphAddChildGraphNode(&added, whole, earlier, count, part.graph));
  return cudaStreamUpdateCaptureDependencies(stream, &added, TE_PLAIN_EDGES 1, cudaStreamSetCaptureDependencies);
}

}  // namespace te

// Work that a library issues, in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

namespace te {

// Puts work on a stream; false where it failed.
using Issue = std::function<bool(cudaStream_t)>;

// Does this work set a few bytes of memory before its kernels? It is captured and thrown away.
cudaError_t sets_memory(const Issue& issue, bool* answer);

// Issues such work. Where the stream is being captured, its memset nodes become kernels: a graph waits 5 to 8 us for a
// memset and what comes after it, and less than 2 us for a kernel.
cudaError_t issue_as_kernels(cudaStream_t stream, const Issue& issue);

}  // namespace te

#include "core/cuda.cuh"
#include "ops/packed_rows.h"

namespace te {
namespace {

constexpr int kThreads = 128;

struct All {
  PackedRows arrays[3];
};

__global__ void __launch_bounds__(kThreads) offsets(int64_t rows, int64_t most, All all) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > rows * most) return;
  for (const PackedRows& x : all.arrays) {
    const int64_t start = i < rows * most ? max(x.start[i], 0) : 0;  // past the last row: where its successor began
    x.offset[i] = (i / most * x.tokens + start) * x.token;
  }
}

constexpr int kTokens = 64;  // of a row, to a block

struct Between {
  const int32_t *start, *length;
  const bool* kept;
  int64_t most, tokens, chunks, token_bytes;
  char* x;
};

constexpr uint16_t kNan = 0x7fff;  // in bf16 and f16, and twice in f32

template <typename Unit>
__global__ void __launch_bounds__(kThreads) write(Between a) {
  __shared__ bool covered[kTokens];
  const int64_t row = blockIdx.x / a.chunks;
  const int begin = static_cast<int>(blockIdx.x % a.chunks * kTokens);
  const int size = static_cast<int>(min(static_cast<int64_t>(kTokens), a.tokens - begin));
  if (threadIdx.x < kTokens) covered[threadIdx.x] = false;
  __syncthreads();
  for (int64_t n = threadIdx.x; n < a.most; n += kThreads) {
    const int start = a.start[row * a.most + n];
    if (start < 0) continue;
    const int64_t end =
        min(static_cast<int64_t>(start) + a.length[row * a.most + n] - begin, static_cast<int64_t>(size));
    for (int64_t i = max(start - begin, 0); i < end; ++i) covered[i] = true;
  }
  __syncthreads();
  Unit fill{};
  if (a.kept && !a.kept[row]) {
    for (size_t i = 0; i < sizeof(Unit) / sizeof(kNan); ++i) reinterpret_cast<uint16_t*>(&fill)[i] = kNan;
  }
  const int64_t units = a.token_bytes / static_cast<int64_t>(sizeof(Unit));
  for (int i = static_cast<int>(threadIdx.x) / 32; i < size; i += kThreads / 32) {
    if (covered[i]) continue;
    Unit* token = reinterpret_cast<Unit*>(a.x + (row * a.tokens + begin + i) * a.token_bytes);
    for (int64_t u = threadIdx.x % 32; u < units; u += 32) token[u] = fill;
  }
}

}  // namespace

cudaError_t write_between(cudaStream_t stream, int64_t rows, int64_t most, const int32_t* start, const int32_t* length,
                          const bool* kept, int64_t tokens, int64_t token_bytes, void* x) {
  const int64_t chunks = ceil_div(tokens, kTokens);
  const Between a{start, length, kept, most, tokens, chunks, token_bytes, static_cast<char*>(x)};
  const Launch blocks{rows * chunks, kThreads};
  const bool vector = aligned(x) && token_bytes % 16 == 0;
  return vector ? launch(blocks, stream, write<uint4>, a) : launch(blocks, stream, write<uint16_t>, a);
}

cudaError_t write_offsets(cudaStream_t stream, int64_t rows, int64_t most, PackedRows a, PackedRows b, PackedRows c) {
  return launch({ceil_div(rows * most + 1, kThreads), kThreads}, stream, offsets, rows, most, All{{a, b, c}});
}

}  // namespace te

// te_transpose: x[rows, cols] -> y[cols, rows], both of the same FP8 dtype. 2 bytes a value, a tile a block.
#include "core/check.h"
#include "core/tile.cuh"
#include "ops/transpose.h"

namespace te {
namespace {

constexpr int kTransposeBlocks = 6;  // on a multiprocessor

// 16 columns of a row, of which n are there; `vector`: all of them, at an aligned address.
__device__ __forceinline__ uint4 load16(const uint8_t* x, int64_t n, bool vector) {
  if (vector) return __ldg(reinterpret_cast<const uint4*>(x));
  uint32_t words[4] = {};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j < n) words[j / 4] |= static_cast<uint32_t>(x[j]) << (j % 4 * 8);
  }
  return {words[0], words[1], words[2], words[3]};
}

// A thread turns 4 rows x 16 columns. Of 4 rows those beyond the last repeat it, and are not stored.
__global__ void __launch_bounds__(kTileThreads, kTransposeBlocks) transpose_tiles(const uint8_t* x, const Result out) {
  __shared__ __align__(16) TransposedTile<kTileSide, kTileSide> tile;
  const TilePlace place(out, gridDim.x - 1 - blockIdx.x);
  const int64_t row0 = place.row * kTileSide, col0 = place.col * kTileSide;
  const unsigned tx = threadIdx.x % 8, ty = threadIdx.x / 8;
  const int64_t row = row0 + ty * 4, col = col0 + tx * 16;
  if (row < out.rows && col < out.cols) {
    uint4 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw[i] = load16(x + min(row + i, out.rows - 1) * out.cols + col, out.cols - col, out.vector);
    }
    const uint32_t left[2][4] = {{raw[0].x, raw[1].x, raw[2].x, raw[3].x}, {raw[0].y, raw[1].y, raw[2].y, raw[3].y}};
    const uint32_t right[2][4] = {{raw[0].z, raw[1].z, raw[2].z, raw[3].z}, {raw[0].w, raw[1].w, raw[2].w, raw[3].w}};
    tile.put_transposed(tx * 16, ty, left);
    tile.put_transposed(tx * 16 + 8, ty, right);
  }
  __syncthreads();
  tile.store<kTileThreads>(out.y_t, col0, row0, out.cols, out.rows, out.vector_t);
}

}  // namespace

ffi::Error Transpose(cudaStream_t stream, In x, Out y, TransposeAttributes attributes) {
  Check check("te_transpose");
  check.fp8("x", x).axes("x", x, attributes.k_axes);
  if (check.failed()) return check.error();
  const Matrix m = matrix(x, attributes.k_axes);
  check.dtype("y", *y, m.dtype).size("y", *y, m.cols, m.rows);
  if (check.failed()) return check.error();
  Result out;
  out.y_t = static_cast<uint8_t*>(y->untyped_data());
  out.rows = m.rows;
  out.cols = m.cols;
  out.vector = aligned(m.data) && m.cols % 16 == 0;
  out.vector_t = aligned(out.y_t) && m.rows % 16 == 0;
  const int64_t blocks = out.row_tiles() * ceil_div(out.cols, kTileSide);
  TE_CUDA_CHECK(launch({blocks, kTileThreads}, stream, transpose_tiles, m.as<uint8_t>(), out));
  return ffi::Error::Success();
}

}  // namespace te

TE_ATTRIBUTES(te::TransposeAttributes, TE_ATTRIBUTE(int64_t, k_axes));

TE_HANDLER(transpose, Transpose)

// The one CUDA kernel that stores a computed matrix with its FP8 cast, transposed copy, amax and column sums, each
// value crossing memory once: quantize, the activations and the norms differ in their Producer only.
//
// A block owns a tile of 128 x 128 values, a thread 2 x (4 rows x 8 columns). For a 16-bit operand a row of the tile
// is 256 bytes, read and written as whole 128-byte lines by 16 neighbouring threads of 16 bytes each. For the
// transposed copy, a thread turns its 4 x 4 byte blocks in registers, so that shared memory is written in words of 4
// rows and read 16 rows at a time; 8 threads then store a line of 128 rows.
//
// A multiprocessor issues 128 instructions (of a thread each) while memory gives it 17 bytes: 30 for a value of 4 bytes
// in and out. So what is known of the operands is known at compile time, and only the rest is left to AnyDtype.
#pragma once

#include "core/amax.cuh"
#include "core/cuda.cuh"
#include "core/result.h"

namespace te {

// Where results go, all optional, and how: result.h says what they mean.
struct Result {
  void* y = nullptr;          // [rows, outputs, cols]
  uint8_t* y_t = nullptr;     // [outputs, cols, rows]
  ScaleSource scale;          // its reciprocal is stored by the first block
  AmaxTarget amax;            // prepared before
  float* partials = nullptr;  // [ceil(rows / 128), outputs, cols], sums over the rows of a tile
  DType dtype = DType::F32;
  int64_t rows = 0;
  int64_t cols = 0;
  bool vector = false;    // 8 columns of every operand and of y can be accessed as 16-byte words
  bool vector_t = false;  // likewise 16 rows of y_t

  int64_t row_tiles() const { return ceil_div(rows, 128); }
};

// What y is. kFp8: either format, known at run time.
enum class Stored { kFloat, kE4M3, kE5M2, kFp8 };

template <Stored kStored>
__device__ __forceinline__ uint2 cast8_as(const float (&v)[8], float scale, DType dtype) {
  if constexpr (kStored == Stored::kE4M3) return cast8<__NV_E4M3>(v, scale);
  if constexpr (kStored == Stored::kE5M2) return cast8<__NV_E5M2>(v, scale);
  return cast8(v, scale, dtype);
}

// Casts, stores and measures 8 values of y, of which n are there, that begin at element `offset`. Returns their FP8
// bytes. `vector`: n is 8 and the address is aligned.
template <Stored kStored>
__device__ __forceinline__ uint2 store_result(const Result& out, int64_t offset, float scale, const float (&v)[8],
                                              int n, bool vector, float& most) {
  if constexpr (kStored != Stored::kFloat) {
    most = max_abs(most, v);
    const uint2 q = cast8_as<kStored>(v, scale, out.dtype);
    if (out.y) {
      uint8_t* y = static_cast<uint8_t*>(out.y) + offset;
      if (vector) {
        *reinterpret_cast<uint2*>(y) = q;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          if (j < n) y[j] = static_cast<uint8_t>((j < 4 ? q.x : q.y) >> (j % 4 * 8));
        }
      }
    }
    return q;
  }
  if (!out.y) {
    most = max_abs(most, v);
    return {0u, 0u};
  }
  const auto store = [&](auto* y) {  // amax of what is stored
    const auto raw = round8<std::remove_pointer_t<decltype(y)>>(v);
#pragma unroll
    for (int j = 0; j < 8; ++j) most = max_abs(most, raw[j]);
    store8(y + offset, raw, n, vector);
  };
  if (out.dtype == DType::BF16) {
    store(static_cast<bf16*>(out.y));
  } else if (out.dtype == DType::F16) {
    store(static_cast<f16*>(out.y));
  } else {
    store(static_cast<float*>(out.y));
  }
  return {0u, 0u};
}

// rows[i] holds 4 columns of row i; afterwards words[j] holds 4 rows of column j.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&rows)[4], uint32_t (&words)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  words[0] = __byte_perm(low01, low23, 0x5410);
  words[1] = __byte_perm(low01, low23, 0x7632);
  words[2] = __byte_perm(high01, high23, 0x5410);
  words[3] = __byte_perm(high01, high23, 0x7632);
}

// A tile's FP8 bytes by column, in words of 4 rows. A warp puts one word each for 16 or 32 groups of 8 columns:
// xor-ing the address of 16 bytes with the column's group spreads them over the banks, with 2 to 4 words for one.
template <int kRows, int kCols>
struct TransposedTile {
  static constexpr int kWords = kRows / 4;
  static constexpr int kSixteens = kRows / 16;
  static_assert(kRows % 32 == 0 && kCols % 8 == 0);
  uint32_t words[kCols * kWords];

  __device__ __forceinline__ static unsigned flip(unsigned col) { return col / 8 % 8 * 4; }
  // bytes[half][i]: columns col + 4 * half .. + 3 of row 4 * word + i. col is a multiple of 8.
  __device__ __forceinline__ void put_transposed(unsigned col, unsigned word, const uint32_t (&bytes)[2][4]) {
    // The bits that flip changes are those of the word and of the column's place among 32 / kWords.
    constexpr unsigned kTogether = kWords < 32 ? 32 / kWords : 1;
    uint32_t* const first = words + col * kWords;
    const unsigned flipped = word ^ flip(col);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t columns[4];
      transpose_bytes(bytes[half], columns);
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        const unsigned c = half * 4 + j;
        first[c / kTogether * kTogether * kWords + (flipped ^ c % kTogether * kWords)] = columns[j];
      }
    }
  }
  // Rows 16 s .. 16 s + 15 of a column.
  __device__ __forceinline__ uint4 get(unsigned col, unsigned s) const {
    return reinterpret_cast<const uint4*>(words)[(col * kSixteens + s) ^ flip(col) / 4];
  }
  // Stores the tile, whose first value is column col0, row row0 of y_t[cols, rows].
  template <unsigned kThreads>
  __device__ __forceinline__ void store(uint8_t* y_t, int64_t col0, int64_t row0, int64_t cols, int64_t rows,
                                        bool vector) const {
    constexpr unsigned kColsATurn = kThreads / kSixteens;
    static_assert(kThreads % kSixteens == 0 && kCols % kColsATurn == 0);
    const unsigned s = threadIdx.x % kSixteens, first = threadIdx.x / kSixteens;
    const int64_t row = row0 + s * 16;
    if (row >= rows) return;
    uint8_t* p = y_t + (col0 + first) * rows + row;
    const int cols_here = static_cast<int>(min(cols - col0, int64_t{kCols}));
#pragma unroll
    for (unsigned turn = 0; turn < kCols / kColsATurn; ++turn, p += kColsATurn * rows) {
      const unsigned col = first + turn * kColsATurn;
      if (static_cast<int>(col) >= cols_here) return;
      const uint4 q = get(col, s);
      if (vector) {
        *reinterpret_cast<uint4*>(p) = q;
      } else {
        store_some(p, q, rows - row);
      }
    }
  }

 private:
  // The first n of 16 bytes, to any address: as large words as it lets.
  __device__ __noinline__ static void store_some(uint8_t* p, uint4 q, int64_t n) {
    if (n >= 16 && reinterpret_cast<uintptr_t>(p) % 8 == 0) {
      reinterpret_cast<uint2*>(p)[0] = {q.x, q.y};
      reinterpret_cast<uint2*>(p)[1] = {q.z, q.w};
      return;
    }
    const uint32_t bytes[4] = {q.x, q.y, q.z, q.w};
    if (n >= 16 && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(p)[i] = bytes[i];
      return;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i < n) p[i] = static_cast<uint8_t>(bytes[i / 4] >> (i % 4 * 8));
    }
  }
};

// An operand of a Producer. AnyDtype: its dtype is known at run time only, and 8 of its values are in f32; every other
// type promises rows of whole, aligned groups of 8 in all operands and in y.
struct AnyDtype {};
template <typename T>
struct Operand {
  using Raw = Vec8<T>;
  const void* data;
  DType dtype;

  __device__ __forceinline__ Raw load(int64_t offset, int, bool) const {
    return load8(static_cast<const T*>(data) + offset);
  }
};
template <>
struct Operand<AnyDtype> {
  using Raw = Vec8<float>;
  const void* data;
  DType dtype;

  __device__ __forceinline__ Raw load(int64_t offset, int n, bool vector) const {
    float v[8];
    load8(data, dtype, offset, n, vector, v);
    return round8<float>(v);
  }
};

// A Producer of the operand type T gives kOutputs matrices of rows x cols side by side. `before` is the count of
// values before a row in one of them, row * cols; n of 8 columns from `col` on are there.
//   Columns columns(int64_t col, int n, bool vector)       what its values need of these columns
//   Raw load(int64_t row, int64_t before, int64_t col, int n, bool vector)   operands, as they are in memory
//   void values(Raw, Columns, float (&v)[kOutputs][8])
// kAtOnce: the groups of 4 rows, 1 or 2, that a thread loads at once. kBlocks: blocks on a multiprocessor. kSummed:
// sums over rows may be asked for. kFormats: the FP8 formats it has kernels for.
enum class Formats {
  kBoth,    // one for each
  kE4M3,    // that alone, as of a forward pass, of which hardly anybody's is in E5M2; AnyDtype has the other
  kEither,  // one for both, which looks each time; AnyDtype's always
};

constexpr int kTileSide = 128;
constexpr int kTileThreads = 256;

// Where a tile is. Bands of 8 rows of tiles, walked down before across: the blocks that run together then touch long
// stretches of x and of y_t, and DRAM pages stay open for both.
struct TilePlace {
  int64_t row, col;  // in tiles

  __device__ __forceinline__ TilePlace(const Result& out, unsigned tile) {
    constexpr unsigned kBand = 8;
    const unsigned col_tiles = static_cast<unsigned>((out.cols + kTileSide - 1) / kTileSide);
    const unsigned row_tiles = static_cast<unsigned>((out.rows + kTileSide - 1) / kTileSide);
    const unsigned band = tile / (kBand * col_tiles), in_band = tile - band * kBand * col_tiles;
    const unsigned height = min(kBand, row_tiles - band * kBand);
    const unsigned across = height == kBand ? in_band / kBand : in_band / height;
    row = band * kBand + in_band - across * height;
    col = across;
  }
};

// From the last tile to the first, see cuda.cuh.
template <typename Producer, Stored kStored>
__global__ void __launch_bounds__(kTileThreads, Producer::kBlocks) store_tiles(const Producer in, const Result out) {
  constexpr int kOutputs = Producer::kOutputs, kAtOnce = Producer::kAtOnce;
  constexpr bool kSummed = Producer::kSummed;
  constexpr bool kWhole = !std::is_same_v<typename Producer::Type, AnyDtype>;
  constexpr bool kFp8 = kStored != Stored::kFloat;
  __shared__ __align__(16) TransposedTile<kTileSide, kTileSide> transposed[kFp8 ? kOutputs : 1];
  __shared__ float warp_sums[kSummed ? kOutputs : 1][kTileThreads / 32][kSummed ? kTileSide : 1];
  __shared__ BlockAmax amax;

  const TilePlace place(out, gridDim.x - 1 - blockIdx.x);
  const int64_t row_tile = place.row, row0 = row_tile * kTileSide, col0 = place.col * kTileSide;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  const int64_t col = col0 + tx * 8;
  const bool vector = kWhole || out.vector;
  const int n = kWhole ? (col < out.cols ? 8 : 0) : static_cast<int>(min(int64_t{8}, out.cols - col));
  const int rows_here = n > 0 ? static_cast<int>(min(int64_t{kTileSide}, out.rows - row0)) : 0;  // for this thread
  const int64_t before_tile = row0 * out.cols;
  const uint32_t cols = static_cast<uint32_t>(out.cols);
  typename Producer::Columns columns;
  float scale = 0.f, most[2] = {};  // two, as one would be 64 operations that wait for each other
  float sums[kOutputs][8] = {};

  // ---- Values: row by row through the cast, their bytes turned into shared memory. Of 4 rows those beyond the last
  // ---- repeat it, which changes neither what is stored nor the amax; the result may be in the place of an operand, so
  // ---- no thread reads another's rows.
#pragma unroll 1
  for (int first = 0; first < 2; first += kAtOnce) {
    const auto place_of = [&](int s, int i) { return min((first + s) * 64 + ty * 4 + i, rows_here - 1); };
    const auto any_of = [&](int s) { return (first + s) * 64 + ty * 4 < rows_here; };
    const auto before = [&](int s, int i) { return before_tile + before_row(place_of(s, i), cols); };
    typename Producer::Raw raw[kAtOnce][4];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (!any_of(s)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[s][i] = in.load(row0 + place_of(s, i), before(s, i), col, n, vector);
    }
    if (!first) {  // while rows are on their way
      if (n > 0) columns = in.columns(col, n, vector);
      scale = out.scale.get();
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (!any_of(s)) continue;
      uint32_t bytes[kOutputs][2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[kOutputs][8];
        in.values(raw[s][i], columns, v);
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          if (!kWhole && n < 8) {
#pragma unroll
            for (int j = 0; j < 8; ++j) v[o][j] = j < n ? v[o][j] : 0.f;
          }
          if (kSummed && out.partials && (first + s) * 64 + ty * 4 + i < rows_here) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[o][j] += v[o][j];
          }
          const int64_t offset = kOutputs * before(s, i) + o * out.cols + col;
          const uint2 q = store_result<kStored>(out, offset, scale, v[o], n, vector, most[i % 2]);
          bytes[o][0][i] = q.x;
          bytes[o][1][i] = q.y;
        }
      }
      if (kFp8 && out.y_t) {
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) transposed[o].put_transposed(tx * 8, (first + s) * 16 + ty, bytes[o]);
      }
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) out.scale.store_inverse(scale);
  if (kSummed && out.partials) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float both = sums[o][j] + __shfl_xor_sync(0xffffffffu, sums[o][j], 16);
        if (threadIdx.x % 32 < 16) warp_sums[o][threadIdx.x / 32][tx * 8 + j] = both;
      }
    }
  }
  amax.note(max_abs(most[0], most[1]));
  __syncthreads();

  // ---- What needs the whole tile.
  amax.merge(out.amax);
  if (kFp8 && out.y_t) {
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
      transposed[o].template store<kTileThreads>(out.y_t + o * out.cols * out.rows, col0, row0, out.cols, out.rows,
                                                 out.vector_t);
    }
  }
  if (kSummed && out.partials) {
    for (int u = threadIdx.x; u < kOutputs * kTileSide; u += kTileThreads) {
      const int o = u / kTileSide, c = u % kTileSide;
      if (col0 + c >= out.cols) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < kTileThreads / 32; ++w) sum += warp_sums[o][w][c];
      out.partials[(row_tile * kOutputs + o) * out.cols + col0 + c] = sum;
    }
  }
}

static __global__ void store_inverse(const ScaleSource scale) { scale.store_inverse(scale.get()); }

// What a launch of so many blocks needs done before; without any, all that its first block would store.
inline cudaError_t prepare(cudaStream_t stream, int64_t blocks, Result* out) {
  if (const cudaError_t error = prepare_amax(stream, blocks, &out->amax); error != cudaSuccess) return error;
  return blocks || !out->scale.inverse ? cudaSuccess : launch({1, 1}, stream, store_inverse, out->scale);
}

// Bytes of Result::partials.
inline int64_t tile_partials(int64_t rows, int64_t cols) { return 4 * cols * ceil_div(rows, kTileSide); }

// Runs the producer over the result; `colsum` receives the sums over rows.
template <typename Producer>
ffi::Error launch_tiles(cudaStream_t stream, const Producer& in, Result out, float* colsum = nullptr,
                        void* workspace = nullptr) {
  if (out.cols >= int64_t{1} << 32)
    return ffi::Error::InvalidArgument("expected fewer than 2^32 columns; reshape them");
  out.partials = colsum ? static_cast<float*>(workspace) : nullptr;
  out.vector_t = aligned(out.y_t) && out.rows % 16 == 0;
  const int64_t blocks = out.row_tiles() * ceil_div(out.cols, kTileSide);
  TE_CUDA_CHECK(prepare(stream, blocks, &out));
  void (*kernel)(Producer, Result) = store_tiles<Producer, Stored::kFloat>;
  if constexpr (std::is_same_v<typename Producer::Type, AnyDtype> || Producer::kFormats == Formats::kEither) {
    if (is_fp8(out.dtype)) kernel = store_tiles<Producer, Stored::kFp8>;
  } else {
    if (out.dtype == DType::F8E4M3FN) kernel = store_tiles<Producer, Stored::kE4M3>;
    if constexpr (Producer::kFormats == Formats::kBoth) {
      if (out.dtype == DType::F8E5M2) kernel = store_tiles<Producer, Stored::kE5M2>;
    }
  }
  TE_CUDA_CHECK(launch({blocks, kTileThreads}, stream, kernel, in, out));
  TE_CUDA_CHECK(finish_amax(stream, out.amax));
  if (colsum) {
    TE_CUDA_CHECK(launch_sum_partials(stream, out.partials, out.row_tiles(), out.cols * Producer::kOutputs, colsum));
  }
  return ffi::Error::Success();
}

// The result of a handler; `otherwise` is its dtype where it is not stored.
inline Result fp8_or_float_result(Out& y, const Casting& casting, Out& y_t, int64_t rows, int64_t cols,
                                  DType otherwise = DType::F32) {
  Result out;
  out.y = data_or_null<void>(y);
  out.y_t = data_or_null<uint8_t>(y_t);
  out.dtype = stored_dtype(y, y_t, otherwise);
  out.scale = ScaleSource(casting, out.dtype);
  out.amax = AmaxTarget(casting.amax, casting.report);
  out.rows = rows;
  out.cols = cols;
  out.vector = cols % 8 == 0 && aligned(out.y);
  return out;
}

}  // namespace te

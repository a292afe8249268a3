// What several CPU handlers share: inner loops over a row, each compiled for several instruction sets, and
// the one loop that stores computed rows with their cast, amax, transposed copy and column sums.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "core/dtype.h"
#include "core/matrix.h"
#include "core/parallel.h"
#include "core/result.h"

// For loops whose result may be one of their operands: element i of it depends on element i only.
#if defined(__GNUC__) && !defined(__clang__)
#define TE_ELEMENTWISE _Pragma("GCC ivdep")
#else
#define TE_ELEMENTWISE
#endif

namespace te {

// Rows that one task of a parallel loop handles at most where sums over rows are taken. How many it does depends on the
// shape alone, so that a sum's order, hence its bits, do not depend on the number of threads.
constexpr int64_t kRowBlock = 256;
constexpr int64_t kTile = 64;

// ---- Inner loops

// The order of magnitudes is the order of their bits, so flushing the maximum is the maximum of flushed values
// (and leaves a loop that vectorises).
inline uint32_t flush_bits(uint32_t magnitude) { return bits_of(flush(float_of(magnitude))); }

// q = cast(x * scale); returns the bits of max |x|, a NaN's bits where there is one.
template <typename T, typename F8>
TE_SIMD uint32_t cast_row(const T* x, float scale, uint8_t* q, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    amax = std::max(amax, bits_of(value) & 0x7fffffffu);
    q[i] = fp8_from_float<F8>(flush(value) * flush(scale));
  }
  return flush_bits(amax);
}

template <typename T>
TE_SIMD uint32_t amax_row(const T* x, int64_t n) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, bits_of(to_float(x[i])) & 0x7fffffffu);
  return flush_bits(amax);
}

template <typename T>
TE_SIMD void add_row(const T* x, float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += to_float(x[i]);
}

// 8 x 8 bytes are transposed in 8 words by three rounds of swaps between words: of halves, quarters, bytes. A row of
// a tile holds kTileWords words, so one call transposes as many blocks side by side.
constexpr int kTileWords = kTile / 8;
typedef uint64_t TileRow __attribute__((vector_size(kTile)));
template <int kApart>
TE_INLINE void swap_words(TileRow (&row)[8]) {
  constexpr uint64_t kMask = kApart == 4   ? 0x00000000ffffffffu
                             : kApart == 2 ? 0x0000ffff0000ffffu
                                           : 0x00ff00ff00ff00ffu;
  for (int i = 0; i < 8; ++i) {
    if (i & kApart) continue;
    const TileRow swapped = ((row[i] >> (8 * kApart)) ^ row[i + kApart]) & kMask;
    row[i + kApart] ^= swapped;
    row[i] ^= swapped << (8 * kApart);
  }
}

// target[c, r] = source[r, c] for a tile of rows x cols bytes, each at most kTile. The work is done in a dense copy,
// where strides that are powers of two, whose lines share a few places of the cache, do no harm.
TE_INLINE void transpose_dense(const uint8_t* source, int64_t source_stride, uint8_t* target, int64_t target_stride,
                               int64_t rows, int64_t cols) {
  alignas(64) uint64_t tile[kTile][kTileWords];
  for (int64_t r = 0; r < rows; ++r) std::memcpy(tile[r], source + r * source_stride, cols);
  for (int64_t r = 0; r < rows; r += 8) {
    TileRow block[8];
    std::memcpy(block, tile[r], sizeof(block));
    swap_words<4>(block);
    swap_words<2>(block);
    swap_words<1>(block);
    std::memcpy(tile[r], block, sizeof(block));
  }
  for (int64_t c = 0; c < cols; ++c) {
    uint64_t column[kTileWords];
    for (int w = 0; w < kTileWords; ++w) column[w] = tile[8 * w + c % 8][c / 8];
    std::memcpy(target + c * target_stride, column, rows);
  }
}
TE_SIMD inline void transpose_tile(const uint8_t* source, int64_t source_stride, uint8_t* target, int64_t target_stride,
                                   int64_t rows, int64_t cols) {
  if (rows == kTile && cols == kTile) {
    transpose_dense(source, source_stride, target, target_stride, kTile, kTile);
  } else {
    transpose_dense(source, source_stride, target, target_stride, rows, cols);
  }
}

template <typename T>
TE_SIMD void widen_row(const T* x, float* wide, int64_t n) {
  for (int64_t i = 0; i < n; ++i) wide[i] = to_float(x[i]);
}
template <typename T>
TE_SIMD void narrow_row(const float* wide, T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = from_float<T>(wide[i]);
}

// kLanes sums side by side: wide enough to hide the latency of an addition, and the same on every
// instruction set, so that a sum's bits are too.
constexpr int kLanes = 32;
struct LaneSum {
  float lane[kLanes] = {};
  TE_INLINE float total() {
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
    }
    return lane[0];
  }
};

// Calls body(i, lane) for i in [0, n), kLanes at a time.
template <typename Body>
TE_INLINE void for_lanes(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    TE_ELEMENTWISE
    for (int l = 0; l < kLanes; ++l) body(i + l, l);
  }
  for (int l = 0; i + l < n; ++l) body(i + l, l);
}

// ---- Loops over blocks of rows

// Rows of one block: a multiple of kTile that makes a block worth a task; it depends on the row's length only.
inline int64_t rows_per_block(int64_t cols) {
  return std::clamp((int64_t{1} << 16) / std::max<int64_t>(cols, 1) / kTile * kTile, kTile, kRowBlock);
}

// Sums over all rows, from one partial sum for every block of rows, added up in the blocks' order.
class ColumnSums {
 public:
  ColumnSums(int64_t rows, int64_t cols)
      : cols_(cols), block_(rows_per_block(cols)), sums_(ceil_div(rows, block_) * cols, 0.f) {}
  float* at(int64_t row) { return sums_.data() + row / block_ * cols_; }
  void total(float* sum) const {
    std::fill_n(sum, cols_, 0.f);
    for (size_t i = 0; i < sums_.size(); i += cols_) add_row<float>(sums_.data() + i, sum, cols_);
  }

 private:
  int64_t cols_, block_;
  std::vector<float> sums_;
};

// The rows of an operand, in f32 whatever its dtype.
class FloatRows {
 public:
  FloatRows(const ffi::AnyBuffer& x, int64_t column_axes) : x_(matrix(x, column_axes)) {}
  // Checks count elements, so a buffer's own axes may say otherwise.
  FloatRows(const ffi::AnyBuffer& x, int64_t rows, int64_t cols) : x_{x.untyped_data(), x.element_type(), rows, cols} {}
  int64_t rows() const { return x_.rows; }
  int64_t cols() const { return x_.cols; }
  // Columns [first, first + n) of a row: where they lie, or widened into buffer[n].
  const float* at(int64_t row, float* buffer, int64_t first, int64_t n) const;
  const float* at(int64_t row, float* buffer) const { return at(row, buffer, 0, x_.cols); }

 private:
  Matrix x_;
};

inline Matrix result_matrix(Out& y, int64_t rows, int64_t cols) {
  return {y->untyped_data(), y->element_type(), rows, cols};
}

// Where a maximum goes, if anywhere: as it is, or as its report.
struct Measured {
  float* value = nullptr;
  float* report = nullptr;
  int bins = 0;

  Measured() = default;
  Measured(Out& amax, Out& report)
      : value(data_or_null<float>(amax)),
        report(data_or_null<float>(report)),
        bins(static_cast<int>(report->element_count())) {}
  bool wanted() const { return value || report; }
  void store(float amax) const {
    if (value) *value = amax;
    if (!report) return;
    std::fill_n(report, bins, 0.f);
    if (const int bin = bin_of(amax, bins); bin >= 0) report[bin] = amax;
  }
};

// A result y[rows, cols] of any dtype, and what else may be asked for of it; null where it is not, as y itself may be.
struct RowsResult {
  Matrix y;
  float scale;    // FP8 only: y = cast(value * scale)
  uint8_t* y_t;   // FP8 only: y transposed
  Measured amax;  // max |value| before scaling, or max |y| where y is not FP8
  float* colsum;  // sums of the values over the rows, before the cast
};

// The scale that an op casts with; its reciprocal goes where it was asked for.
inline float scale_of(const Casting& casting, DType dtype) {
  const ScaleSource source(casting, dtype);
  const float scale = source.get();
  source.store_inverse(scale);
  return scale;
}

inline RowsResult rows_result(Out& y, const Casting& casting, Out& y_t, int64_t rows, int64_t cols,
                              float* colsum = nullptr) {
  const DType dtype = stored_dtype(y, y_t);
  return {{data_or_null<void>(y), dtype, rows, cols},
          scale_of(casting, dtype),
          data_or_null<uint8_t>(y_t),
          Measured(casting.amax, casting.report),
          colsum};
}

// Fills values[cols] with one row of a result in f32, and may use scratch[cols].
using RowProducer = std::function<void(int64_t row, float* values, float* scratch)>;

// Computes y row by row and stores it. A row stays in the first-level cache between being computed and being
// stored, the tiles of the transposed copy in the second-level one: memory sees each operand and result once.
void store_rows(ffi::ThreadPool& pool, const RowsResult& to, const RowProducer& produce);

}  // namespace te

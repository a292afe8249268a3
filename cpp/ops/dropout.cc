// te_dropout on the CPU, a row at a time: bits for 512 columns, then values. Memory sees each operand and the result
// once.
#include "ops/dropout.h"

#include "core/rows.h"

namespace te {
namespace {

constexpr int64_t kColumns = 512;  // at a time, whose bits stay in the first-level cache

// bits[8 * i ..] those of unit + i.
TE_SIMD void draw_units(uint32_t key0, uint32_t key1, uint32_t unit, uint32_t row, uint16_t* bits, int64_t n) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) {
    const Draw draw = philox(key0, key1, unit + static_cast<uint32_t>(i), row);
    for (int j = 0; j < kDrawn; ++j) bits[kDrawn * i + j] = static_cast<uint16_t>(draw[j]);
  }
}

// y may be x.
TE_SIMD void drop_row(const float* x, const uint16_t* bits, uint32_t threshold, float scale, float* y, int64_t n) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < n; ++i) y[i] = bits[i] < threshold ? 0.f : x[i] * scale;
}

}  // namespace

ffi::Error Dropout(ffi::ThreadPool pool, In x, In residual, In seed, In row, In column, Out y, DropoutAttributes a) {
  const Check check = check_dropout(x, residual, seed, row, column, y, a);
  if (check.failed()) return check.error();
  const FloatRows input(x, 1);
  const int64_t rows = input.rows(), cols = input.cols();
  const FloatRows past(residual, rows, cols);
  const bool adds = present(residual);
  const uint32_t* const key = seed.typed_data<uint32_t>();
  const int32_t* const numbers = row.typed_data<int32_t>();
  const uint32_t begin = cols ? static_cast<uint32_t>(column.typed_data<int32_t>()[0]) : 0;
  const RowsResult result{result_matrix(y, rows, cols), 1.f, nullptr, {}, nullptr};
  store_rows(pool, result, [&](int64_t r, float* values, float* scratch) {
    const float* const v = input.at(r, values);
    uint16_t bits[kColumns + kDrawn];
    for (int64_t c = 0; c < cols; c += kColumns) {
      const int64_t n = std::min(kColumns, cols - c);
      const uint32_t first = begin + static_cast<uint32_t>(c), past_unit = first % kDrawn;
      draw_units(key[0], key[1], first / kDrawn, static_cast<uint32_t>(numbers[r]), bits,
                 (past_unit + n + kDrawn - 1) / kDrawn);
      drop_row(v + c, bits + past_unit, static_cast<uint32_t>(a.threshold), a.scale, values + c, n);
    }
    if (adds) add_row<float>(past.at(r, scratch), values, cols);
  });
  return ffi::Error::Success();
}

}  // namespace te

TE_HANDLER(dropout, Dropout)

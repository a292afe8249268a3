// The loop that stores computed rows, once for every dtype of the result; see rows.h.
#include "core/rows.h"

namespace te {
namespace {

template <typename Y>
void store_rows_as(ffi::ThreadPool& pool, const RowsResult& to, const RowProducer& produce) {
  const int64_t rows = to.y.rows, cols = to.y.cols, step = rows_per_block(cols);
  const int64_t blocks = ceil_div(rows, step);
  std::vector<uint32_t> amaxes(blocks, 0);
  ColumnSums sums(to.colsum ? rows : 0, cols);
  parallel_for(pool, blocks, [&](int64_t block) {
    std::vector<float> buffers(2 * cols);
    float* scratch = buffers.data();
    // FP8 without y: kTile rows at a time, for the transposed copy.
    std::vector<Y> tile(is_fp8_v<Y> && !to.y.data ? kTile * cols : 0);
    uint32_t most = 0;
    const auto place = [&](int64_t row) -> Y* {
      if (to.y.data) return to.y.as<Y>() + row * cols;
      return is_fp8_v<Y> ? tile.data() + row % kTile * cols : nullptr;
    };
    const auto store = [&](int64_t row) {
      Y* y = place(row);
      float* values = scratch + cols;
      if constexpr (std::is_same_v<Y, float>) {
        if (y) values = y;
      }
      produce(row, values, scratch);
      if (to.colsum) add_row<float>(values, sums.at(row), cols);
      if constexpr (is_fp8_v<Y>) {
        most = std::max(most, cast_row<float, Y>(values, to.scale, &y->bits, cols));
      } else {
        if constexpr (std::is_same_v<Y, float>) {
          if (to.amax.wanted()) most = std::max(most, amax_row<float>(values, cols));
        } else {
          narrow_row<Y>(values, y, cols);
          if (to.amax.wanted()) most = std::max(most, amax_row<Y>(y, cols));
        }
      }
    };
    const int64_t end = std::min(rows, (block + 1) * step);
    for (int64_t r0 = block * step; r0 < end; r0 += kTile) {
      const int64_t r1 = std::min(end, r0 + kTile);
      for (int64_t row = r0; row < r1; ++row) store(row);
      if (!to.y_t) continue;
      for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
        transpose_tile(reinterpret_cast<const uint8_t*>(place(r0)) + c0, cols, to.y_t + c0 * rows + r0, rows, r1 - r0,
                       std::min(kTile, cols - c0));
      }
    }
    amaxes[block] = most;
  });
  to.amax.store(float_of(blocks ? *std::max_element(amaxes.begin(), amaxes.end()) : 0u));
  if (to.colsum) sums.total(to.colsum);
}

}  // namespace

const float* FloatRows::at(int64_t row, float* buffer, int64_t first, int64_t n) const {
  const int64_t offset = row * x_.cols + first;
  if (x_.dtype == DType::F32) return x_.as<float>() + offset;
  if (x_.dtype == DType::BF16) {
    widen_row<bf16>(x_.as<bf16>() + offset, buffer, n);
  } else {
    widen_row<f16>(x_.as<f16>() + offset, buffer, n);
  }
  return buffer;
}

void store_rows(ffi::ThreadPool& pool, const RowsResult& to, const RowProducer& produce) {
  with_any(to.y.dtype, [&](auto y) {
    store_rows_as<decltype(y)>(pool, to, produce);
    return ffi::Error::Success();
  });
}

}  // namespace te

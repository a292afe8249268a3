// Quantization on the CPU. One pass over x in blocks of kRowBlock rows: cast, amax, column sums, and the
// transposed copy through a tile that stays in the first-level cache.
#include "ops/quantize.h"

#include <atomic>
#include <vector>

#include "core/parallel.h"
#include "core/rows.h"

namespace te {
namespace {

// Rows of q are `q_stride` apart. Returns the bits of max |x|.
template <typename T, typename F8>
uint32_t quantize(ffi::ThreadPool& pool, const Matrix& x, float scale, uint8_t* q, int64_t q_stride, uint8_t* q_t,
                  float* colsum) {
  const int64_t blocks = ceil_div(x.rows, kRowBlock);
  std::vector<uint32_t> amaxes(blocks, 0);
  std::vector<float> sums(colsum ? blocks * x.cols : 0, 0.f);
  parallel_for(pool, blocks, [&](int64_t block) {
    const int64_t end = std::min(x.rows, (block + 1) * kRowBlock);
    uint32_t most = 0;
    uint8_t tile[kTile * kTile];
    for (int64_t r0 = block * kRowBlock; r0 < end; r0 += kTile) {
      const int64_t rows = std::min(kTile, end - r0);
      for (int64_t c0 = 0; c0 < x.cols; c0 += kTile) {
        const int64_t cols = std::min(kTile, x.cols - c0);
        uint8_t* cast = q ? q + r0 * q_stride + c0 : tile;
        const int64_t stride = q ? q_stride : kTile;
        for (int64_t r = 0; r < rows; ++r) {
          const T* row = x.as<T>() + (r0 + r) * x.cols + c0;
          most = std::max(most, cast_row<T, F8>(row, scale, cast + r * stride, cols));
          if (colsum) add_row<T>(row, sums.data() + block * x.cols + c0, cols);
        }
        if (q_t) transpose_tile(cast, stride, q_t + c0 * x.rows + r0, x.rows, rows, cols);
      }
    }
    amaxes[block] = most;
  });
  if (colsum) {
    std::fill_n(colsum, x.cols, 0.f);
    for (int64_t b = 0; b < blocks; ++b) add_row<float>(sums.data() + b * x.cols, colsum, x.cols);
  }
  uint32_t most = 0;
  for (const uint32_t a : amaxes) most = std::max(most, a);
  return most;
}

// `parts`, matrices of one size and dtype, side by side.
ffi::Error quantize_parts(ffi::ThreadPool& pool, const std::vector<Matrix>& parts, const Casting& casting, Out& q,
                          Out& q_t, Out& colsum) {
  const float factor = scale_of(casting, format_of(q, q_t));
  return with_float(parts[0].dtype, [&](auto t) {
    return with_fp8(format_of(q, q_t), [&](auto f8) {
      const int64_t cols = parts[0].cols, stride = cols * static_cast<int64_t>(parts.size());
      uint32_t most = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        const auto at = [&](auto* p, int64_t offset) { return p ? p + offset * static_cast<int64_t>(i) : p; };
        most = std::max(
            most, quantize<decltype(t), decltype(f8)>(pool, parts[i], factor, at(data_or_null<uint8_t>(q), cols),
                                                      stride, at(data_or_null<uint8_t>(q_t), cols * parts[i].rows),
                                                      at(data_or_null<float>(colsum), cols)));
      }
      Measured(casting.amax, casting.report).store(float_of(most));
      return ffi::Error::Success();
    });
  });
}

}  // namespace

ffi::Error Quantize(ffi::ThreadPool pool, In x, In scale, Out q, Out q_t, Out amax, Out colsum, Out report,
                    Out scale_inv, QuantizeAttributes attributes) {
  const Casting casting{scale, amax, report, scale_inv, attributes};
  const Check check = check_quantize(x, casting, q, q_t, colsum, attributes.k_axes);
  if (check.failed()) return check.error();
  return quantize_parts(pool, {matrix(x, attributes.k_axes)}, casting, q, q_t, colsum);
}

ffi::Error QuantizeStack(ffi::ThreadPool pool, In x0, In x1, In x2, In scale, Out q, Out q_t, Out amax, Out colsum,
                         Out report, Out scale_inv, Scaling scaling) {
  const Casting casting{scale, amax, report, scale_inv, scaling};
  const Check check = check_quantize_stack(x0, x1, x2, casting, q, q_t, colsum);
  if (check.failed()) return check.error();
  std::vector<Matrix> parts{matrix(x0, 1), matrix(x1, 1)};
  if (!absent(x2)) parts.push_back(matrix(x2, 1));
  return quantize_parts(pool, parts, casting, q, q_t, colsum);
}

ffi::Error Measure(ffi::ThreadPool pool, In x0, In x1, In x2, Out amax, Out report) {
  const Check check = check_measure(x0, x1, x2, amax, report);
  if (check.failed()) return check.error();
  return with_float(x0.element_type(), [&](auto t) {
    using T = decltype(t);
    std::atomic<uint32_t> most{0};
    for (const In& x : {x0, x1, x2}) {
      const T* data = static_cast<const T*>(x.untyped_data());
      parallel_rows(pool, static_cast<int64_t>(x.element_count()), 1,
                    [&](int64_t first, int64_t last) { raise(most, amax_row<T>(data + first, last - first)); });
    }
    Measured(amax, report).store(float_of(most));
    return ffi::Error::Success();
  });
}

namespace {

template <typename F8, typename T>
TE_SIMD void dequantize_row(const F8* q, float scale_inv, T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = from_float<T>(to_float(q[i]) * scale_inv);
}

}  // namespace

ffi::Error Dequantize(ffi::ThreadPool pool, In q, In scale_inv, Out x) {
  const Check check = check_dequantize(q, scale_inv, x);
  if (check.failed()) return check.error();
  const Matrix m = matrix(q, 0);
  const float factor = *scale_inv.typed_data<float>();
  return with_fp8(m.dtype, [&](auto f8) {
    return with_float(x->element_type(), [&](auto t) {
      using F8 = decltype(f8);
      using T = decltype(t);
      parallel_rows(pool, m.rows, 1, [&](int64_t first, int64_t last) {
        dequantize_row<F8, T>(m.as<F8>() + first, factor, static_cast<T*>(x->untyped_data()) + first, last - first);
      });
      return ffi::Error::Success();
    });
  });
}

}  // namespace te

TE_HANDLER(quantize, Quantize)
TE_HANDLER(quantize_stack, QuantizeStack)
TE_HANDLER(measure, Measure)
TE_HANDLER(dequantize, Dequantize)

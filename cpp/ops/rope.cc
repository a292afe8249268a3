// Rotary position embedding on the CPU, a token at a time: cosines and sines of its angles once, then every head turned
// by them and stored by store_rows. Memory sees x and y once: 8 bytes a value for f32, 4 for 16 bits.
#include "ops/rope.h"

#include <algorithm>

#include "core/rows.h"

namespace te {
namespace {

// ---- Inner loops

TE_SIMD void turns_row(int32_t position, const float* frequencies, float sign, float* cos, float* sin, int64_t pairs) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < pairs; ++i) {
    const Turn t = turn(position, frequencies[i]);
    cos[i] = t.cos;
    sin[i] = sign * t.sin;
  }
}

// y may be x.
template <bool kConsecutive>
TE_SIMD void rotate_head(const float* x, const float* cos, const float* sin, float* y, int64_t pairs,
                         int64_t features) {
  TE_ELEMENTWISE
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t first = kConsecutive ? 2 * i : i, second = kConsecutive ? 2 * i + 1 : pairs + i;
    const float a = x[first], b = x[second];
    y[first] = a * cos[i] - b * sin[i];
    y[second] = a * sin[i] + b * cos[i];
  }
  if (y == x) return;
  for (int64_t i = 2 * pairs; i < features; ++i) y[i] = x[i];
}

ffi::Error rotate_all(const char* op, int64_t parts, ffi::ThreadPool& pool, const In& x, const In& frequencies,
                      const In& positions, Out& y, const RopeAttributes& attributes) {
  Check check(op);
  const RopeShape shape = check_rope_rotate(check, x, frequencies, positions, y, attributes.group, parts);
  if (check.failed()) return check.error();
  auto* const rotate = attributes.group == "consecutive" ? &rotate_head<true> : &rotate_head<false>;
  const FloatRows input(x, parts == 1 ? 2 : 3);
  const RowsResult result{result_matrix(y, input.rows(), input.cols()), 1.f, nullptr, {}, nullptr};
  const int64_t turned = shape.turned * shape.features;
  store_rows(pool, result, [&](int64_t token, float* values, float* scratch) {
    float *cos = scratch, *sin = scratch + shape.pairs;  // the row is long enough: 2 * pairs <= features
    turns_row(positions.typed_data<int32_t>()[token], frequencies.typed_data<float>(), attributes.inverse ? -1.f : 1.f,
              cos, sin, shape.pairs);
    const float* row = input.at(token, values);
    for (int64_t h = 0; h < shape.turned; ++h) {
      rotate(row + h * shape.features, cos, sin, values + h * shape.features, shape.pairs, shape.features);
    }
    if (row != values) std::copy(row + turned, row + input.cols(), values + turned);
  });
  return ffi::Error::Success();
}

}  // namespace

// ---- Handlers

ffi::Error RopeRotate(ffi::ThreadPool pool, In x, In frequencies, In positions, Out y, RopeAttributes attributes) {
  return rotate_all("te_rope_rotate", 1, pool, x, frequencies, positions, y, attributes);
}

ffi::Error RopeRotateQkv(ffi::ThreadPool pool, In x, In frequencies, In positions, Out y, RopeAttributes attributes) {
  return rotate_all("te_rope_rotate_qkv", 3, pool, x, frequencies, positions, y, attributes);
}

}  // namespace te

TE_HANDLER(rope_rotate, RopeRotate)
TE_HANDLER(rope_rotate_qkv, RopeRotateQkv)

// Rotary position embedding on CUDA: 2 s bytes a value that is turned, with s for its dtype. A thread takes the same
// few pairs of several heads of one token, so that each cosine and sine, some 40 instructions, is made once and kept in
// registers, with no shared memory and nothing to wait for. Neighbouring threads take neighbouring pairs, then
// neighbouring heads.
#include <algorithm>
#include <type_traits>

#include "core/cuda.cuh"
#include "ops/rope.h"

namespace te {
namespace {

struct Rope {
  const void* x;
  void* y;
  const float* frequencies;
  const int32_t* positions;
  RopeShape shape;
  bool consecutive;
  bool inverse;
  int slices;  // threads that share the heads of a token: slice i takes the heads i, i + slices, ...
};

// ---- What a thread loads and stores of one head: `kParts` runs of `kWidth` neighbours

template <typename T>
struct One {
  float value;
  __device__ __forceinline__ float operator[](int) const { return value; }
};
template <typename T, int kWidth>
using Run = std::conditional_t<kWidth == 8, Vec8<T>, One<T>>;

template <int kWidth, typename T>
__device__ __forceinline__ Run<T, kWidth> load_run(const T* p) {
  if constexpr (kWidth == 8) {
    return load8(p);
  } else {
    return {load1(p)};
  }
}
template <int kWidth, typename T>
__device__ __forceinline__ void store_run(T* p, const Run<T, kWidth>& run) {
  if constexpr (kWidth == 8) {
    store8(p, run, 8, true);
  } else {
    store1(p, run.value);
  }
}
template <int kWidth, typename T>
__device__ __forceinline__ Run<T, kWidth> round_run(const float (&v)[kWidth]) {
  if constexpr (kWidth == 8) {
    return round8<T>(v);
  } else {
    return {v[0]};
  }
}

// One part holds pairs of neighbours, two parts the first and the second features of pairs.
template <typename T, int kWidth, int kParts>
__device__ __forceinline__ void rotate(Run<T, kWidth> (&run)[kParts], const Turn (&turns)[kWidth * kParts / 2]) {
  float v[kParts][kWidth];
#pragma unroll
  for (int i = 0; i < kWidth * kParts / 2; ++i) {
    const int part = kParts - 1, first = kParts == 1 ? 2 * i : i, second = kParts == 1 ? 2 * i + 1 : i;
    const float a = run[0][first], b = run[part][second];
    v[0][first] = a * turns[i].cos - b * turns[i].sin;
    v[part][second] = a * turns[i].sin + b * turns[i].cos;
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) run[p] = round_run<kWidth, T>(v[p]);
}

// ---- The kernel

// How many threads a head's features need, and where in it the parts of thread `unit` begin. Units from
// `rotating` on pass features on; where they have two parts, these are the same.
template <int kWidth, int kParts>
struct Units {
  static constexpr int kPairs = kWidth * kParts / 2;
  int64_t rotating, all;

  __host__ __device__ explicit Units(const RopeShape& s)
      : rotating(s.pairs / kPairs), all(rotating + (s.features - 2 * s.pairs) / kWidth) {}
  __device__ __forceinline__ int64_t part(int64_t unit, int p, int64_t pairs, bool consecutive) const {
    if (unit >= rotating) return 2 * pairs + (unit - rotating) * kWidth;
    if (consecutive) return unit * 2 * kPairs + p;
    return unit * kPairs + p * pairs;
  }
};

template <typename T, int kWidth, int kParts>
__global__ void __launch_bounds__(256) rope_rotate(const Rope a) {
  using U = Units<kWidth, kParts>;
  constexpr int kHeads = 4 / kParts;  // at a time, loaded before any is turned: 4 loads on their way
  const U units(a.shape);
  const int64_t thread = (static_cast<int64_t>(gridDim.x) - 1 - blockIdx.x) * 256 + threadIdx.x;  // see cuda.cuh
  const int64_t unit = thread % units.all, slice = thread / units.all % a.slices;
  const int64_t token = thread / units.all / a.slices;
  if (token >= a.shape.tokens) return;

  const bool rotating = unit < units.rotating;
  Turn turns[U::kPairs];
  if (rotating) {
    const int32_t position = __ldg(a.positions + token);
#pragma unroll
    for (int i = 0; i < U::kPairs; ++i) {
      turns[i] = turn(position, __ldg(a.frequencies + unit * U::kPairs + i));
      turns[i].sin = a.inverse ? -turns[i].sin : turns[i].sin;
    }
  }
  int64_t begin[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) begin[p] = units.part(unit, p, a.shape.pairs, a.consecutive);
  const int64_t row = token * a.shape.heads * a.shape.features;
  const T* x = static_cast<const T*>(a.x) + row;
  T* y = static_cast<T*>(a.y) + row;
  const int64_t heads = a.y == a.x ? a.shape.turned : a.shape.heads;
  for (int64_t head = slice; head < heads; head += kHeads * a.slices) {
    Run<T, kWidth> run[kHeads][kParts];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h * a.slices >= heads) continue;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        run[h][p] = load_run<kWidth>(x + (head + h * a.slices) * a.shape.features + begin[p]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h * a.slices >= heads) continue;
      if (rotating && head + h * a.slices < a.shape.turned) rotate<T, kWidth, kParts>(run[h], turns);
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        store_run<kWidth>(y + (head + h * a.slices) * a.shape.features + begin[p], run[h][p]);
      }
    }
  }
}

// ---- Launching

template <typename T, int kWidth, int kParts>
ffi::Error launch_rope(cudaStream_t stream, Rope a) {
  const Units<kWidth, kParts> units(a.shape);
  const int64_t threads = a.shape.tokens * units.all;
  if (threads * a.shape.heads == 0) return ffi::Error::Success();
  // 8 heads a thread make cosines and sines cheap; fewer where the GPU would not be full: 4 times, so that it ends
  // full.
  const int64_t full = int64_t{4} * 2048 * current_device().multiprocessors;
  const int64_t least = ceil_div(a.shape.turned, 8);
  a.slices = static_cast<int>(std::clamp(full / threads, least, std::max(least, a.shape.turned / 2)));
  TE_CUDA_CHECK(launch({ceil_div(threads * a.slices, 256), 256}, stream, rope_rotate<T, kWidth, kParts>, a));
  return ffi::Error::Success();
}

ffi::Error rotate_all(const char* op, int64_t parts, cudaStream_t stream, const In& x, const In& frequencies,
                      const In& positions, Out& y, const RopeAttributes& attributes) {
  Check check(op);
  const RopeShape s = check_rope_rotate(check, x, frequencies, positions, y, attributes.group, parts);
  if (check.failed()) return check.error();
  const bool consecutive = attributes.group == "consecutive";
  const Rope a{x.untyped_data(),
               y->untyped_data(),
               frequencies.typed_data<float>(),
               positions.typed_data<int32_t>(),
               s,
               consecutive,
               attributes.inverse,
               1};
  const bool vector = aligned(a.x) && aligned(a.y) && s.features % 8 == 0 && s.pairs % (consecutive ? 4 : 8) == 0;
  return with_float(x.element_type(), [&](auto t) {
    using T = decltype(t);
    if (!vector) return launch_rope<T, 1, 2>(stream, a);
    return consecutive ? launch_rope<T, 8, 1>(stream, a) : launch_rope<T, 8, 2>(stream, a);
  });
}

}  // namespace

ffi::Error RopeRotate(cudaStream_t stream, In x, In frequencies, In positions, Out y, RopeAttributes attributes) {
  return rotate_all("te_rope_rotate", 1, stream, x, frequencies, positions, y, attributes);
}

ffi::Error RopeRotateQkv(cudaStream_t stream, In x, In frequencies, In positions, Out y, RopeAttributes attributes) {
  return rotate_all("te_rope_rotate_qkv", 3, stream, x, frequencies, positions, y, attributes);
}

}  // namespace te

TE_HANDLER(rope_rotate, RopeRotate)
TE_HANDLER(rope_rotate_qkv, RopeRotateQkv)

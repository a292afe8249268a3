// Activations on CUDA, what forward and backward share: curve values, or their gradients, produced into the tile kernel
// of tile.cuh in one pass. Bytes an element of y, with s for z (and dy), o for the result (1 for FP8), t = 1 where a
// transposed copy is asked for:
//   forward   s A + o + t          backward   s (A + 1) + (o + t) A; dbias adds A/16 and a second launch
#pragma once

#include "core/tile.cuh"
#include "ops/activation.h"

namespace te {

// A curve known at compile time, and one that every block branches to, 8 values at a time: 2 instructions a value more.
template <typename C>
struct Fixed {
  static constexpr bool kBounded = C::kBounded;
  C curve;

  __device__ __forceinline__ Point most(float x) const { return curve.most(x); }

  template <typename F>
  __device__ __forceinline__ void with(F&& f) const {
    f(curve);
  }
};
struct AnyCurve {
  static constexpr bool kBounded = false;
  Curve curve;

  template <typename F>
  __device__ __forceinline__ void with(F&& f) const {
    switch (curve) {
#define TE_CURVE(name, type) \
  case Curve::k##type: return f(type{});
      TE_CURVES(TE_CURVE)
#undef TE_CURVE
      case Curve::kClampedSilu: return;  // has kernels of its own, see with_variant
    }
  }
};

// The bias of a thread's 8 columns, once for all its rows; -0, which adds to nothing, where one is possible but absent,
// and an empty type where none is.
template <int kInputs, bool kBias>
struct BiasColumns {
  Vec8<float> bias[kInputs];

  __device__ __forceinline__ static BiasColumns of(const Operand<AnyDtype>& from, int64_t cols, int64_t col, int n,
                                                   bool vector) {
    BiasColumns c;
#pragma unroll
    for (int a = 0; a < kInputs; ++a) {
      if (from.data) {
        c.bias[a] = from.load(a * cols + col, n, vector);
      } else {
        constexpr float kNone[8] = {-0.f, -0.f, -0.f, -0.f, -0.f, -0.f, -0.f, -0.f};
        c.bias[a] = round8<float>(kNone);
      }
    }
    return c;
  }
  __device__ __forceinline__ float add(float z, int a, int j) const { return z + bias[a][j]; }
  __device__ __forceinline__ float most(float z, int a, int j) const { return z + fabsf(bias[a][j]); }  // of |z|
};
template <int kInputs>
struct BiasColumns<kInputs, false> {
  __device__ __forceinline__ static BiasColumns of(const Operand<AnyDtype>&, int64_t, int64_t, int, bool) { return {}; }
  __device__ __forceinline__ float add(float z, int, int) const { return z; }
  __device__ __forceinline__ float most(float z, int, int) const { return z; }
};

// ---- The maximum alone, as a recipe without history needs it before the cast

// The larger of each two bf16, the second as it is or its magnitude; NaN where either is.
__device__ __forceinline__ void raise(Vec8<bf16>& most, const Vec8<bf16>& x) {
#pragma unroll
  for (int w = 0; w < 4; ++w) asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(most.words[w]) : "r"(x.words[w]));
}
__device__ __forceinline__ void raise_abs(Vec8<bf16>& most, Vec8<bf16> x) {
#pragma unroll
  for (int w = 0; w < 4; ++w) x.words[w] &= 0x7fff7fffu;
  raise(most, x);
}

// Blocks stay and take tiles in turn. Values are computed only where they may exceed the most that is known so far, of
// all blocks, and a bound is cheap: of 8 columns of several rows, from the largest operand in each column. Two things
// cost more than they seem to:
// - The first tiles, where nothing is known, took 9 us. So each thread computes one row, and blocks tell each other.
// - All warps reading the one address at every tile are half of what its part of the L2 cache can serve.
constexpr int kAmaxBlocks = 4;  // on a multiprocessor

template <typename Producer>
__global__ void __launch_bounds__(kTileThreads, kAmaxBlocks)
    amax_tiles(const Producer in, const Result out, unsigned tiles) {
  constexpr int kRows = 8 / Producer::operands();  // of a thread at a time
  constexpr int kRowsAtOnce = kTileThreads / 16 * kRows;
  __shared__ BlockAmax amax;
  const unsigned col_tiles = static_cast<unsigned>((out.cols + kTileSide - 1) / kTileSide);
  const auto values = [&](const typename Producer::Raw& raw, const typename Producer::Columns& columns, float most) {
    float v[Producer::kOutputs][8];
    in.values(raw, columns, v);
#pragma unroll
    for (int o = 0; o < Producer::kOutputs; ++o) most = max_abs(most, v[o]);
    return most;
  };
  float most = 0.f, known = 0.f;
  for (unsigned tile = blockIdx.x, turn = 0; tile < tiles; tile += gridDim.x, ++turn) {
    const unsigned row_tile = tile / col_tiles;
    const int64_t row0 = int64_t{row_tile} * kTileSide;
    const int64_t col = int64_t{tile - row_tile * col_tiles} * kTileSide + threadIdx.x % 16 * 8;
    const int rows_here = col < out.cols ? static_cast<int>(min(int64_t{kTileSide}, out.rows - row0)) : 0;
    if (turn && !(turn & (turn - 1))) known = out.amax.so_far();
    typename Producer::Columns columns = {};
    if (rows_here) columns = in.columns(col, 8, true);
#pragma unroll 1
    for (int past = 0; past < kTileSide; past += kRowsAtOnce) {
      const int first = past + threadIdx.x / 16 * kRows, last = rows_here - first - 1;
      const int64_t row = row0 + first, before = row * out.cols;
      typename Producer::Raw raw[kRows];
      if (last >= 0) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {  // beyond the last row, that one again
          const int step = min(i, last);
          raw[i] = in.load(row + step, before + step * out.cols, col, 8, true);
        }
      }
      if (!turn && !past) {
        if (last >= 0) most = values(raw[0], columns, most);
        amax.note(most);
        known = amax.exchange(out.amax);
      }
      most = max_abs(most, known);
      if (last < 0 || in.bound(raw, columns) <= most) continue;
#pragma unroll
      for (int i = 0; i < kRows; ++i) most = values(raw[i], columns, most);
    }
    out.amax.note(most, known);
  }
  amax.note(most);
  __syncthreads();
  amax.merge(out.amax);
}

template <typename Producer>
ffi::Error launch_amax(cudaStream_t stream, const Producer& in, Result out) {
  const int64_t tiles = out.row_tiles() * ceil_div(out.cols, kTileSide);
  const int64_t blocks = std::min<int64_t>(tiles, kAmaxBlocks * current_device().multiprocessors);
  TE_CUDA_CHECK(prepare(stream, blocks, &out));
  if (out.amax.value)
    TE_CUDA_CHECK(launch({blocks, kTileThreads}, stream, amax_tiles<Producer>, in, out, static_cast<unsigned>(tiles)));
  TE_CUDA_CHECK(finish_amax(stream, out.amax));
  return ffi::Error::Success();
}

// What a handler does with its producer.
template <typename Producer>
ffi::Error run(cudaStream_t stream, const Producer& in, const Result& out, float* colsum, void* workspace) {
  if constexpr (Producer::kBounded) {
    if (!out.y && !out.y_t && !colsum) return launch_amax(stream, in, out);
  }
  return launch_tiles(stream, in, out, colsum, workspace);
}

// Calls f(T{}, std::bool_constant<gated>{}, std::bool_constant<a bias is possible>{}, curve), with AnyDtype where
// operands differ in dtype or are not whole vectors. The two curves of most models have kernels of their own in bf16,
// and so has the one with parameters.
template <typename F>
ffi::Error with_variant(DType dtype, bool vector, const Activation& activation, const ActivationAttributes& attributes,
                        const In& bias, F&& f) {
  const auto fixed = [&](auto t, auto gated, auto curve) {
    return present(bias) ? f(t, gated, std::true_type{}, curve) : f(t, gated, std::false_type{}, curve);
  };
  if (activation.curve == Curve::kClampedSilu) {
    const Fixed<ClampedSilu> clamped{clamped_silu(attributes)};
    if (vector && dtype == DType::BF16) return fixed(bf16{}, std::true_type{}, clamped);
    return fixed(AnyDtype{}, std::true_type{}, clamped);
  }
  const auto own = [&](auto curve) {
    return activation.gated ? fixed(bf16{}, std::true_type{}, curve) : fixed(bf16{}, std::false_type{}, curve);
  };
  if (vector && dtype == DType::BF16 && activation.curve == Curve::kGelu) return own(Fixed<Gelu>{});
  if (vector && dtype == DType::BF16 && activation.curve == Curve::kSilu) return own(Fixed<Silu>{});
  const auto any = [&](auto t) {
    const AnyCurve curve{activation.curve};
    return activation.gated ? f(t, std::true_type{}, std::true_type{}, curve)
                            : f(t, std::false_type{}, std::true_type{}, curve);
  };
  return vector ? with_float(dtype, any) : any(AnyDtype{});
}

inline Operand<AnyDtype> operand(const In& bias) { return {data_or_null<void>(bias), bias.element_type()}; }

}  // namespace te

// What the CUDA kernels share: 8 values as the unit of access, the casts of dtype.h as instructions, block
// reductions. Kernels keep values in f32 between a load and a store.
//
// Products go from the first row to the last, kernels from the last to the first: each begins with what the one before
// left in the L2 cache, which is worth 5 to 7 % of a kernel's time where a tensor is about as large as that. Only the
// maximum of a tensor is taken from the first row on, as the cast that needs it begins with the last.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "core/dtype.h"
#include "core/launch.h"

namespace te {

// ---- Values

// The values before a row, which is not negative: one instruction, where a product of 64 bits takes four.
__device__ __forceinline__ int64_t before_row(int row, uint32_t cols) {
  return static_cast<int64_t>(uint64_t{static_cast<uint32_t>(row)} * cols);
}

__device__ __forceinline__ float load1(const float* p) { return __ldg(p); }
__device__ __forceinline__ float load1(const bf16* p) {
  return __uint_as_float(static_cast<uint32_t>(__ldg(&p->bits)) << 16);
}
__device__ __forceinline__ float load1(const f16* p) { return __half2float(__ushort_as_half(__ldg(&p->bits))); }
__device__ __forceinline__ float load1(const void* p, DType dtype, int64_t i) {
  if (dtype == DType::BF16) return load1(static_cast<const bf16*>(p) + i);
  if (dtype == DType::F16) return load1(static_cast<const f16*>(p) + i);
  return load1(static_cast<const float*>(p) + i);
}

// 8 neighbours of a row as they are in memory; 16 bytes for a 16-bit type.
template <typename T>
struct Vec8 {
  static constexpr int kQuads = sizeof(T) / 2;  // 16-byte words
  uint32_t words[4 * kQuads];

  __device__ __forceinline__ float operator[](int j) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(words[j]);
    } else if constexpr (std::is_same_v<T, bf16>) {
      return __uint_as_float(j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16))));
    }
  }
  __device__ __forceinline__ void set_quad(int i, uint4 q) {
    words[4 * i] = q.x, words[4 * i + 1] = q.y, words[4 * i + 2] = q.z, words[4 * i + 3] = q.w;
  }
};

template <typename T>
__device__ __forceinline__ void unpack(const Vec8<T>& raw, float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = raw[j];
}

// kOnlyReads: the kernel stores next to nothing. Values are read once, hence no copy in L1, which makes te_measure 10 %
// faster; but the L2 cache gives such lines up first, and beside plain stores that costs 5 %. f32 always leaves a copy:
// its second half comes from the same sectors.
template <bool kOnlyReads = false, typename T>
__device__ __forceinline__ Vec8<T> load8(const T* p) {
  Vec8<T> v;
#pragma unroll
  for (int i = 0; i < Vec8<T>::kQuads; ++i) {
    uint4 q;
    if constexpr (kOnlyReads && sizeof(T) == 2) {
      asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
          : "=r"(q.x), "=r"(q.y), "=r"(q.z), "=r"(q.w)
          : "l"(p));
    } else {
      q = __ldg(reinterpret_cast<const uint4*>(p) + i);
    }
    v.set_quad(i, q);
  }
  return v;
}

// The first n of 8, zeros after them, from an address of any alignment.
template <typename T>
__device__ __forceinline__ Vec8<T> load8(const T* p, int n) {
  Vec8<T> v = {};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= n) continue;
    if constexpr (std::is_same_v<T, float>) {
      v.words[j] = __float_as_uint(__ldg(p + j));
    } else {
      v.words[j / 2] |= static_cast<uint32_t>(__ldg(&p[j].bits)) << (j % 2 * 16);
    }
  }
  return v;
}

// Copies 16 bytes to shared memory while the thread goes on. kThroughL1 is the faster way, where shared memory leaves
// the L1 cache as much as is on its way: it takes half as many reads of the L2 cache.
template <bool kThroughL1>
__device__ __forceinline__ void copy_quad(uint4* shared, const void* global) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kThroughL1) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
  }
}

// A barrier of kCount threads of a block, of one of 16 numbers; 0 is __syncthreads.
template <int kCount>
__device__ __forceinline__ void barrier_of_threads(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kCount) : "memory");
}

// For a dtype that is known at run time only.
__device__ __forceinline__ void load8(const void* p, DType dtype, int64_t i, int n, bool vector, float (&v)[8]) {
  auto get = [&](auto* typed) {
    const auto raw = vector ? load8(typed + i) : load8(typed + i, n);
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = raw[j];
  };
  if (dtype == DType::BF16) {
    get(static_cast<const bf16*>(p));
  } else if (dtype == DType::F16) {
    get(static_cast<const f16*>(p));
  } else {
    get(static_cast<const float*>(p));
  }
}

// A vector of a run-time dtype, plus a constant. Absent: the constant alone.
struct Parameter {
  const void* data;
  DType dtype;
  float offset;

  __device__ __forceinline__ void get8(int64_t i, int n, bool vector, float (&v)[8]) const {
    if (data) {
      load8(data, dtype, i, n, vector, v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] += offset;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = offset;
    }
  }
};

__device__ __forceinline__ uint32_t pack2(float low, float high, bf16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack2(float low, float high, f16) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename T>
__device__ __forceinline__ Vec8<T> round8(const float (&v)[8]) {
  Vec8<T> raw;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if constexpr (std::is_same_v<T, float>) {
      raw.words[j] = __float_as_uint(v[j]);
    } else if (j % 2 == 0) {
      raw.words[j / 2] = pack2(v[j], v[j + 1], T{});
    }
  }
  return raw;
}

// Stores the first n of 8; `vector`: all of them, at an aligned address.
template <typename T>
__device__ __forceinline__ void store8(T* p, const Vec8<T>& raw, int n, bool vector) {
  if (vector) {
#pragma unroll
    for (int i = 0; i < Vec8<T>::kQuads; ++i) {
      reinterpret_cast<uint4*>(p)[i] =
          make_uint4(raw.words[4 * i], raw.words[4 * i + 1], raw.words[4 * i + 2], raw.words[4 * i + 3]);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j >= n) continue;
    if constexpr (std::is_same_v<T, float>) {
      p[j] = raw[j];
    } else {
      p[j].bits = static_cast<uint16_t>(raw.words[j / 2] >> (j % 2 * 16));
    }
  }
}

// ---- The cast of dtype.h

// Flushes an operand below the smallest normal to signed zero, as the cast wants it. A product below it may go:
// every FP8 format rounds it to zero.
__device__ __forceinline__ float scale_flushed(float x, float scale) {
  float y;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(scale));
  return y;
}

template <__nv_fp8_interpretation_t kFormat>
__device__ __forceinline__ uint2 cast8(const float (&v)[8], float scale) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = {scale_flushed(v[2 * i], scale), scale_flushed(v[2 * i + 1], scale)};
    pairs[i] = __nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, kFormat);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
__device__ __forceinline__ uint2 cast8(const float (&v)[8], float scale, DType dtype) {
  return dtype == DType::F8E5M2 ? cast8<__NV_E5M2>(v, scale) : cast8<__NV_E4M3>(v, scale);
}

template <typename T>
__device__ __forceinline__ void store1(T* p, float v) {
  if constexpr (std::is_same_v<T, float>) {
    *p = v;
  } else {
    p->bits = static_cast<uint16_t>(pack2(v, 0.f, T{}));
  }
}

// ---- Maxima and sums

// max(a, |x|), NaN where either is.
__device__ __forceinline__ float max_abs(float a, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(fabsf(x)));
  return y;
}
__device__ __forceinline__ float max_abs(float a, const float (&v)[8]) {
#pragma unroll
  for (int j = 0; j < 8; ++j) a = max_abs(a, v[j]);
  return a;
}

template <int kLanes = 32>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

// sums[i][c] = sum over p of partials[i, p, c], each in one fixed order: a block takes 32 columns with 32 rows of
// threads. Reads 4 bytes a partial.
constexpr int kSumColumns = 32;
struct Sums {
  float* first;
  float* second;
};
static __global__ void __launch_bounds__(1024) sum_partials(const float* partials, int parts, int64_t cols, Sums sums) {
  __shared__ float lanes[32][33];
  const int64_t blocks = (cols + kSumColumns - 1) / kSumColumns;
  const int64_t i = blockIdx.x / blocks;
  const int x = threadIdx.x % 32, y = threadIdx.x / 32;
  const int64_t col = blockIdx.x % blocks * kSumColumns + x;
  float sum = 0.f;
  if (col < cols) {
#pragma unroll 4
    for (int64_t p = y; p < parts; p += 32) sum += partials[(i * parts + p) * cols + col];
  }
  lanes[y][x] = sum;
  __syncthreads();
  const float total = sum_of_lanes(lanes[x][y]);  // warp y now holds column y
  const int64_t out = blockIdx.x % blocks * kSumColumns + y;
  if (x == 0 && out < cols) (i ? sums.second : sums.first)[out] = total;
}
inline cudaError_t launch_sum_partials(cudaStream_t stream, const float* partials, int64_t parts, int64_t cols,
                                       float* first, float* second = nullptr) {
  const int64_t blocks = ceil_div(cols, kSumColumns) * (second ? 2 : 1);
  return launch({blocks, 1024}, stream, sum_partials, partials, static_cast<int>(parts), cols, Sums{first, second});
}

}  // namespace te

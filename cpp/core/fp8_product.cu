// d = a b^T of FP8 on Hopper, for long sums.
//
// The tensor cores keep 13 bits of a sum below its largest part, so that one over 16384 terms of one sign loses a
// quarter. Here sums are taken out of them every 512 terms, which loses 0.2 to 0.4 %, and added up in f32; cuBLASLt's
// split accumulation does so every 128 terms, in smaller tiles. What limits both is the GPU's power: a wide tile reads
// less of shared memory for a term, and a cluster of two blocks, which share the rows of b, less of the L2 cache.
//
// Of a block, one thread has the copy engine bring stages of 128 columns of k, and two warp groups multiply 64 rows of
// a each. The blocks stay and go over the tiles of d. While the tensor cores begin with a tile, the f32 sums of the one
// before go to d, through pieces of shared memory: the copy engine writes whole lines, and nobody waits for it.
#include <cuda_bf16.h>

#include "core/copy_engine.cuh"
#include "core/dtype.h"
#include "core/fp8_product.h"
#include "core/launch.h"
#include "core/matrix.h"
#include "core/wgmma.cuh"

namespace te {

namespace {

constexpr int kGroup = 128;              // threads of a warp group
constexpr int kThreads = 3 * kGroup;     // one brings, two multiply
constexpr int kTall = 128;               // rows of a tile, in two halves
constexpr int kDeep = 128;               // columns of k in a stage: what a swizzled row holds
constexpr int kStages = 4;               // of a round, after which the sums are taken out
constexpr int kLine = 128, kPieces = 3;  // bytes of a row of d, and how many pieces of such a warp group has
constexpr int kPieceBytes = kTall / 2 * kLine;
constexpr int kBand = 8;  // pairs of tiles below each other before it goes on to the right

template <int kWide>
struct Shared {  // offsets in bytes
  static constexpr int kB = kTall * kDeep, kStage = kB + kWide * kDeep;
  static constexpr int kOut = kStages * kStage, kFull = kOut + 2 * kPieces * kPieceBytes, kEmpty = kFull + 8 * kStages;
  static constexpr int kBytes = kEmpty + 8 * kStages;
};

struct Product {
  int m, n, rounds;
  const float *a_scale_inv, *b_scale_inv;
  bool add;
};

// The tiles of d in the order in which clusters take them, a pair below each other at once: those at work at a time are
// about a square, so that the L2 cache holds what they read.
template <int kWide>
struct Tiles {
  int down, across, rank;
  __device__ Tiles(const Product& p, int rank)
      : down((p.m - 1) / (2 * kTall) + 1), across((p.n - 1) / kWide + 1), rank(rank) {}
  __device__ int count() const { return down * across; }
  __device__ void place(int i, int& row, int& column) const {
    const int band = i / (kBand * across), within = i % (kBand * across), tall = min(kBand, down - band * kBand);
    column = within / tall * kWide;
    row = (2 * (band * kBand + within % tall) + rank) * kTall;
  }
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
// The thread that brings a and b.
template <int kWide>
__device__ void bring(const CUtensorMap& a, const CUtensorMap& b, const Product& p, uint32_t shared, int rank) {
  using S = Shared<kWide>;
  const Tiles<kWide> tiles(p, rank);
  int parity = 1;
  for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2) {
    int row, column, k = 0;
    tiles.place(i, row, column);
    for (int round = 0; round < p.rounds; ++round, parity ^= 1) {
#pragma unroll
      for (int s = 0; s < kStages; ++s, k += kDeep) {
        const uint32_t stage = shared + s * S::kStage, full = shared + S::kFull + 8 * s;
        wait_for_phase(shared + S::kEmpty + 8 * s, parity);
        expect_bytes(full, S::kStage);
        fetch_box(a, row, k, stage, full);
        const int half = rank * (kWide / 2);  // of b's rows, which both blocks need
        fetch_box_for(3, b, column + half, k, stage + S::kB + half * kDeep, full);
      }
    }
  }
}

// Where the copy engine looks for a byte of a row, of 32, 64 or 128 bytes: it swizzles those of each 16.
__device__ __forceinline__ uint32_t swizzled(int width, int row, int byte) {
  return row * width + (byte ^ row / (kLine / width) % (width / 16) * 16);
}

__device__ __forceinline__ void store_two(uint32_t to, float x, float y, float) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_two(uint32_t to, float x, float y, bf16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(reinterpret_cast<const uint32_t&>(both)) : "memory");
}

// A warp group that multiplies.
template <int kWide, Fp8Pair kPair, typename T>
__device__ void multiply(const CUtensorMap& d, const CUtensorMap& d_rest, const Product& p, uint32_t shared, int rank,
                         int half) {
  using S = Shared<kWide>;
  constexpr int kColumns = kLine / sizeof(T), kChunks = (kWide - 1) / kColumns + 1;
  constexpr int kRest = kWide % kColumns * sizeof(T);  // bytes of a row in the last of a tile's pieces
  const int thread = threadIdx.x % kGroup, lane = thread % 32, warp = thread / 32;
  const bool puts = thread == 0, releases = thread < 2;
  const uint32_t empty = address_in_block(shared + S::kEmpty, thread % 2);
  const uint32_t pieces = shared + S::kOut + half * kPieces * kPieceBytes;
  const uint64_t a = operand_at(shared + half * (kTall / 2) * kDeep), b = operand_at(shared + S::kB);
  const float scale = (p.a_scale_inv ? *p.a_scale_inv : 1.f) * (p.b_scale_inv ? *p.b_scale_inv : 1.f);
  const Tiles<kWide> tiles(p, rank);
  float acc[kWide / 2], sums[kWide / 2] = {};
  int parity = 0, row_before = -1, column_before = 0;

  const auto release = [&](int s) {
    if (releases) arrive_in_block(empty + 8 * s);
  };
  // Multiplies a stage, once it has come, and releases the one before.
  const auto stage = [&](int s, bool fresh) {
    wait_for_phase(shared + S::kFull + 8 * s, parity);
    begin_multiplying();
#pragma unroll
    for (int k = 0; k < kDeep; k += 32) {
      const uint64_t at = (s * S::kStage + k) >> 4;
      multiply_fp8<kWide, kPair>(acc, a + at, b + at, !fresh || k > 0);
    }
    end_group();
    if (!fresh) {
      wait_for_groups<1>();
      release((s + kStages - 1) % kStages);
    }
  };
  const auto take_out = [&] {
    wait_for_groups<0>();
    touch(acc);
    release(kStages - 1);
  };
  const auto synchronize = [&] { asm volatile("bar.sync %0, %1;" ::"r"(1 + half), "n"(kGroup) : "memory"); };
  // Puts a line of each row, the last of a tile maybe shorter, of the sums where the tile before was.
  const auto put = [&](int chunk) {
    const bool rest = kRest && chunk == kChunks - 1;
    const uint32_t piece = pieces + chunk % kPieces * kPieceBytes;
    // Pieces take turns, but where kPieces does not divide kChunks a tile begins with one that was just put.
    const bool in_turn = kChunks % kPieces == 0 || chunk > 0;
    if (puts && in_turn) wait_until_read<kPieces - 1>();
    if (puts && !in_turn) wait_until_read<0>();
    synchronize();
#pragma unroll
    for (int i = 0; i < kWide / 2; i += 2) {
      if (i / (kColumns / 2) != chunk) continue;
      const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 % kColumns + lane % 4 * 2;
      store_two(piece + swizzled(rest ? kRest : kLine, row, column * sizeof(T)), sums[i] * scale, sums[i + 1] * scale,
                T{});
    }
    show_copy_engine();
    synchronize();
    if (!puts) return;
    if (row_before >= 0) put_box(rest ? d_rest : d, row_before, column_before + chunk * kColumns, piece, p.add);
    end_puts();
  };

  for (int i = blockIdx.x / 2; i < tiles.count(); i += gridDim.x / 2) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      stage(s, s == 0);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        if (chunk * kStages / kChunks == s) put(chunk);
      }
    }
    parity ^= 1;
    take_out();
#pragma unroll
    for (int j = 0; j < kWide / 2; ++j) sums[j] = acc[j];
    for (int round = 1; round < p.rounds; ++round, parity ^= 1) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) stage(s, s == 0);
      take_out();
#pragma unroll
      for (int j = 0; j < kWide / 2; ++j) sums[j] += acc[j];
    }
    tiles.place(i, row_before, column_before);
    row_before += half * (kTall / 2);
  }
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) put(chunk);
  if (puts) wait_for_puts();
}
#define TE_WGMMA 1
#endif

template <int kWide, Fp8Pair kPair, typename T>
__global__ void __cluster_dims__(2) __launch_bounds__(kThreads, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap d, const __grid_constant__ CUtensorMap d_rest, const Product p) {
#ifdef TE_WGMMA
  using S = Shared<kWide>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0), rank = static_cast<int>(blockIdx.x) % 2;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      make_barrier(shared + S::kFull + 8 * s, 1);
      make_barrier(shared + S::kEmpty + 8 * s, 4);  // two warp groups of two blocks
    }
    show_barriers();
  }
  cluster_arrive();
  cluster_wait();
  // 64512 registers, as at the launch: 128 x (24 + 2 x 240).
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 0) bring<kWide>(a, b, p, shared, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    multiply<kWide, kPair, T>(d, d_rest, p, shared, rank, group - 1);
  }
  __syncwarp();
  cluster_arrive();  // a block stays while the other signals it
  cluster_wait();
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, null where it has none.
Encode encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

// A row-major array and the boxes that are copied of it, whose rows of 32, 64 or 128 bytes are swizzled in shared
// memory.
bool describe(CUtensorMap* map, const void* data, DType dtype, int64_t rows, int64_t columns, int tall, int bytes) {
  const int width = static_cast<int>(ffi::ByteWidth(dtype));
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t stride = static_cast<cuuint64_t>(columns * width);
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes / width), static_cast<cuuint32_t>(tall)}, steps[] = {1, 1};
  const CUtensorMapDataType types[] = {CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                       CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
  const CUtensorMapSwizzle swizzle = bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  return encoder()(map, types[width / 2], 2, const_cast<void*>(data), sizes, &stride, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                   is_fp8(dtype) ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int kWide, Fp8Pair kPair, typename T>
cudaError_t run(const CublasLtProduct& p, cudaStream_t stream) {
  constexpr int kRest = kWide * sizeof(T) % kLine;
  CUtensorMap a, b, d, d_rest;
  if (!describe(&a, p.a, p.a_dtype, p.m, p.k, kTall, kDeep) ||
      !describe(&b, p.b, p.b_dtype, p.n, p.k, kWide / 2, kDeep) ||
      !describe(&d, p.d, p.d_dtype, p.m, p.n, kTall / 2, kLine) ||
      !describe(&d_rest, p.d, p.d_dtype, p.m, p.n, kTall / 2, kRest ? kRest : kLine)) {
    return cudaErrorInvalidValue;
  }
  const int rounds = static_cast<int>(ceil_div(p.k, kStages * kDeep));  // zeros beyond k
  const Product of{static_cast<int>(p.m),
                   static_cast<int>(p.n),
                   rounds,
                   static_cast<const float*>(p.a_scale_inv),
                   static_cast<const float*>(p.b_scale_inv),
                   p.c != nullptr};
  return launch({current_device().multiprocessors / 2 * 2, kThreads, Shared<kWide>::kBytes}, stream,
                product<kWide, kPair, T>, a, b, d, d_rest, of);
}

template <Fp8Pair kPair, typename T>
cudaError_t run_in_best_width(const CublasLtProduct& p, cudaStream_t stream) {
  const auto time = [&](int64_t wide) {
    const int64_t pairs = ceil_div(p.m, 2 * kTall) * ceil_div(p.n, wide);
    return ceil_div(pairs, current_device().multiprocessors / 2) * wide;
  };
  return time(208) <= time(192) ? run<208, kPair, T>(p, stream) : run<192, kPair, T>(p, stream);
}

template <Fp8Pair kPair>
cudaError_t run_into(const CublasLtProduct& p, cudaStream_t stream) {
  return p.d_dtype == DType::F32 ? run_in_best_width<kPair, float>(p, stream)
                                 : run_in_best_width<kPair, bf16>(p, stream);
}

}  // namespace

bool has_fp8_product(const CublasLtProduct& p) {
#ifdef TE_HOPPER
  const bool pair = is_fp8(p.a_dtype) && is_fp8(p.b_dtype) && !(p.a_dtype == p.b_dtype && p.a_dtype == DType::F8E5M2);
  const bool plain = !p.bias && !p.amax && !p.d_scale;
  const bool d = p.d_dtype == DType::F32 ? !p.c || p.c_dtype == DType::F32 : p.d_dtype == DType::BF16 && !p.c;
  // The copy engine takes arrays and rows at multiples of 16 bytes.
  const bool lies = aligned(p.a) && aligned(p.b) && aligned(p.d) && p.k % 16 == 0 && p.n % 8 == 0;
  const bool sizes = p.k > kStages * kDeep && std::max({p.m, p.n, p.k}) < INT32_MAX;
  return pair && plain && d && lies && sizes && p.split_accumulator && current_device().architecture == 90 && encoder();
#else
  static_cast<void>(p);
  return false;
#endif
}

cudaError_t fp8_product(const CublasLtProduct& p, cudaStream_t stream) {
  if (p.a_dtype == p.b_dtype) return run_into<Fp8Pair::kE4M3E4M3>(p, stream);
  return p.a_dtype == DType::F8E5M2 ? run_into<Fp8Pair::kE5M2E4M3>(p, stream) : run_into<Fp8Pair::kE4M3E5M2>(p, stream);
}

}  // namespace te

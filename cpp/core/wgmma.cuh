// Hopper's matrix instruction on FP8: acc[64, kWide] (+)= a[64, 32] b[kWide, 32]^T by the 128 threads of a warp group.
//
// Both operands lie in shared memory, in rows of 128 bytes that the copy engine has swizzled. Of a thread's sums, those
// at 4 j + 2 h + i are of row 16 warp + lane / 4 + 8 h and column 8 j + 2 (lane % 4) + i.
#pragma once

#include <cstdint>

namespace te {

enum class Fp8Pair { kE4M3E4M3, kE4M3E5M2, kE5M2E4M3 };

// The shared memory that an instruction reads from `address` on: its swizzle, and 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ uint64_t operand_at(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// `add` 0: in place of what acc holds.
template <int kWide, Fp8Pair kPair>
__device__ __forceinline__ void multiply_fp8(float (&acc)[kWide / 2], uint64_t a, uint64_t b, int add);

#define TE_TEN(tens)                                                                                                \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens "6, %" #tens "7, %" #tens \
  "8, %" #tens "9, "
#define TE_FOUR(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define TE_SIXTEEN(i) TE_FOUR(i), TE_FOUR(i + 4), TE_FOUR(i + 8), TE_FOUR(i + 12)
#define TE_UP_TO_90 TE_TEN() TE_TEN(1) TE_TEN(2) TE_TEN(3) TE_TEN(4) TE_TEN(5) TE_TEN(6) TE_TEN(7) TE_TEN(8)
#define TE_NINETY_SIX TE_SIXTEEN(0), TE_SIXTEEN(16), TE_SIXTEEN(32), TE_SIXTEEN(48), TE_SIXTEEN(64), TE_SIXTEEN(80)

#define TE_MULTIPLY_FP8(wide, pair, dtypes, registers, at_a, at_b, at_add, ...)                                       \
  template <>                                                                                                         \
  __device__ __forceinline__ void multiply_fp8<wide, pair>(float (&acc)[wide / 2], uint64_t a, uint64_t b, int add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " at_add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #wide       \
                 "k32.f32." dtypes " {" registers "}, " at_a ", " at_b ", add, 1, 1;\n}\n"                            \
                 : __VA_ARGS__                                                                                        \
                 : "l"(a), "l"(b), "r"(add));                                                                         \
  }
#define TE_WIDTHS(pair, dtypes)                                                                                      \
  TE_MULTIPLY_FP8(192, pair, dtypes, TE_UP_TO_90 "%90, %91, %92, %93, %94, %95", "%96", "%97", "%98", TE_NINETY_SIX) \
  TE_MULTIPLY_FP8(208, pair, dtypes, TE_UP_TO_90 TE_TEN(9) "%100, %101, %102, %103", "%104", "%105", "%106",         \
                  TE_NINETY_SIX, TE_FOUR(96), TE_FOUR(100))
TE_WIDTHS(Fp8Pair::kE4M3E4M3, "e4m3.e4m3")
TE_WIDTHS(Fp8Pair::kE4M3E5M2, "e4m3.e5m2")
TE_WIDTHS(Fp8Pair::kE5M2E4M3, "e5m2.e4m3")
#undef TE_WIDTHS
#undef TE_MULTIPLY_FP8
#undef TE_NINETY_SIX
#undef TE_UP_TO_90
#undef TE_SIXTEEN
#undef TE_FOUR
#undef TE_TEN

// Before the first instruction that reads registers or shared memory which this warp group wrote.
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the groups of instructions are not done.
template <int kPending>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading sums before the wait that is ahead of this.
template <int kCount>
__device__ __forceinline__ void touch(float (&acc)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

}  // namespace te

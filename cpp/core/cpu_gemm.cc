// Inner kernels of matrix products for AMX, AVX-512, AVX2 + FMA and any other processor, chosen at run time.
//
//   level      tile    unit     flop/cycle/core at best
//   amx        32x32   2 bf16   1024 (4 tiles of 16x16 accumulate, 2 + 2 tiles of a and b feed them)
//   avx512      8x32   1 f32      64 (16 accumulators: two FMA units of latency 4 need 8)
//   avx2        6x16   1 f32      32 (12 accumulators of 16 registers)
//   portable    4x8    1 f32      16 with NEON, 8 with SSE2
//
// AMX sums in f32, rounding to nearest even, and takes denormals, of bf16 operands and of sums, as zero. FP8 has
// no value that bf16 holds as a denormal. VDPBF16PS of AVX512_BF16 is no level: on Sapphire Rapids it does half of
// what f32 FMA does.
#include "core/cpu_gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define TE_X86 1
#include <cpuid.h>
#include <immintrin.h>
#if defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define TE_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace te {
namespace {

// ---- portable: vectors of 16 bytes, which every 64-bit processor has --------------------------------

typedef float Float4 __attribute__((vector_size(16), aligned(4)));

inline Float4 multiply_add(Float4 sum, float a, Float4 b) {
#ifdef __aarch64__
  return vfmaq_n_f32(sum, b, a);
#else
  return sum + a * b;
#endif
}

constexpr int kPortableRows = 4, kPortableVectors = 2;

void multiply_portable(const uint32_t* a_units, int64_t a_stride, int64_t panels, const uint32_t* b_units,
                       int64_t units, float* acc, int64_t ld, bool fresh) {
  constexpr int R = kPortableRows, V = kPortableVectors;
  for (int64_t p = 0; p < panels; ++p, acc += R * ld, a_units += a_stride) {
    const float* a = reinterpret_cast<const float*>(a_units);
    const float* b = reinterpret_cast<const float*>(b_units);
    Float4 sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] = fresh ? Float4{} : *reinterpret_cast<Float4*>(acc + r * ld + v * 4);
    }
    for (int64_t k = 0; k < units; ++k, b += V * 4) {
      for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
          sum[r][v] = multiply_add(sum[r][v], a[r * units + k], *reinterpret_cast<const Float4*>(b + v * 4));
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) *reinterpret_cast<Float4*>(acc + r * ld + v * 4) = sum[r][v];
    }
  }
}

template <int kColumns>
void transpose_portable(const uint32_t* rows, int64_t stride, int64_t units, uint32_t* out) {
  for (int64_t k = 0; k < units; ++k) {
    for (int64_t n = 0; n < kColumns; ++n) out[k * kColumns + n] = rows[n * stride + k];
  }
}

constexpr CpuGemmKernel kPortable{
    "portable", kPortableRows, kPortableVectors * 4, 1, 1, multiply_portable, transpose_portable<kPortableVectors * 4>};

#ifdef TE_X86
// ---- AVX2 with FMA ----------------------------------------------------------------------------------

constexpr int kAvx2Rows = 6, kAvx2Vectors = 2;

__attribute__((target("avx2,fma"))) void multiply_avx2(const uint32_t* a_units, int64_t a_stride, int64_t panels,
                                                       const uint32_t* b_units, int64_t units, float* acc, int64_t ld,
                                                       bool fresh) {
  constexpr int R = kAvx2Rows, V = kAvx2Vectors;
  for (int64_t p = 0; p < panels; ++p, acc += R * ld, a_units += a_stride) {
    const float* a = reinterpret_cast<const float*>(a_units);
    const float* b = reinterpret_cast<const float*>(b_units);
    __m256 sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] = fresh ? _mm256_setzero_ps() : _mm256_loadu_ps(acc + r * ld + v * 8);
    }
    for (int64_t k = 0; k < units; ++k, b += V * 8) {
      __m256 column[V];
      for (int v = 0; v < V; ++v) column[v] = _mm256_loadu_ps(b + v * 8);
      for (int r = 0; r < R; ++r) {
        const __m256 row = _mm256_set1_ps(a[r * units + k]);
        for (int v = 0; v < V; ++v) sum[r][v] = _mm256_fmadd_ps(row, column[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) _mm256_storeu_ps(acc + r * ld + v * 8, sum[r][v]);
    }
  }
}

constexpr CpuGemmKernel kAvx2{
    "avx2", kAvx2Rows, kAvx2Vectors * 8, 1, 1, multiply_avx2, transpose_portable<kAvx2Vectors * 8>};

// ---- AVX-512 ----------------------------------------------------------------------------------------

constexpr int kAvx512Rows = 8, kAvx512Vectors = 2;

__attribute__((target("avx512f"))) void multiply_avx512(const uint32_t* a_units, int64_t a_stride, int64_t panels,
                                                        const uint32_t* b_units, int64_t units, float* acc, int64_t ld,
                                                        bool fresh) {
  constexpr int R = kAvx512Rows, V = kAvx512Vectors;
  for (int64_t p = 0; p < panels; ++p, acc += R * ld, a_units += a_stride) {
    const float* a = reinterpret_cast<const float*>(a_units);
    const float* b = reinterpret_cast<const float*>(b_units);
    __m512 sum[R][V];
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) sum[r][v] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(acc + r * ld + v * 16);
    }
    for (int64_t k = 0; k < units; ++k, b += V * 16) {
      __m512 column[V];
      for (int v = 0; v < V; ++v) column[v] = _mm512_loadu_ps(b + v * 16);
      for (int r = 0; r < R; ++r) {
        const __m512 row = _mm512_set1_ps(a[r * units + k]);
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(row, column[v], sum[r][v]);
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(acc + r * ld + v * 16, sum[r][v]);
    }
  }
}

// A 16x16 block is transposed by interleaving row i with row i + 8, four times.
template <int kColumns>
__attribute__((target("avx512f"))) void transpose_avx512(const uint32_t* rows, int64_t stride, int64_t units,
                                                         uint32_t* out) {
  static_assert(kColumns % 16 == 0, "whole vectors");
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  for (int64_t n = 0; n < kColumns; n += 16) {
    for (int64_t k = 0; k < units; k += 16) {
      const int64_t width = std::min<int64_t>(16, units - k);
      const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1u);
      __m512i block[16], next[16];
      for (int i = 0; i < 16; ++i) block[i] = _mm512_maskz_loadu_epi32(mask, rows + (n + i) * stride + k);
      for (int round = 0; round < 4; ++round) {
        for (int i = 0; i < 8; ++i) {
          next[2 * i] = _mm512_permutex2var_epi32(block[i], low, block[i + 8]);
          next[2 * i + 1] = _mm512_permutex2var_epi32(block[i], high, block[i + 8]);
        }
        for (int i = 0; i < 16; ++i) block[i] = next[i];
      }
      for (int64_t i = 0; i < width; ++i) _mm512_storeu_si512(out + (k + i) * kColumns + n, block[i]);
    }
  }
}

constexpr CpuGemmKernel kAvx512{
    "avx512", kAvx512Rows, kAvx512Vectors * 16, 1, 1, multiply_avx512, transpose_avx512<kAvx512Vectors * 16>};
#endif

#ifdef TE_AMX
// ---- AMX, bf16 --------------------------------------------------------------------------------------

__attribute__((target("amx-tile,amx-bf16"))) void multiply_amx(const uint32_t* a, int64_t a_stride, int64_t panels,
                                                               const uint32_t* b, int64_t units, float* acc, int64_t ld,
                                                               bool fresh) {
  // Eight tiles of 16 rows of 64 bytes.
  alignas(64) static constexpr struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } kTiles;
  static_assert(sizeof(kTiles) == 64, "the layout that LDTILECFG reads");
  _tile_loadconfig(&kTiles);
  const int64_t acc_bytes = ld * 4, a_bytes = units * 4;
  for (int64_t p = 0; p < panels; ++p, acc += 32 * ld, a += a_stride) {
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, acc, acc_bytes);
      _tile_loadd(1, acc + 16, acc_bytes);
      _tile_loadd(2, acc + 16 * ld, acc_bytes);
      _tile_loadd(3, acc + 16 * ld + 16, acc_bytes);
    }
    for (int64_t k = 0; k < units; k += 16) {
      _tile_loadd(4, a + k, a_bytes);
      _tile_loadd(5, a + 16 * units + k, a_bytes);
      _tile_loadd(6, b + k * 32, 128);
      _tile_loadd(7, b + k * 32 + 16, 128);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, acc, acc_bytes);
    _tile_stored(1, acc + 16, acc_bytes);
    _tile_stored(2, acc + 16 * ld, acc_bytes);
    _tile_stored(3, acc + 16 * ld + 16, acc_bytes);
  }
  _tile_release();
}

constexpr CpuGemmKernel kAmx{"amx", 32, 32, 2, 16, multiply_amx, transpose_avx512<32>};

// The processor has it, and Linux lets this process use its 8 KiB of state.
bool amx_usable() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

CpuGemmKernels choose() {
  // From the lowest level up; an f32 product takes the best level that has an f32 unit.
  std::vector<const CpuGemmKernel*> levels{&kPortable};
#ifdef TE_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) levels.push_back(&kAvx2);
  if (__builtin_cpu_supports("avx512f")) levels.push_back(&kAvx512);
#endif
#ifdef TE_AMX
  if (levels.back() == &kAvx512 && amx_usable()) levels.push_back(&kAmx);
#endif
  CpuGemmKernels chosen{nullptr, nullptr, ""};
  const char* wanted = std::getenv("TE_CPU_ISA");
  std::string names;
  for (const CpuGemmKernel* level : levels) {
    if (level->k_per_unit == 1) chosen.f32 = level;
    chosen.bf16 = level;
    names += std::string(names.empty() ? "" : ", ") + level->name;
    if (wanted && std::strcmp(wanted, level->name) == 0) return chosen;
  }
  if (wanted && *wanted) {
    chosen.error = "TE_CPU_ISA: expected one of " + names + " on this processor, got " + wanted;
  }
  return chosen;
}

}  // namespace

const CpuGemmKernels& cpu_gemm_kernels() {
  static const CpuGemmKernels kernels = choose();
  return kernels;
}

}  // namespace te

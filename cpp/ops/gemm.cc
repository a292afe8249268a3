// The matrix product on the CPU, in two parallel passes.
//
// 1. Pack: a and b are converted to what the inner kernel multiplies (f32, or bf16 in pairs) and laid out in
//    panels of its tile's height and width, split along k into blocks of kUnits. Each element is read once.
// 2. Multiply: a task owns a block of d of up to kRows x kColumns. Its f32 sums stay in the second-level
//    cache over all blocks of k; within a block of k, a panel of b stays in the first level while the panels
//    of a pass by. Then scale, bias, c, cast and amax, row by row, while the sums are at hand.
// The order of an element's sum depends on K alone, so neither the other sizes nor the number of threads
// change a bit of the result.
#include "ops/gemm.h"

#include <atomic>

#include "core/cpu_gemm.h"
#include "core/parallel.h"
#include "core/rows.h"
#include "core/scratch.h"

namespace te {

namespace {

constexpr int64_t kUnits = 256;                 // of a block of k: 32 KiB of b for a tile 32 wide
constexpr int64_t kRows = 128, kColumns = 192;  // of a task's block of d: 96 KiB of sums
constexpr int64_t kSerial = 1 << 19;            // multiply-adds below which waking a thread costs more

// ---- pack -------------------------------------------------------------------------------------------

// To bf16, of values that it holds exactly.
template <typename T>
TE_SIMD void bf16_row(const T* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<uint16_t>(bits_of(to_float(x[i])) >> 16);
}

// One operand: where it is, and how it is cut into panels.
struct Packing {
  const CpuGemmKernel& kernel;
  Matrix x;
  int64_t height;   // rows of a panel
  bool transposed;  // b: units before rows within a panel
  uint32_t* packed;

  int64_t panels() const { return ceil_div(x.rows, height); }
  int64_t units() const {
    const int64_t step = kernel.k_per_unit * kernel.unit_step;
    return ceil_div(x.cols, step) * kernel.unit_step;
  }
  int64_t panel_size() const { return height * units(); }
  uint32_t* block(int64_t panel, int64_t first_unit) const {
    return packed + panel * panel_size() + height * first_unit;
  }
};

// Element is what a unit consists of: float or uint16_t (bf16).
template <typename T, typename Element>
void pack_panel(const Packing& p, int64_t panel) {
  constexpr int64_t kPerUnit = sizeof(uint32_t) / sizeof(Element);
  constexpr int64_t kTallest = 64;
  alignas(64) uint32_t staged[kTallest * kUnits];
  const int64_t rows = std::min(p.height, p.x.rows - panel * p.height);
  for (int64_t u = 0; u < p.units(); u += kUnits) {
    const int64_t units = std::min(kUnits, p.units() - u);
    const int64_t first = u * kPerUnit;
    const int64_t count = std::min(units * kPerUnit, p.x.cols - first);
    uint32_t* rows_out = p.transposed ? staged : p.block(panel, u);
    for (int64_t r = 0; r < rows; ++r) {
      Element* row = reinterpret_cast<Element*>(rows_out + r * units);
      const T* x = p.x.as<T>() + (panel * p.height + r) * p.x.cols + first;
      if constexpr (kPerUnit == 2) {
        bf16_row(x, row, count);
      } else {
        widen_row(x, row, count);
      }
      std::fill(row + count, row + units * kPerUnit, Element{});
    }
    std::fill(rows_out + rows * units, rows_out + p.height * units, 0u);
    if (p.transposed) p.kernel.transpose(staged, units, units, p.block(panel, u));
  }
}

void pack_panel(const Packing& p, int64_t panel) {
  with_any(p.x.dtype, [&](auto t) {
    using T = decltype(t);
    if constexpr (is_fp8_v<T> || std::is_same_v<T, bf16>) {
      if (p.kernel.k_per_unit == 2) {
        pack_panel<T, uint16_t>(p, panel);
        return ffi::Error::Success();
      }
    }
    pack_panel<T, float>(p, panel);
    return ffi::Error::Success();
  });
}

// ---- epilogue ---------------------------------------------------------------------------------------

template <typename T>
TE_SIMD void add_part(const T* x, float part, float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] += part * to_float(x[i]);
}

TE_SIMD void scale_row(float* sum, float a_scale_inv, float b_scale_inv, const float* bias, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = sum[i] * a_scale_inv * b_scale_inv + bias[i];
}

struct Epilogue {
  float a_scale_inv, b_scale_inv, c_scale, d_scale;
  const float* bias;  // f32[N], zeros where there is none
  const In& c;
  Matrix d;
  bool amax;

  // Finishes d[row, first : first + n] from its sums; returns the bits of max |value| where wanted.
  uint32_t finish(float* sum, int64_t row, int64_t first, int64_t n) const {
    const int64_t at = row * d.cols + first;
    scale_row(sum, a_scale_inv, b_scale_inv, bias + first, n);
    if (present(c)) {
      with_float(c.element_type(), [&](auto t) {
        add_part(static_cast<const decltype(t)*>(c.untyped_data()) + at, c_scale, sum, n);
        return ffi::Error::Success();
      });
    }
    uint32_t most = 0;
    with_any(d.dtype, [&](auto t) {
      using T = decltype(t);
      if constexpr (is_fp8_v<T>) {
        most = cast_row<float, T>(sum, d_scale, d.as<uint8_t>() + at, n);
      } else {
        narrow_row(sum, d.as<T>() + at, n);
        if (amax) most = amax_row(d.as<T>() + at, n);
      }
      return ffi::Error::Success();
    });
    return most;
  }
};

// ---- multiply ---------------------------------------------------------------------------------------

// How d is cut into tasks: as large as the caches hold, smaller where threads would stand idle.
struct Blocks {
  int64_t rows, columns;  // of a block, in elements
  int64_t down, across;   // how many blocks

  Blocks(const CpuGemmKernel& kernel, const GemmShape& s, int64_t threads) {
    const int64_t enough = threads == 1 ? 1 : 2 * threads;
    for (int64_t tall = kRows / kernel.mr, wide = kColumns / kernel.nr;;) {
      rows = tall * kernel.mr;
      columns = wide * kernel.nr;
      down = ceil_div(s.m, rows);
      across = ceil_div(s.n, columns);
      if (down * across >= enough || (tall == 1 && wide == 1)) return;
      int64_t& longer = wide == 1 || (tall > 1 && rows > columns) ? tall : wide;
      longer = (longer + 1) / 2;
    }
  }
};

uint32_t multiply_block(const Packing& a, const Packing& b, const Epilogue& epilogue, int64_t row, int64_t column,
                        const Blocks& blocks) {
  const CpuGemmKernel& kernel = a.kernel;
  alignas(64) float sums[kRows * kColumns];
  const int64_t rows = std::min(blocks.rows, a.x.rows - row), columns = std::min(blocks.columns, b.x.rows - column);
  if (a.units() == 0) std::fill_n(sums, rows * blocks.columns, 0.f);
  for (int64_t u = 0; u < a.units(); u += kUnits) {
    const int64_t units = std::min(kUnits, a.units() - u);
    for (int64_t n = 0; n < columns; n += kernel.nr) {
      kernel.multiply(a.block(row / kernel.mr, u), a.panel_size(), ceil_div(rows, kernel.mr),
                      b.block((column + n) / kernel.nr, u), units, sums + n, blocks.columns, /*fresh=*/u == 0);
    }
  }
  uint32_t most = 0;
  for (int64_t r = 0; r < rows; ++r) {
    most = std::max(most, epilogue.finish(sums + r * blocks.columns, row + r, column, columns));
  }
  return most;
}

}  // namespace

ffi::Error Gemm(ffi::ThreadPool pool, In a, In b, In a_scale_inv, In b_scale_inv, In bias, In c, In d_scale, Out d,
                Out amax, GemmAttributes attributes) {
  const GemmOperands in{a, b, a_scale_inv, b_scale_inv, bias, c, d_scale};
  const Check check = check_gemm(in, d, amax, attributes.k_axes);
  if (check.failed()) return check.error();
  const CpuGemmKernels& kernels = cpu_gemm_kernels();
  if (!kernels.error.empty()) return ffi::Error::InvalidArgument("te_gemm: " + kernels.error);

  const GemmShape shape = gemm_shape(in, attributes.k_axes);
  const bool fits_bf16 = is_fp8(a.element_type()) || a.element_type() == DType::BF16;
  const CpuGemmKernel& kernel = fits_bf16 ? *kernels.bf16 : *kernels.f32;
  Packing pack_a{kernel, matrix(a, attributes.k_axes), kernel.mr, /*transposed=*/false, nullptr};
  Packing pack_b{kernel, matrix(b, attributes.k_axes), kernel.nr, /*transposed=*/true, nullptr};
  const int64_t a_units = pack_a.panels() * pack_a.panel_size(), b_units = pack_b.panels() * pack_b.panel_size();
  const Scratch scratch((a_units + b_units + shape.n) * sizeof(uint32_t));
  if (!scratch.as<void>() && a_units + b_units + shape.n) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "te_gemm: no memory for the packed operands");
  }
  pack_a.packed = scratch.as<uint32_t>();
  pack_b.packed = pack_a.packed + a_units;
  float* bias_f32 = reinterpret_cast<float*>(pack_b.packed + b_units);
  std::fill_n(bias_f32, shape.n, 0.f);
  if (present(bias)) {
    with_float(bias.element_type(), [&](auto t) {
      add_row(static_cast<const decltype(t)*>(bias.untyped_data()), bias_f32, shape.n);
      return ffi::Error::Success();
    });
  }
  const auto scale_of = [](const In& scale) { return absent(scale) ? 1.f : *scale.typed_data<float>(); };
  const Epilogue epilogue{scale_of(a_scale_inv),
                          scale_of(b_scale_inv),
                          attributes.c_scale,
                          scale_of(d_scale),
                          bias_f32,
                          c,
                          Matrix{d->untyped_data(), d->element_type(), shape.m, shape.n},
                          present(amax)};

  parallel_rows(pool, pack_a.panels() + pack_b.panels(), (pack_a.panel_size() + pack_b.panel_size()) / 2,
                [&](int64_t first, int64_t last) {
                  for (int64_t i = first; i < last; ++i) {
                    i < pack_a.panels() ? pack_panel(pack_a, i) : pack_panel(pack_b, i - pack_a.panels());
                  }
                });
  const bool serial = shape.m * shape.n * shape.k < kSerial;
  const Blocks blocks(kernel, shape, serial ? 1 : pool.num_threads());
  std::atomic<uint32_t> most{0};
  parallel_for(pool, blocks.down * blocks.across, [&](int64_t i) {
    raise(most, multiply_block(pack_a, pack_b, epilogue, i / blocks.across * blocks.rows,
                               i % blocks.across * blocks.columns, blocks));
  });
  if (present(amax)) *amax->typed_data<float>() = float_of(most);
  return ffi::Error::Success();
}

}  // namespace te

TE_ATTRIBUTES(te::GemmAttributes, TE_ATTRIBUTE(int64_t, k_axes), TE_ATTRIBUTE(bool, split_accumulator),
              TE_ATTRIBUTE(std::string_view, k_first), TE_ATTRIBUTE(float, c_scale));

TE_HANDLER(gemm, Gemm)

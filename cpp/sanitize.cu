// Every CUDA kernel of the library, called by its handler without XLA, for compute-sanitizer: under it XLA itself takes
// minutes, and these seconds. What the kernels compute is checked by the tests; here only how they touch memory.
//
//   benchmarks/gpu.sh OUT sanitize
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <set>
#include <string>
#include <vector>

#include "core/cublaslt.h"
#include "core/fp8_product.h"
#include "core/tile.cuh"
#include "ops/activation.h"
#include "ops/dropout.h"
#include "ops/gemm.h"
#include "ops/layernorm.h"
#include "ops/packed_rows.h"
#include "ops/quantize.h"
#include "ops/rope.h"
#include "ops/softmax.h"
#include "ops/state.h"
#include "ops/transpose.h"

namespace te {

ffi::Error Quantize(cudaStream_t, In, In, Out, Out, Out, Out, Out, Out, Out, QuantizeAttributes);
ffi::Error QuantizeStack(cudaStream_t, In, In, In, In, Out, Out, Out, Out, Out, Out, Out, Scaling);
ffi::Error Measure(cudaStream_t, In, In, In, Out, Out);
ffi::Error Dequantize(cudaStream_t, In, In, Out);
ffi::Error Transpose(cudaStream_t, In, Out, TransposeAttributes);
ffi::Error ActivationFwd(cudaStream_t, In, In, In, Out, Out, Out, Out, Out, ActivationAttributes);
ffi::Error ActivationBwd(cudaStream_t, In, In, In, In, Out, Out, Out, Out, Out, Out, Out, ActivationAttributes);
ffi::Error Dropout(cudaStream_t, In, In, In, In, In, Out, DropoutAttributes);
ffi::Error LayerNormFwd(cudaStream_t, In, In, In, In, In, In, Out, Out, Out, Out, Out, Out, Out, NormFwdAttributes);
ffi::Error RmsNormFwd(cudaStream_t, In, In, In, In, Out, Out, Out, Out, Out, Out, NormFwdAttributes);
ffi::Error LayerNormBwd(cudaStream_t, In, In, In, In, In, In, Out, Out, Out, Out, NormBwdAttributes);
ffi::Error RmsNormBwd(cudaStream_t, In, In, In, In, In, Out, Out, Out, NormBwdAttributes);
ffi::Error RopeRotate(cudaStream_t, In, In, In, Out, RopeAttributes);
ffi::Error RopeRotateQkv(cudaStream_t, In, In, In, Out, RopeAttributes);
ffi::Error SoftmaxFwd(cudaStream_t, In, In, In, Out, Out, SoftmaxAttributes);
ffi::Error SoftmaxBwd(cudaStream_t, In, In, Out, Out, SoftmaxAttributes);
ffi::Error UpdateState(cudaStream_t, In, In, In, In, Out, StateAttributes);
ffi::Error Gemm(cudaStream_t, In, In, In, In, In, In, In, Out, Out, Out, GemmAttributes);

namespace {

constexpr DType kF32 = DType::F32, kBf16 = DType::BF16, kE4M3 = DType::F8E4M3FN, kE5M2 = DType::F8E5M2;
constexpr int64_t kBins = 512, kHistoryLength = 16;

void must(bool worked, const char* what, const std::string& why) {
  if (worked) return;
  std::printf("%s: %s\n", what, why.c_str());
  std::exit(1);
}
void must(cudaError_t error, const char* what) { must(error == cudaSuccess, what, cudaGetErrorString(error)); }

// Numbers about 1 of either sign; as integers, truths and FP8 codes what their bits are.
__global__ void fill(uint8_t* data, DType dtype, int64_t size) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i >= size) return;
  const uint32_t hash = static_cast<uint32_t>(i + 1) * 2654435761u, sign = hash & 0x80000000u;
  if (dtype == DType::F32) {
    reinterpret_cast<uint32_t*>(data)[i] = sign | 0x3f000000u | (hash >> 9 & 0xffffffu);
  } else if (dtype == DType::BF16) {
    reinterpret_cast<uint16_t*>(data)[i] = static_cast<uint16_t>((sign | 0x3f000000u | (hash >> 9 & 0xffffffu)) >> 16);
  } else if (dtype == DType::S32 || dtype == DType::U32) {
    reinterpret_cast<int32_t*>(data)[i] = static_cast<int32_t>(i);
  } else {
    data[i] = static_cast<uint8_t>(dtype == DType::PRED ? hash >> 31 : hash >> 24 & 0xbf);
  }
}

// Buffers of one call, each an allocation of its own: an access past its end is seen.
class Memory {
 public:
  using Dims = std::vector<int64_t>;

  ~Memory() {
    for (const XLA_FFI_Buffer& buffer : buffers_) cudaFree(buffer.data);
  }
  In in(DType dtype, Dims dims) { return ffi::AnyBuffer(&make(dtype, std::move(dims))); }
  Out out(DType dtype, Dims dims) { return Out(in(dtype, std::move(dims))); }
  In none() { return in(kF32, {0}); }
  Out nothing() { return out(kF32, {0}); }
  Out scalar() { return out(kF32, {}); }
  Out bytes(int64_t size) { return out(DType::U8, {size}); }
  In states() { return in(kF32, {3, kHistory + kHistoryLength}); }

 private:
  XLA_FFI_Buffer& make(DType dtype, Dims dims) {
    int64_t size = 1;
    for (const int64_t n : dims) size *= n;
    const int64_t width = static_cast<int64_t>(ffi::ByteWidth(dtype));
    void* data = nullptr;
    must(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(size * width, 1))), "memory");
    if (size) {
      fill<<<static_cast<unsigned>((size + 255) / 256), 256>>>(static_cast<uint8_t*>(data), dtype, size);
    }
    XLA_FFI_Buffer buffer = {};
    buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffer.dtype = static_cast<XLA_FFI_DataType>(dtype);
    buffer.data = data;
    dims_.push_back(std::move(dims));
    buffer.rank = static_cast<int64_t>(dims_.back().size());
    buffer.dims = dims_.back().data();
    buffers_.push_back(buffer);
    return buffers_.back();
  }
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<Dims> dims_;
};

int calls = 0;

void check(const char* what, const ffi::Error& error) {
  must(error.success(), what, error.message());
  must(cudaDeviceSynchronize(), what);
  ++calls;
}

// The ways in which a kernel that casts may be asked for its scale and its maximum.
struct Way {
  const char* scale_from;
  bool report;
  Scaling scaling() const { return {scale_from, 0.f, false, 1.f, false, 2}; }
  In scale(Memory& m) const { return scale_from == std::string_view("states") ? m.states() : m.in(kF32, {}); }
  Out amax(Memory& m) const { return report ? m.nothing() : m.scalar(); }
  Out reported(Memory& m) const { return report ? m.out(kF32, {kBins}) : m.nothing(); }
};
constexpr Way kWays[] = {{"scale", false}, {"amax", true}, {"states", true}};

void casts(int64_t rows, int64_t cols, DType dtype) {
  for (const Way& way : kWays) {
    Memory m;
    check("quantize", Quantize(nullptr, m.in(dtype, {rows, cols}), way.scale(m), m.out(kE4M3, {rows, cols}),
                               m.out(kE4M3, {cols, rows}), way.amax(m), m.out(kF32, {cols}), way.reported(m),
                               m.scalar(), m.bytes(tile_partials(rows, cols)), {way.scaling(), 1}));
    if (cols % 8) continue;
    const In x = m.in(dtype, {rows, cols});
    check("quantize_stack",
          QuantizeStack(nullptr, x, x, x, way.scale(m), m.out(kE5M2, {rows, 3, cols}), m.out(kE5M2, {3, cols, rows}),
                        way.amax(m), m.out(kF32, {3, cols}), way.reported(m), m.scalar(),
                        m.bytes(3 * tile_partials(rows, cols)), way.scaling()));
  }
  Memory m;
  const In x = m.in(dtype, {rows, cols});
  check("measure", Measure(nullptr, x, x, m.none(), m.scalar(), m.nothing()));
  check("measure", Measure(nullptr, x, m.none(), m.none(), m.nothing(), m.out(kF32, {kBins})));
  check("transpose", Transpose(nullptr, m.in(kE4M3, {rows, cols}), m.out(kE4M3, {cols, rows}), {1}));
  check("dequantize", Dequantize(nullptr, m.in(kE5M2, {rows, cols}), m.in(kF32, {}), m.out(dtype, {rows, cols})));
}

void activations(int64_t rows, int64_t cols, DType dtype) {
  for (const char* name : {"gelu", "silu_linear", "relu", "clamped_silu_clamped_linear"}) {
    const int64_t inputs = parse_activation(name)->inputs();
    const auto attributes = [&](const Way& way) { return ActivationAttributes{way.scaling(), name, 7.f, 1.702f, 1.f}; };
    for (const bool biased : {false, true}) {
      for (const Way& way : kWays) {
        Memory m;
        const In z = m.in(dtype, {rows, inputs, cols}), bias = biased ? m.in(kF32, {inputs, cols}) : m.none();
        for (const Out& y : {m.out(kE4M3, {rows, cols}), m.nothing()}) {  // both ways; or the transposed copy alone
          check("activation_fwd", ActivationFwd(nullptr, z, way.scale(m), bias, y, m.out(kE4M3, {cols, rows}),
                                                way.amax(m), way.reported(m), m.scalar(), attributes(way)));
        }
        check("activation_bwd", ActivationBwd(nullptr, m.in(dtype, {rows, cols}), z, way.scale(m), bias,
                                              m.out(kE5M2, {rows, inputs, cols}), m.out(kE5M2, {inputs, cols, rows}),
                                              way.amax(m), m.out(kF32, {inputs, cols}), way.reported(m), m.scalar(),
                                              m.bytes(tile_partials(rows, inputs * cols)), attributes(way)));
      }
      // In high precision; then only measured.
      Memory m;
      const In z = m.in(dtype, {rows, inputs, cols}), bias = biased ? m.in(kF32, {inputs, cols}) : m.none();
      const In dy = m.in(dtype, {rows, cols});
      check("activation_fwd", ActivationFwd(nullptr, z, m.none(), bias, m.out(dtype, {rows, cols}), m.nothing(),
                                            m.nothing(), m.nothing(), m.nothing(), attributes(kWays[0])));
      check("activation_bwd",
            ActivationBwd(nullptr, dy, z, m.none(), bias, m.out(dtype, {rows, inputs, cols}), m.nothing(), m.nothing(),
                          m.out(kF32, {inputs, cols}), m.nothing(), m.nothing(),
                          m.bytes(tile_partials(rows, inputs * cols)), attributes(kWays[0])));
      check("activation_fwd", ActivationFwd(nullptr, z, m.none(), bias, m.nothing(), m.nothing(), m.scalar(),
                                            m.nothing(), m.nothing(), attributes(kWays[0])));
      check("activation_bwd", ActivationBwd(nullptr, dy, z, m.none(), bias, m.nothing(), m.nothing(), m.scalar(),
                                            m.nothing(), m.nothing(), m.nothing(), m.bytes(0), attributes(kWays[0])));
    }
  }
}

void norms(int64_t rows, int64_t cols, DType dtype) {
  for (const Way& way : kWays) {
    Memory m;
    const In x = m.in(dtype, {rows, cols}), gamma = m.in(kF32, {cols});
    const NormFwdAttributes attributes{way.scaling(), 1e-6f, false};
    for (const bool known : {false, true}) {
      const In statistic = known ? m.in(kF32, {rows}) : m.none();
      const auto computed = [&] { return known ? m.nothing() : m.out(kF32, {rows}); };
      for (const bool both : {true, false}) {  // ways; or the transposed copy alone
        const Out y = both ? m.out(kE4M3, {rows, cols}) : m.nothing();
        check("layernorm_fwd",
              LayerNormFwd(nullptr, x, gamma, gamma, way.scale(m), statistic, statistic, y, m.out(kE4M3, {cols, rows}),
                           computed(), computed(), way.amax(m), way.reported(m), m.scalar(), attributes));
        check("rmsnorm_fwd", RmsNormFwd(nullptr, x, gamma, way.scale(m), statistic, y, m.out(kE4M3, {cols, rows}),
                                        computed(), way.amax(m), way.reported(m), m.scalar(), attributes));
      }
    }
  }
  Memory m;
  const In x = m.in(dtype, {rows, cols}), gamma = m.in(kF32, {cols}), of_rows = m.in(kF32, {rows});
  const NormFwdAttributes attributes{kWays[0].scaling(), 1e-6f, false};
  const auto vector = [&] { return m.out(kF32, {cols}); };
  // In high precision; then only measured.
  check("layernorm_fwd",
        LayerNormFwd(nullptr, x, gamma, gamma, m.none(), m.none(), m.none(), m.out(dtype, {rows, cols}), m.nothing(),
                     m.out(kF32, {rows}), m.out(kF32, {rows}), m.nothing(), m.nothing(), m.nothing(), attributes));
  check("layernorm_fwd",
        LayerNormFwd(nullptr, x, gamma, gamma, m.none(), m.none(), m.none(), m.nothing(), m.nothing(),
                     m.out(kF32, {rows}), m.out(kF32, {rows}), m.scalar(), m.nothing(), m.nothing(), attributes));
  check("rmsnorm_fwd", RmsNormFwd(nullptr, x, gamma, m.none(), m.none(), m.nothing(), m.nothing(), m.out(kF32, {rows}),
                                  m.scalar(), m.nothing(), m.nothing(), attributes));
  const int64_t scratch = 8 * cols * std::min<int64_t>(rows, 256);  // `_scratch` in ops/layernorm.py
  check("layernorm_bwd", LayerNormBwd(nullptr, x, x, gamma, of_rows, of_rows, x, m.out(dtype, {rows, cols}), vector(),
                                      vector(), m.bytes(scratch), {true}));
  check("rmsnorm_bwd", RmsNormBwd(nullptr, x, x, gamma, of_rows, m.none(), m.out(dtype, {rows, cols}), vector(),
                                  m.bytes(scratch), {false}));
}

void rotations(int64_t tokens, int64_t features, DType dtype) {
  Memory m;
  const In x = m.in(dtype, {tokens, 3, features});
  const In qkv = m.in(dtype, {tokens, 3, 2, features});
  for (const char* group : {"consecutive", "alternate"}) {
    const In frequencies = m.in(kF32, {features / 4}), positions = m.in(DType::S32, {tokens});
    check("rope_rotate",
          RopeRotate(nullptr, x, frequencies, positions, m.out(dtype, {tokens, 3, features}), {group, true}));
    for (const Out& y : {Out(qkv), m.out(dtype, {tokens, 3, 2, features})}) {
      check("rope_rotate_qkv", RopeRotateQkv(nullptr, qkv, frequencies, positions, y, {group, false}));
    }
  }
}

void dropouts(int64_t rows, int64_t cols, DType dtype) {
  Memory m;
  const In x = m.in(dtype, {rows, cols}), seed = m.in(DType::U32, {2});
  const In row = m.in(DType::S32, {rows}), column = m.in(DType::S32, {cols});
  for (const In& residual : {x, m.none()}) {
    check("dropout", Dropout(nullptr, x, residual, seed, row, column, m.out(dtype, {rows, cols}), {6554, 1.1f}));
  }
}

void softmaxes(int64_t queries, int64_t keys, DType dtype) {
  Memory m;
  const In scores = m.in(dtype, {2, 3, queries, keys}), offset = m.in(kF32, {2, 3});
  const Out y = m.out(dtype, {2, 3, queries, keys}), rest = m.out(kF32, {2, 3, queries});
  for (const In& mask : {m.none(), m.in(DType::PRED, {2, queries, keys})}) {
    for (const bool causal : {false, true}) {
      check("softmax_fwd", SoftmaxFwd(nullptr, scores, mask, offset, y, rest, {0.5f, causal}));
    }
  }
  check("softmax_bwd", SoftmaxBwd(nullptr, scores, scores, y, rest, {0.5f, false}));
}

// Rows of 5 sequences each, of as many tokens as the number of the first one.
void packed_rows(int64_t tokens, int64_t features, DType dtype) {
  Memory m;
  const In x = m.in(dtype, {3, tokens, features}), start = m.in(DType::S32, {3, 5}), length = m.in(DType::S32, {3, 5});
  const auto *starts = start.typed_data<int32_t>(), *lengths = length.typed_data<int32_t>();
  const bool* kept = m.in(DType::PRED, {3}).typed_data<bool>();
  const int64_t width = static_cast<int64_t>(x.size_bytes()) / (3 * tokens);
  for (const bool* of : {kept, static_cast<const bool*>(nullptr)}) {
    must(write_between(nullptr, 3, 5, starts, lengths, of, tokens, width, x.untyped_data()), "write_between");
  }
  const auto rows = [&](int64_t token) {
    return PackedRows{starts, tokens, token, static_cast<int64_t*>(m.bytes(offset_bytes(15))->untyped_data())};
  };
  must(write_offsets(nullptr, 3, 5, rows(1), rows(features), rows(2 * features)), "write_offsets");
  must(cudaDeviceSynchronize(), "packed rows");
  calls += 3;
}

void states(int64_t gemms) {
  Memory m;
  const Memory::Dims dims = {gemms, 3, kHistory + kHistoryLength};
  const auto reports = [&] { return m.in(kF32, {gemms, kBins}); };
  check("update_state", UpdateState(nullptr, m.in(kF32, dims), reports(), reports(), reports(), m.out(kF32, dims),
                                    {448.f, 448.f, 57344.f, 1.f, false}));
}

// Products of which cuBLASLt does a part: the kernels around it.
void products() {
  Memory m;
  const int64_t rows = 40, cols = 36, k = 20;
  check("gemm", Gemm(nullptr, m.in(kE5M2, {rows, k}), m.in(kE5M2, {cols, k}), m.in(kF32, {}), m.in(kF32, {}),
                     m.in(kF32, {cols}), m.in(kBf16, {rows, cols}), m.in(kF32, {}), m.out(kE4M3, {rows, cols}),
                     m.scalar(), m.bytes(kCublasLtScratch + (1 << 20)), {1, true, "", 1.f, {}}));
  for (const int64_t odd : {1, 15, 18, 44}) {
    check("gemm", Gemm(nullptr, m.in(kE4M3, {rows, odd}), m.in(kE4M3, {48, odd}), m.in(kF32, {}), m.in(kF32, {}),
                       m.none(), m.none(), m.none(), m.out(kBf16, {rows, 48}), m.nothing(),
                       m.bytes(kCublasLtScratch + (1 << 20)), {1, true, "", 1.f, {}}));
  }
  check("gemm", Gemm(nullptr, m.in(kE4M3, {64, 64}), m.in(kE4M3, {64, 64}), m.in(kF32, {}), m.in(kF32, {}),
                     m.in(kF32, {64}), m.none(), m.none(), m.out(kBf16, {64, 64}), m.nothing(),
                     m.bytes(kCublasLtScratch + (1 << 20)), {1, false, "", 1.f, {}}));
}

// Our kernel's: edges in every direction, and sums added to what is there.
void long_products(int64_t rows, int64_t cols, int64_t k) {
  for (const auto& [a, b] : {std::pair{kE4M3, kE4M3}, std::pair{kE4M3, kE5M2}, std::pair{kE5M2, kE4M3}}) {
    for (const auto& [d, add] : {std::pair{kF32, false}, std::pair{kF32, true}, std::pair{kBf16, false}}) {
      Memory m;
      CublasLtProduct p = {};
      p.m = rows, p.n = cols, p.k = k;
      p.a_dtype = a, p.b_dtype = b, p.c_dtype = p.d_dtype = d;
      p.split_accumulator = true;
      p.a = m.in(a, {rows, k}).untyped_data(), p.b = m.in(b, {cols, k}).untyped_data();
      p.a_scale_inv = m.in(kF32, {}).untyped_data(), p.b_scale_inv = m.in(kF32, {}).untyped_data();
      p.d = m.out(d, {rows, cols})->untyped_data();
      p.c = add ? p.d : nullptr;
      if (!has_fp8_product(p)) continue;
      must(fp8_product(p, nullptr), "fp8_product");
      must(cudaDeviceSynchronize(), "fp8_product");
      ++calls;
    }
  }
}

}  // namespace
}  // namespace te

// `few`: in one dtype, and one row is left out, for racecheck, which takes minutes; names of parts: those alone.
int main(int count, char** arguments) {
  using namespace te;
  std::set<std::string> parts(arguments + 1, arguments + count);
  const bool all = !parts.erase("few");
  const auto named = [&](const char* part) { return parts.empty() || parts.count(part); };
  for (const DType dtype : all ? std::vector<DType>{kBf16, kF32} : std::vector<DType>{kBf16}) {
    for (const int64_t rows : all ? std::vector<int64_t>{1, 130} : std::vector<int64_t>{130}) {
      for (const int64_t cols : {40, 257, 1024}) {
        if (named("casts")) casts(rows, cols, dtype);
        if (named("activations")) activations(rows, cols, dtype);
      }
      for (const int64_t cols : {40, 257, 1024, 1536, 4096, 16384})
        if (named("norms")) norms(rows, cols, dtype);
      for (const int64_t features : {24, 130}) {
        if (named("rotations")) rotations(rows, features, dtype);
        if (named("packed")) packed_rows(rows, features, dtype);
      }
      for (const int64_t cols : {40, 257})
        if (named("dropouts")) dropouts(rows, cols, dtype);
      for (const int64_t keys : {24, 300, 1000, 1032, 2056, 4104, 8200, 16400})
        if (named("softmaxes")) softmaxes(std::min<int64_t>(rows, 5), keys, dtype);
      std::printf("%d calls\n", calls), std::fflush(stdout);
    }
  }
  if (named("turns")) norms(1200, 16384, kBf16);  // more strips than clusters hold at once
  if (named("states")) states(1), states(5);
  if (named("products")) products(), long_products(300, 240, 1040);
  if (named("products") && all) long_products(4500, 1616, 1552);  // more tiles than clusters run at once
  std::printf("%d calls\n", calls);
  return calls ? 0 : 1;  // no part of that name
}

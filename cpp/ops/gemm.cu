// The matrix product on the GPU: one call of cuBLASLt where it can do it all, which is what training uses.
//
// FP8 wants K in multiples of 16. Any other, as the tokens are that a weight's gradient sums over where a sequence has
// odd length, is filled up with zeros: `pad` copies both operands (2 bytes an element).
//
// It can't do FP8 with N no multiple of 16, E5M2 x E5M2, or some mixtures of dtypes. Those products take
// three steps: FP8 operands to bf16, which holds them exactly (3 bytes an element); the product in bf16 with an
// f32 result; and `finish` for scales, bias, c, cast and amax (4 bytes an element of d, and those of d and c).
#include <algorithm>

#include "core/amax.cuh"
#include "core/cublaslt.h"
#include "ops/gemm.h"

namespace te {

namespace {

constexpr int kThreads = 256;

// ---- Kernels ----------------------------------------------------------------------------------------

// Eight FP8 codes a thread, as bf16.
template <__nv_fp8_interpretation_t kFormat>
__global__ void __launch_bounds__(kThreads) widen(const uint8_t* x, bf16* y, int64_t n, bool vector) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8;
  if (i >= n) return;
  const int count = n - i < 8 ? static_cast<int>(n - i) : 8;
  vector = vector && count == 8;
  uint32_t words[2] = {};
  if (vector) {
    const uint2 both = __ldg(reinterpret_cast<const uint2*>(x + i));
    words[0] = both.x, words[1] = both.y;
  } else {
    for (int j = 0; j < count; ++j) words[j / 4] |= static_cast<uint32_t>(__ldg(x + i + j)) << (j % 4 * 8);
  }
  float v[8];
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const auto codes = static_cast<__nv_fp8x2_storage_t>(words[j / 4] >> (j % 4 * 8));
    const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, kFormat)));
    v[j] = two.x, v[j + 1] = two.y;
  }
  store8(y + i, round8<bf16>(v), count, vector);
}

// Rows of k bytes, each followed by zeros up to `padded`, a multiple of 16. A thread stores 16 bytes, of which it reads
// the 4 or 5 words around them, whose address need be no multiple of anything.
__global__ void __launch_bounds__(kThreads) pad(const uint8_t* x, uint8_t* y, int64_t rows, int64_t k, int64_t padded) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 16;
  if (at >= rows * padded) return;
  const int64_t row = at / padded, col = at - row * padded;
  const uint8_t* const from = x + row * k + col;
  const int count = static_cast<int>(min(k - col, int64_t{16})), shift = reinterpret_cast<uintptr_t>(from) % 4;
  uint32_t words[5] = {};
  const uint8_t* const first = from - shift;  // the word that holds the first byte
  if (first >= x && first + sizeof(words) <= x + rows * k) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = __ldg(reinterpret_cast<const uint32_t*>(first) + i);
  } else {
#pragma unroll
    for (int i = 0; i < 20; ++i) {
      if (i >= shift && i < shift + count) words[i / 4] |= static_cast<uint32_t>(first[i]) << (i % 4 * 8);
    }
  }
  uint32_t out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int here = min(max(count - 4 * i, 0), 4);  // bytes of this word
    out[i] = __funnelshift_r(words[i], words[i + 1], shift * 8) & (here == 4 ? ~0u : (1u << here * 8) - 1);
  }
  *reinterpret_cast<uint4*>(y + at) = make_uint4(out[0], out[1], out[2], out[3]);
}

// A bias in the dtype that cuBLASLt wants.
__global__ void __launch_bounds__(kThreads) convert(const void* x, DType from, void* y, DType to, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  const float value = load1(x, from, i);
  if (to == DType::BF16) {
    static_cast<__nv_bfloat16*>(y)[i] = __float2bfloat16_rn(value);
  } else if (to == DType::F16) {
    static_cast<__half*>(y)[i] = __float2half_rn(value);
  } else {
    static_cast<float*>(y)[i] = value;
  }
}

struct Finish {
  const float* sums;  // [m, n], may be d itself
  const float *a_scale_inv, *b_scale_inv, *d_scale;
  float c_scale;
  const void *bias, *c;
  DType bias_dtype, c_dtype, d_dtype;
  void* d;
  AmaxTarget amax;
  int64_t size, n;
  bool vector;  // c and d are aligned
};

// Stores 8 values as T and returns the largest of `most` and what was stored.
template <typename T>
__device__ __forceinline__ float store_as(void* d, int64_t i, const float (&v)[8], int count, bool vector, float most) {
  const Vec8<T> raw = round8<T>(v);
  store8(static_cast<T*>(d) + i, raw, count, vector);
#pragma unroll
  for (int j = 0; j < 8; ++j) most = max_abs(most, raw[j]);
  return most;
}

// d = cast(sums * a_scale_inv * b_scale_inv + bias + c_scale * c) and its amax, eight neighbours a thread.
__global__ void __launch_bounds__(kThreads) finish(Finish f) {
  __shared__ BlockAmax amax;
  const float a_scale_inv = f.a_scale_inv ? *f.a_scale_inv : 1.f, b_scale_inv = f.b_scale_inv ? *f.b_scale_inv : 1.f;
  const float d_scale = f.d_scale ? *f.d_scale : 1.f;
  float most = 0.f;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 8; i < f.size;
       i += static_cast<int64_t>(gridDim.x) * kThreads * 8) {
    const int count = f.size - i < 8 ? static_cast<int>(f.size - i) : 8;
    const bool vector = f.vector && count == 8;
    float v[8] = {}, c[8] = {};  // zeros beyond count, which no maximum sees
    if (f.c) load8(f.c, f.c_dtype, i, count, vector, c);
    int64_t column = i % f.n;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j >= count) continue;
      const float bias = f.bias ? load1(f.bias, f.bias_dtype, column) : 0.f;
      column = column + 1 == f.n ? 0 : column + 1;
      v[j] =
          __fadd_rn(__fmul_rn(__fmul_rn(f.sums[i + j], a_scale_inv), b_scale_inv), bias) + __fmul_rn(f.c_scale, c[j]);
    }
    if (f.d_dtype == DType::F32) {
      most = store_as<float>(f.d, i, v, count, vector, most);
    } else if (f.d_dtype == DType::BF16) {
      most = store_as<bf16>(f.d, i, v, count, vector, most);
    } else if (f.d_dtype == DType::F16) {
      most = store_as<f16>(f.d, i, v, count, vector, most);
    } else {
      most = max_abs(most, v);
      const uint2 codes = cast8(v, d_scale, f.d_dtype);
      uint8_t* d = static_cast<uint8_t*>(f.d) + i;
      if (vector) {
        *reinterpret_cast<uint2*>(d) = codes;
      } else {
        for (int j = 0; j < count; ++j) d[j] = static_cast<uint8_t>((j < 4 ? codes.x : codes.y) >> (j % 4 * 8));
      }
    }
  }
  amax.note(most);
  __syncthreads();
  amax.merge(f.amax);
}

cudaError_t launch_widen(cudaStream_t stream, const Matrix& x, bf16* y) {
  const auto kernel = x.dtype == DType::F8E5M2 ? widen<__NV_E5M2> : widen<__NV_E4M3>;
  return launch({ceil_div(x.size(), 8 * kThreads), kThreads}, stream, kernel, x.as<uint8_t>(), y, x.size(),
                aligned(x.data));
}

constexpr int64_t kFp8Multiple = 16;  // of k and n

cudaError_t launch_pad(cudaStream_t stream, const Matrix& x, uint8_t* y, int64_t padded) {
  return launch({ceil_div(x.rows * padded, 16 * kThreads), kThreads}, stream, pad, x.as<uint8_t>(), y, x.rows, x.cols,
                padded);
}

// ---- One call ---------------------------------------------------------------------------------------

// Whether cuBLASLt does it all; `_limits_of_cublaslt` in ops/gemm.py is the same rule.
bool fused(const GemmOperands& in, DType d, bool amax, const GemmShape& s) {
  const DType a = in.a.element_type(), b = in.b.element_type();
  const bool c_as_d = absent(in.c) || in.c.element_type() == d;
  if (s.k == 0) return false;
  if (!is_fp8(a)) return (d == a || d == DType::F32) && c_as_d && !amax;
  const bool any_e5m2 = a == DType::F8E5M2 || b == DType::F8E5M2;
  if (s.n % kFp8Multiple || (a == b && any_e5m2)) return false;
  if (is_fp8(d)) return (d == DType::F8E4M3FN || any_e5m2) && (absent(in.c) || in.c.element_type() != DType::F32);
  const bool exact_bias = absent(in.bias) || d != DType::F32 || in.bias.element_type() == DType::BF16;
  return exact_bias && c_as_d && !amax;
}

// The dtype of a bias that goes into cuBLASLt's epilogue.
DType bias_dtype(DType a, DType c, DType d) {
  if (!is_fp8(a)) return d;
  return d == DType::F32 ? DType::BF16 : is_fp8(d) ? c : d;
}

// How one call uses its workspace, and the product that it runs there.
struct Call {
  GemmShape shape;
  Matrix a, b, d;
  bool fused;
  CublasLtProduct product;
  void* bias = nullptr;                              // the bias in bias_dtype, where it comes in another
  uint8_t *a_padded = nullptr, *b_padded = nullptr;  // FP8 operands with more of k
  bf16 *a_bf16 = nullptr, *b_bf16 = nullptr;         // FP8 operands widened
  float* sums = nullptr;                             // what finish reads
  void* scratch = nullptr;                           // cuBLASLt's own

  bool empty() const { return shape.m == 0 || shape.n == 0; }
};

// Cuts the workspace, which is counted as `_scratch` in ops/gemm.py does.
class Cutter {
 public:
  explicit Cutter(Out& workspace)
      : base_(static_cast<char*>(workspace->untyped_data())), at_(-reinterpret_cast<uintptr_t>(base_) % 256) {}
  void* cut(int64_t bytes) {
    void* piece = base_ + at_;
    at_ += ceil_div(bytes, 256) * 256;
    return piece;
  }
  int64_t used() const { return at_; }

 private:
  char* base_;
  int64_t at_;
};

Check plan(const GemmOperands& in, Out& d, Out& amax, Out& workspace, const GemmAttributes& attributes, Call& call) {
  Check check = check_gemm(in, d, amax, attributes.k_axes);
  const auto k_first = [&](char operand) { return attributes.k_first.find(operand) != std::string_view::npos; };
  check.that(attributes.k_first.empty() || !is_fp8(in.a.element_type()), "k_first", "nothing for FP8",
             attributes.k_first);
  if (check.failed()) return check;
  call.shape = gemm_shape(in, attributes.k_axes);
  const GemmShape& s = call.shape;
  call.a = matrix(in.a, attributes.k_axes);
  call.b = matrix(in.b, attributes.k_axes);
  call.d = {d->untyped_data(), d->element_type(), s.m, s.n};
  call.fused = fused(in, call.d.dtype, present(amax), s);
  if (call.empty()) return check;

  const bool fp8 = is_fp8(call.a.dtype), fp8_d = is_fp8(call.d.dtype);
  CublasLtProduct& p = call.product;
  p = {};
  p.m = s.m, p.n = s.n, p.k = s.k;
  p.split_accumulator = attributes.split_accumulator;
  p.a_k_first = k_first('a'), p.b_k_first = k_first('b');
  p.a = call.a.data, p.a_dtype = call.a.dtype;
  p.b = call.b.data, p.b_dtype = call.b.dtype;
  p.d = call.d.data, p.d_dtype = call.d.dtype;
  Cutter cutter(workspace);
  call.scratch = cutter.cut(kCublasLtScratch);
  if (call.fused) {
    p.a_scale_inv = data_or_null<void>(in.a_scale_inv);
    p.b_scale_inv = data_or_null<void>(in.b_scale_inv);
    p.d_scale = data_or_null<void>(in.d_scale);
    p.amax = data_or_null<void>(amax);
    p.c = data_or_null<void>(in.c);
    p.c_scale = attributes.c_scale;
    p.c_dtype = present(in.c) ? in.c.element_type() : fp8_d ? DType::BF16 : p.d_dtype;
    if (present(in.bias)) {
      p.bias = in.bias.untyped_data();
      p.bias_dtype = bias_dtype(p.a_dtype, p.c_dtype, p.d_dtype);
      if (in.bias.element_type() != p.bias_dtype) p.bias = call.bias = cutter.cut(4 * s.n);
    }
    if (fp8 && s.k % kFp8Multiple) {
      p.k = ceil_div(s.k, kFp8Multiple) * kFp8Multiple;
      p.a = call.a_padded = static_cast<uint8_t*>(cutter.cut(s.m * p.k));
      p.b = call.b_padded = static_cast<uint8_t*>(cutter.cut(s.n * p.k));
    }
  } else {
    // The sums go where d goes, unless `finish` finds c there.
    const bool in_d = call.d.dtype == DType::F32 && (absent(in.c) || in.c.untyped_data() != p.d);
    call.sums = static_cast<float*>(in_d ? p.d : cutter.cut(4 * s.m * s.n));
    if (fp8) {
      p.a = call.a_bf16 = static_cast<bf16*>(cutter.cut(2 * s.m * s.k));
      p.b = call.b_bf16 = static_cast<bf16*>(cutter.cut(2 * s.n * s.k));
      p.a_dtype = p.b_dtype = DType::BF16;
    }
    p.d = call.sums;
    p.d_dtype = p.c_dtype = DType::F32;
    p.split_accumulator = false;
  }
  check_workspace(check, workspace, cutter.used());
  return check;
}

}  // namespace

// When the program is compiled: cuBLASLt's handle, and the algorithm of this product. Nothing is left to do before each
// call, where it would cost the host 6 us a product.
ffi::Error GemmPrepare(In a, In b, In a_scale_inv, In b_scale_inv, In bias, In c, In d_scale, Out d, Out amax,
                       Out workspace, GemmAttributes attributes) {
  Call call;
  const Check check = plan({a, b, a_scale_inv, b_scale_inv, bias, c, d_scale}, d, amax, workspace, attributes, call);
  if (check.failed()) return check.error();
  return call.empty() || call.shape.k == 0 ? ffi::Error::Success() : prepare(call.product);
}

// What Python asks of a product that was prepared: the attributes of its call, and where the answer goes.
struct GemmQuestion : GemmAttributes {
  std::string* answer;
};

ffi::Error GemmAnswer(In a, In b, In a_scale_inv, In b_scale_inv, In bias, In c, In d_scale, Out d, Out amax,
                      Out workspace, GemmQuestion question) {
  Call call;
  const Check check = plan({a, b, a_scale_inv, b_scale_inv, bias, c, d_scale}, d, amax, workspace, question, call);
  if (check.failed()) return check.error();
  if (!call.empty()) *question.answer = algorithm_of(call.product);
  return ffi::Error::Success();
}

std::string gemm_algorithm(const std::vector<int64_t>& buffers, int64_t k_axes, bool split_accumulator,
                           const std::string& k_first) {
  std::string answer;
  Instantiation<&GemmAnswer>::run(
      {{k_axes, split_accumulator, k_first, 1.f, Buffers(buffers.data(), buffers.size())}, &answer});
  return answer;
}

ffi::Error Gemm(cudaStream_t stream, In a, In b, In a_scale_inv, In b_scale_inv, In bias, In c, In d_scale, Out d,
                Out amax, Out workspace, GemmAttributes attributes) {
  Call call;
  const Check check = plan({a, b, a_scale_inv, b_scale_inv, bias, c, d_scale}, d, amax, workspace, attributes, call);
  if (check.failed()) return check.error();
  if (present(amax) && (call.fused || call.empty())) {
    TE_CUDA_CHECK(cudaMemsetAsync(amax->untyped_data(), 0, sizeof(float), stream));
  }
  if (call.empty()) return ffi::Error::Success();
  const GemmShape& s = call.shape;
  if (call.bias) {
    TE_CUDA_CHECK(launch({ceil_div(s.n, kThreads), kThreads}, stream, convert, bias.untyped_data(), bias.element_type(),
                         call.bias, call.product.bias_dtype, s.n));
  }
  if (call.a_padded) TE_CUDA_CHECK(launch_pad(stream, call.a, call.a_padded, call.product.k));
  if (call.b_padded) TE_CUDA_CHECK(launch_pad(stream, call.b, call.b_padded, call.product.k));
  if (call.a_bf16) TE_CUDA_CHECK(launch_widen(stream, call.a, call.a_bf16));
  if (call.b_bf16) TE_CUDA_CHECK(launch_widen(stream, call.b, call.b_bf16));
  if (s.k == 0) {
    TE_CUDA_CHECK(cudaMemsetAsync(call.sums, 0, sizeof(float) * s.m * s.n, stream));
  } else if (const ffi::Error error = multiply(call.product, call.scratch, stream); error.failure()) {
    return error;
  }
  if (call.fused) return ffi::Error::Success();
  const int64_t size = s.m * s.n;
  const int64_t blocks = std::min<int64_t>(ceil_div(size, 8 * kThreads), 8 * current_device().multiprocessors);
  AmaxTarget most;
  most.value = data_or_null<float>(amax);
  TE_CUDA_CHECK(prepare_amax(stream, blocks, &most));
  const Finish f{call.sums,
                 data_or_null<float>(a_scale_inv),
                 data_or_null<float>(b_scale_inv),
                 data_or_null<float>(d_scale),
                 attributes.c_scale,
                 data_or_null<void>(bias),
                 data_or_null<void>(c),
                 bias.element_type(),
                 c.element_type(),
                 call.d.dtype,
                 call.d.data,
                 most,
                 size,
                 s.n,
                 aligned(call.d.data) && aligned(c.untyped_data())};
  TE_CUDA_CHECK(launch({blocks, kThreads}, stream, finish, f));
  return ffi::Error::Success();
}

}  // namespace te

TE_ATTRIBUTES(te::GemmAttributes, TE_ATTRIBUTE(int64_t, k_axes), TE_ATTRIBUTE(bool, split_accumulator),
              TE_ATTRIBUTE(std::string_view, k_first), TE_ATTRIBUTE(float, c_scale),
              TE_ATTRIBUTE(te::Buffers, buffers));

TE_HANDLER(gemm, Gemm)
TE_INSTANTIATOR(gemm, GemmPrepare)

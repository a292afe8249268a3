// cuBLASLt, loaded at run time. It thinks in columns: our row-major d[m, n] is its D[n, m], so our b is its A
// and our a its B, both with the contracted axis contiguous ("TN", the one form that has FP8 on Hopper).
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/algorithm_cache.h"
#include "core/cublaslt.h"
#include "core/libraries.h"
#include "core/settings.h"

namespace te {
namespace {

// ---- The library ------------------------------------------------------------------------------------

struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtGetStatusString) status_text;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulDescCreate) create_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatmulDescDestroy) destroy_product;
  decltype(&cublasLtMatrixLayoutCreate) create_layout;
  decltype(&cublasLtMatrixLayoutDestroy) destroy_layout;
  decltype(&cublasLtMatmulPreferenceCreate) create_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
  decltype(&cublasLtMatmulPreferenceDestroy) destroy_preference;
  std::string error;
};

Library load() {
  Library lt = {};
  void* library = open_library({"libcublasLt.so.13", "libcublasLt.so.12"},
                               {"nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"});
  if (!library) {
    lt.error =
        "te_gemm: cuBLASLt (libcublasLt.so.13 or .12) was not found; install JAX with its CUDA libraries, "
        "`pip install 'jax[cuda13]'`, or put the CUDA toolkit's libraries on LD_LIBRARY_PATH";
    return lt;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (!function) lt.error = std::string("te_gemm: the cuBLASLt library that was found lacks ") + name;
  };
  find(lt.create, "cublasLtCreate");
  find(lt.version, "cublasLtGetVersion");
  find(lt.status_text, "cublasLtGetStatusString");
  find(lt.matmul, "cublasLtMatmul");
  find(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(lt.create_product, "cublasLtMatmulDescCreate");
  find(lt.set_product, "cublasLtMatmulDescSetAttribute");
  find(lt.destroy_product, "cublasLtMatmulDescDestroy");
  find(lt.create_layout, "cublasLtMatrixLayoutCreate");
  find(lt.destroy_layout, "cublasLtMatrixLayoutDestroy");
  find(lt.create_preference, "cublasLtMatmulPreferenceCreate");
  find(lt.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  find(lt.destroy_preference, "cublasLtMatmulPreferenceDestroy");
  return lt;
}

const Library& library() {
  static const Library& loaded = *new Library(load());
  return loaded;
}

// The first failure among calls that build on each other.
class Status {
 public:
  explicit Status(const Library& lt) : lt_(lt) {}
  bool ok(cublasStatus_t status, const char* what) {
    if (status != CUBLAS_STATUS_SUCCESS && text_.empty()) {
      text_ = std::string("te_gemm: cuBLASLt: ") + what + ": " + lt_.status_text(status);
    }
    return text_.empty();
  }
  bool ok() const { return text_.empty(); }
  ffi::Error error() const { return ffi::Error::Internal(text_); }

 private:
  const Library& lt_;
  std::string text_;
};

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::F16: return CUDA_R_16F;
    case DType::BF16: return CUDA_R_16BF;
    case DType::F8E4M3FN: return CUDA_R_8F_E4M3;
    case DType::F8E5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
  }
}

bool of_8_bits(DType dtype) { return dtype == DType::F8E4M3FN || dtype == DType::F8E5M2; }

// ---- Plans ------------------------------------------------------------------------------------------

// A product ready to run but for its pointers. Kept for the life of the process.
struct Plan {
  std::mutex mutex;  // the description holds the pointers of the call that is being issued
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};

  ~Plan() {  // of a plan that failed
    const Library& lt = library();
    if (product) lt.destroy_product(product);
    for (cublasLtMatrixLayout_t layout : {a, b, c, d}) {
      if (layout) lt.destroy_layout(layout);
    }
  }
};

// The alignment, up to the 128 bytes that XLA's allocator promises, that all of a product's matrices have.
int64_t alignment(const CublasLtProduct& p) {
  uintptr_t bits = 128;
  for (const void* pointer : {p.a, p.b, p.c, static_cast<const void*>(p.d)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return static_cast<int64_t>(bits & (~bits + 1));
}

// All that a plan depends on: the device, sizes, dtypes, which pointers there are, and their alignment.
using Key = std::array<int64_t, 7>;
Key key_of(const CublasLtProduct& p, int device) {
  int64_t dtypes = 0, flags = p.split_accumulator;
  for (const DType dtype : {p.a_dtype, p.b_dtype, p.c_dtype, p.d_dtype, p.bias_dtype}) {
    dtypes = dtypes << 8 | static_cast<int64_t>(dtype);
  }
  for (const void* pointer : {p.c, p.bias, p.a_scale_inv, p.b_scale_inv, p.d_scale, static_cast<const void*>(p.amax)}) {
    flags = flags << 1 | (pointer != nullptr);
  }
  return {device, p.m, p.n, p.k, dtypes, flags, alignment(p)};
}

template <typename T>
bool set(Status& status, cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const char* what) {
  return status.ok(library().set_product(product, attribute, &value, sizeof(value)), what);
}

bool set_pointers(Status& status, cublasLtMatmulDesc_t product, const CublasLtProduct& p) {
  if (p.bias) set(status, product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias, "bias");
  if (p.b_scale_inv) set(status, product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale_inv, "b_scale_inv");
  if (p.a_scale_inv) set(status, product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale_inv, "a_scale_inv");
  if (p.d_scale) set(status, product, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, p.d_scale, "d_scale");
  if (p.amax) set(status, product, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, p.amax, "amax");
  return status.ok();
}

// ---- Algorithms: measured, not guessed --------------------------------------------------------------

constexpr int kCandidates = 12;
constexpr int kRounds = 5;
constexpr float kLeastMs = 0.1f;  // of a turn: less is measured badly
// What another algorithm's time must be of that of the first offered to replace it: less is noise. Under sustained load
// the first was within 1 % of the fastest for all of 16 large products with split accumulation, which a turn is too
// short to show, so there another must win by more.
constexpr float kWorthIt = 0.98f, kWorthItSustained = 0.92f;
constexpr float kLargeMs = 0.2f;

// TE_GEMM_TUNING=0, or XLA's deterministic mode, takes the first algorithm offered: no timing, the same in every run.
bool tuning_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("TE_GEMM_TUNING");
    return !deterministic() && (!value || std::string(value) != "0");
  }();
  return enabled;
}

// Device memory for the time of a measurement; null where there is none left.
class Borrowed {
 public:
  explicit Borrowed(int64_t bytes) {
    if (cudaMalloc(&data_, static_cast<size_t>(bytes)) != cudaSuccess) data_ = nullptr, cudaGetLastError();
  }
  ~Borrowed() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

int64_t width(DType dtype) { return of_8_bits(dtype) ? 1 : dtype == DType::F32 ? 4 : 2; }

// Entries of about normal distribution: products of zeros take less power, hence other times.
__global__ void fill(void* data, DType dtype, int64_t size) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= size) return;
  uint64_t bits = static_cast<uint64_t>(i + 1) * 0x9e3779b97f4a7c15u;
  bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
  float value = 0.f;
  for (int j = 0; j < 8; ++j) value += static_cast<float>(bits >> 8 * j & 255) / 255.f - 0.5f;
  if (dtype == DType::F32) {
    static_cast<float*>(data)[i] = value;
  } else if (dtype == DType::BF16) {
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(value);
  } else if (dtype == DType::F16) {
    static_cast<__half*>(data)[i] = __float2half_rn(value);
  } else {
    const auto format = dtype == DType::F8E5M2 ? __NV_E5M2 : __NV_E4M3;
    static_cast<__nv_fp8_storage_t*>(data)[i] = __nv_cvt_float_to_fp8(64.f * value, __NV_SATFINITE, format);
  }
}

// A product like another, of random operands in borrowed memory: when it is timed, a program's own buffers may not be
// there, or hold what a step is about to read.
class Rehearsal {
 public:
  Rehearsal(const CublasLtProduct& p, cudaStream_t stream)
      : product(p),
        a_(p.m * p.k * width(p.a_dtype)),
        b_(p.n * p.k * width(p.b_dtype)),
        c_(p.c ? p.m * p.n * width(p.c_dtype) : 1),
        d_(p.m * p.n * width(p.d_dtype)),
        bias_(p.bias ? p.n * width(p.bias_dtype) : 1),
        scalar_(sizeof(float)),
        amax_(sizeof(float)),
        scratch_(kCublasLtScratch),
        stream_(stream) {
    for (const Borrowed* borrowed : {&a_, &b_, &c_, &d_, &bias_, &scalar_, &amax_, &scratch_})
      ready &= !!borrowed->data();
    if (!ready) return;
    product.a = filled(a_, p.a_dtype, p.m * p.k);
    product.b = filled(b_, p.b_dtype, p.n * p.k);
    product.d = d_.data();
    if (p.c) product.c = filled(c_, p.c_dtype, p.m * p.n);
    if (p.bias) product.bias = filled(bias_, p.bias_dtype, p.n);
    for (const void** scale : {&product.a_scale_inv, &product.b_scale_inv, &product.d_scale}) {
      if (*scale) *scale = filled(scalar_, DType::F32, 1);
    }
    if (p.amax) product.amax = amax_.data();
  }

  void* scratch() const { return scratch_.data(); }

  CublasLtProduct product;
  bool ready = true;

 private:
  const void* filled(const Borrowed& memory, DType dtype, int64_t size) const {
    fill<<<static_cast<unsigned>((size + 255) / 256), 256, 0, stream_>>>(memory.data(), dtype, size);
    return memory.data();
  }

  Borrowed a_, b_, c_, d_, bias_, scalar_, amax_, scratch_;
  cudaStream_t stream_;
};

// What a measurement needs of the driver.
struct Clock {
  cudaStream_t stream = nullptr;
  cudaEvent_t began = nullptr, ended = nullptr;
  bool ready;

  Clock()
      : ready(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
              cudaEventCreate(&began) == cudaSuccess && cudaEventCreate(&ended) == cudaSuccess) {}
  ~Clock() {
    if (began) cudaEventDestroy(began);
    if (ended) cudaEventDestroy(ended);
    if (stream) cudaStreamDestroy(stream);
  }
};

// Milliseconds of a call of `repeats`, infinite where the algorithm fails.
float time_of(cublasLtHandle_t handle, const Plan& plan, const Rehearsal& r, const cublasLtMatmulAlgo_t& algorithm,
              const Clock& clock, int repeats) {
  const CublasLtProduct& p = r.product;
  const float alpha = 1.f, beta = p.c ? 1.f : 0.f;
  const void* c = p.c ? p.c : of_8_bits(p.d_dtype) ? nullptr : p.d;
  bool worked = cudaEventRecord(clock.began, clock.stream) == cudaSuccess;
  for (int i = 0; i < repeats && worked; ++i) {
    worked = library().matmul(handle, plan.product, &alpha, p.b, plan.a, p.a, plan.b, &beta, c, plan.c, p.d, plan.d,
                              &algorithm, r.scratch(), kCublasLtScratch, clock.stream) == CUBLAS_STATUS_SUCCESS;
  }
  float ms = 0.f;
  worked = cudaEventRecord(clock.ended, clock.stream) == cudaSuccess &&
           cudaEventSynchronize(clock.ended) == cudaSuccess && worked &&
           cudaEventElapsedTime(&ms, clock.began, clock.ended) == cudaSuccess;
  return worked ? ms / repeats : std::numeric_limits<float>::infinity();
}

// The index of the fastest of the algorithms offered, the first unless another is clearly faster; -1 where it could not
// be measured. They take turns, so that all see the same clocks: within a tenth of a second power lowers those.
int fastest(Status& status, cublasLtHandle_t handle, const Plan& plan, const CublasLtProduct& p,
            const cublasLtMatmulHeuristicResult_t* offered, int count) {
  const Clock clock;
  if (!clock.ready) return -1;
  const Rehearsal rehearsal(p, clock.stream);
  if (!rehearsal.ready || !set_pointers(status, plan.product, rehearsal.product)) return -1;
  std::vector<int> repeats(count);
  std::vector<std::array<float, kRounds>> times(count);
  for (int i = 0; i < count; ++i) {
    time_of(handle, plan, rehearsal, offered[i].algo, clock, 1);  // the first call loads the kernel
    const float ms = time_of(handle, plan, rehearsal, offered[i].algo, clock, 1);
    repeats[i] = std::isinf(ms) ? 0 : std::min(static_cast<int>(kLeastMs / ms) + 1, 16);
  }
  for (int round = 0; round < kRounds; ++round) {
    for (int i = 0; i < count; ++i) {
      times[i][round] = repeats[i] ? time_of(handle, plan, rehearsal, offered[i].algo, clock, repeats[i])
                                   : std::numeric_limits<float>::infinity();
    }
  }
  const auto median = [&](int i) {
    std::nth_element(times[i].begin(), times[i].begin() + kRounds / 2, times[i].end());
    return times[i][kRounds / 2];
  };
  int best = 0;
  float least = median(0);
  const bool sustained = of_8_bits(p.a_dtype) && p.split_accumulator && least > kLargeMs;
  least *= sustained ? kWorthItSustained : kWorthIt;
  for (int i = 1; i < count; ++i) {
    if (const float ms = median(i); ms < least) best = i, least = ms;
  }
  return best;
}

std::string text_of(const Key& key) {
  std::string text;
  for (size_t i = 1; i < key.size(); ++i) text += (i > 1 ? " " : "") + std::to_string(key[i]);  // less the device
  return text;
}

// The choices of this kind of GPU and library, from disk.
AlgorithmCache& cache_of(int device) {
  static auto& caches = *new std::map<std::string, std::unique_ptr<AlgorithmCache>>;
  cudaDeviceProp properties = {};
  cudaGetDeviceProperties(&properties, device);
  std::string name = std::string("gemm-") + properties.name + "-" + std::to_string(library().version());
  std::replace(name.begin(), name.end(), ' ', '-');
  auto& cache = caches[name];
  if (!cache) cache = std::make_unique<AlgorithmCache>(name);
  return *cache;
}

// An algorithm is opaque; cuBLASLt allows its bytes to be kept for the same version.
std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
  for (size_t i = 0; i < sizeof(algorithm); ++i) {
    text += "0123456789abcdef"[bytes[i] >> 4];
    text += "0123456789abcdef"[bytes[i] & 15];
  }
  return text;
}

// The offered algorithm with these bytes, -1 where it is not among them.
int index_of(const std::string& hex, const cublasLtMatmulHeuristicResult_t* offered, int count) {
  for (int i = 0; i < count; ++i) {
    if (to_hex(offered[i].algo) == hex) return i;
  }
  return -1;
}

int choose(Status& status, cublasLtHandle_t handle, const Key& key, const CublasLtProduct& p, const Plan& plan,
           const cublasLtMatmulHeuristicResult_t* offered, int count, bool may_measure) {
  if (count == 1 || !tuning_enabled()) return 0;
  AlgorithmCache& cache = cache_of(static_cast<int>(key[0]));
  if (const std::string* known = cache.find(text_of(key))) {
    if (const int index = index_of(*known, offered, count); index >= 0) return index;
  }
  if (!may_measure) return 0;
  const int best = fastest(status, handle, plan, p, offered, count);
  if (best < 0) return 0;  // no memory to measure in: perhaps another time
  cache.add(text_of(key), to_hex(offered[best].algo));
  return best;
}

bool choose_algorithm(Status& status, cublasLtHandle_t handle, const Key& key, const CublasLtProduct& p, Plan& plan,
                      bool may_measure) {
  const Library& lt = library();
  cublasLtMatmulPreference_t preference = nullptr;
  if (!status.ok(lt.create_preference(&preference), "preference")) return false;
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    status.ok(lt.set_preference(preference, attribute, &value, sizeof(value)), "preference");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kCublasLtScratch));
  for (const auto attribute :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(attribute, static_cast<uint32_t>(alignment(p)));
  }
  cublasLtMatmulHeuristicResult_t offered[kCandidates] = {};
  int count = 0;
  if (status.ok()) {
    const cublasStatus_t answer =
        lt.heuristic(handle, plan.product, plan.a, plan.b, plan.c, plan.d, preference, kCandidates, offered, &count);
    status.ok(answer, "choosing an algorithm");
    if (count == 0) status.ok(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm for this product");
  }
  lt.destroy_preference(preference);
  if (status.ok()) plan.algorithm = offered[choose(status, handle, key, p, plan, offered, count, may_measure)].algo;
  return status.ok();
}

bool make_plan(Status& status, cublasLtHandle_t handle, const Key& key, const CublasLtProduct& p, Plan& plan,
               bool may_measure) {
  const Library& lt = library();
  status.ok(lt.create_product(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
  const auto layout = [&](cublasLtMatrixLayout_t* made, DType dtype, int64_t rows, int64_t cols) {
    if (status.ok()) status.ok(lt.create_layout(made, cuda_type(dtype), rows, cols, rows), "layout");
  };
  layout(&plan.a, p.b_dtype, p.k, p.n);
  layout(&plan.b, p.a_dtype, p.k, p.m);
  layout(&plan.c, p.c_dtype, p.n, p.m);
  layout(&plan.d, p.d_dtype, p.n, p.m);
  if (!status.ok()) return false;
  set(status, plan.product, CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T, "transposition");
  set(status, plan.product, CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N, "transposition");
  if (of_8_bits(p.a_dtype)) {
    const int8_t fast = !p.split_accumulator;
    set(status, plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast, "accumulation");
  }
  if (p.bias) {
    set(status, plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, "epilogue");
    const int32_t type = cuda_type(p.bias_dtype);
    set(status, plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type, "bias dtype");
  }
  return set_pointers(status, plan.product, p) && choose_algorithm(status, handle, key, p, plan, may_measure);
}

// While it lives, this thread may do what a graph that is being captured forbids by default: allocate, and wait.
class WhileCapturing {
 public:
  WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The handle of the current device and the plan of a product, made at first sight.
struct Prepared {
  cublasLtHandle_t handle;
  Plan* plan;
};

bool find_plan(Status& status, const CublasLtProduct& p, bool may_measure, Prepared& found) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, cublasLtHandle_t>;
  static auto& plans = *new std::map<Key, std::unique_ptr<Plan>>;
  int device = 0;
  cudaGetDevice(&device);
  const Key key = key_of(p, device);
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& handle = handles[device];
  auto entry = plans.find(key);
  if (entry == plans.end()) {
    const WhileCapturing allowed;
    if (!handle && !status.ok(library().create(&handle), "handle")) return false;
    auto plan = std::make_unique<Plan>();
    if (!make_plan(status, handle, key, p, *plan, may_measure)) return false;
    entry = plans.emplace(key, std::move(plan)).first;
  }
  found = {handle, entry->second.get()};
  return true;
}

std::string sizes(const CublasLtProduct& p) {
  return " (m=" + std::to_string(p.m) + ", n=" + std::to_string(p.n) + ", k=" + std::to_string(p.k) + ")";
}

}  // namespace

ffi::Error prepare(const CublasLtProduct& p) {
  if (!library().error.empty()) return ffi::Error::Internal(library().error);
  Status status(library());
  Prepared prepared;
  return find_plan(status, p, /*may_measure=*/true, prepared)
             ? ffi::Error::Success()
             : ffi::Error::Internal(status.error().message() + sizes(p));
}

ffi::Error multiply(const CublasLtProduct& p, void* scratch, cudaStream_t stream) {
  const Library& lt = library();
  if (!lt.error.empty()) return ffi::Error::Internal(lt.error);
  Status status(lt);
  Prepared prepared;
  // What was not foreseen, sizes that were not known when compiled, is not measured: a graph may be being captured. It
  // takes the first algorithm, unless another is on disk.
  if (find_plan(status, p, /*may_measure=*/false, prepared)) {
    Plan& plan = *prepared.plan;
    const float alpha = 1.f, beta = p.c ? 1.f : 0.f;
    // Not read where beta is 0. An FP8 d has another dtype than c's layout, so it cannot stand in for c.
    const void* c = p.c ? p.c : of_8_bits(p.d_dtype) ? nullptr : p.d;
    const std::lock_guard<std::mutex> lock(plan.mutex);
    if (set_pointers(status, plan.product, p)) {
      status.ok(lt.matmul(prepared.handle, plan.product, &alpha, p.b, plan.a, p.a, plan.b, &beta, c, plan.c, p.d,
                          plan.d, &plan.algorithm, scratch, kCublasLtScratch, stream),
                "matmul");
    }
  }
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal(status.error().message() + sizes(p));
}

std::string cublaslt_version() {
  const Library& lt = library();
  if (!lt.error.empty()) return lt.error;
  const size_t version = lt.version();  // 10000 * major + 100 * minor + patch
  return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace te

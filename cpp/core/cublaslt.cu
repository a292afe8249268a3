// Products as plans of cuBLASLt. It thinks in columns: our row-major d[m, n] is its D[n, m], so our b is its A and our
// a its B, both with the contracted axis contiguous ("TN", the one form that has FP8 on Hopper) unless they say
// otherwise.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "core/algorithm_cache.h"
#include "core/check.h"
#include "core/cublaslt.h"
#include "core/cublaslt_plan.h"
#include "core/cuda_graph.h"
#include "core/fp8_product.h"
#include "core/settings.h"

namespace te {
namespace lt {

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

cublasStatus_t run(cublasLtHandle_t handle, const Plan& plan, const cublasLtMatmulAlgo_t& algorithm,
                   const CublasLtProduct& p, void* scratch, cudaStream_t stream) {
  const float alpha = 1.f, beta = p.c ? p.c_scale : 0.f;
  // Not read where beta is 0. An FP8 d has another dtype than c's layout, so it cannot stand in for c.
  const void* c = p.c ? p.c : is_fp8(p.d_dtype) ? nullptr : p.d;
  return library().matmul(handle, plan.product, &alpha, p.b, plan.a, p.a, plan.b, &beta, c, plan.c, p.d, plan.d,
                          &algorithm, scratch, kCublasLtScratch, stream);
}

}  // namespace lt

namespace {

using namespace lt;

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::F16: return CUDA_R_16F;
    case DType::BF16: return CUDA_R_16BF;
    case DType::F8E4M3FN: return CUDA_R_8F_E4M3;
    case DType::F8E5M2: return CUDA_R_8F_E5M2;
    default: return CUDA_R_32F;
  }
}

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
  int64_t dtypes = 0, flags = p.split_accumulator | p.a_k_first << 1 | p.b_k_first << 2;
  for (const DType dtype : {p.a_dtype, p.b_dtype, p.c_dtype, p.d_dtype, p.bias_dtype}) {
    dtypes = dtypes << 8 | static_cast<int64_t>(dtype);
  }
  for (const void* pointer : {p.c, p.bias, p.a_scale_inv, p.b_scale_inv, p.d_scale, static_cast<const void*>(p.amax)}) {
    flags = flags << 1 | (pointer != nullptr);
  }
  return {device, p.m, p.n, p.k, dtypes, flags, alignment(p)};
}

// ---- Algorithms: measured, not guessed --------------------------------------------------------------

constexpr int kCandidates = 12;

// TE_GEMM_TUNING=0, or XLA's deterministic mode, takes the first algorithm offered: no timing, the same in every run.
// TE_GEMM_TUNING=ours takes our kernel wherever it can do the product.
enum class Tuning { kMeasure, kTakeFirst, kTakeOurs };
Tuning tuning() {
  static const Tuning asked = [] {
    const char* variable = std::getenv("TE_GEMM_TUNING");
    const std::string value = variable ? variable : "";
    if (value == "ours") return Tuning::kTakeOurs;
    return deterministic() || value == "0" ? Tuning::kTakeFirst : Tuning::kMeasure;
  }();
  return asked;
}

std::string text_of(const Key& key) {
  std::string text;
  for (size_t i = 1; i < key.size(); ++i) text += (i > 1 ? " " : "") + std::to_string(key[i]);  // less the device
  return text;
}

// The choices of this kind of GPU and library, from disk.
AlgorithmCache& cache_of(int device) {
  static std::mutex mutex;
  static auto& caches = *new std::map<std::string, std::unique_ptr<AlgorithmCache>>;
  cudaDeviceProp properties = {};
  cudaGetDeviceProperties(&properties, device);
  std::string name = std::string("products-") + properties.name + "-" + std::to_string(library().version());
  std::replace(name.begin(), name.end(), ' ', '-');
  const std::lock_guard<std::mutex> lock(mutex);
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

// How a choice reads, in the file and to a person: "1.34 ms, the first of 8 offered", "1.34 ms, 1.41 by the first ...",
// "ours: 1.34 ms, 1.41 by cuBLASLt's fastest".
constexpr char kOurs[] = "ours: ";
std::string said_of(const Fastest& f, int count) {
  char text[80];
  if (f.ours) {
    std::snprintf(text, sizeof text, "%s%.4f ms, %.4f by cuBLASLt's fastest of %d", kOurs, f.our_ms, f.ms, count);
  } else if (f.index == 0) {
    std::snprintf(text, sizeof text, "%.4f ms, the first of %d offered", f.ms, count);
  } else {
    std::snprintf(text, sizeof text, "%.4f ms, %.4f by the first of %d offered", f.ms, f.first_ms, count);
  }
  return text;
}

// Sets the plan's algorithm to one of those offered.
void choose(Status& status, cublasLtHandle_t handle, const Key& key, const CublasLtProduct& p, Plan& plan,
            const cublasLtMatmulHeuristicResult_t* offered, int count, bool may_measure) {
  const auto take = [&](int index, const std::string& why) {
    plan.algorithm = offered[index].algo;
    plan.ours = why.rfind(kOurs, 0) == 0;
    plan.chosen = plan.ours ? "our kernel: " + why.substr(sizeof(kOurs) - 1)
                            : "cuBLASLt's algorithm " + std::to_string(index) + ": " + why;
  };
  const bool may_be_ours = has_fp8_product(p);
  if (tuning() == Tuning::kTakeOurs && may_be_ours) return take(0, std::string(kOurs) + "TE_GEMM_TUNING=ours");
  if (count == 1 && !may_be_ours) return take(0, "the only one offered");
  if (tuning() != Tuning::kMeasure) return take(0, "the first offered, as nothing is timed");
  AlgorithmCache& cache = cache_of(static_cast<int>(key[0]));
  const auto take_kept = [&] {
    const std::string kept = cache.find(text_of(key)), hex = kept.substr(0, kept.find(' '));
    const std::string why = hex.size() < kept.size() ? kept.substr(hex.size() + 1) : "the fastest";
    const int index = index_of(hex, offered, count);
    const bool found = index >= 0 && (may_be_ours || why.rfind(kOurs, 0) != 0);
    if (found) take(index, why);
    return found;
  };
  if (take_kept()) return;
  if (!may_measure) return take(0, "the first offered, as its sizes were not known when it was compiled");
  const AlgorithmCache::Turn turn(cache);
  if (take_kept()) return;  // another process has measured it
  const Fastest best = fastest(status, handle, plan, p, offered, count);
  if (best.index < 0) return take(0, "the first offered, as it could not be timed: no memory for it, say");  // not kept
  cache.add(text_of(key), to_hex(offered[best.index].algo) + " " + said_of(best, count));
  take(best.index, said_of(best, count));
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
  if (status.ok()) choose(status, handle, key, p, plan, offered, count, may_measure);
  return status.ok();
}

bool make_plan(Status& status, cublasLtHandle_t handle, const Key& key, const CublasLtProduct& p, Plan& plan,
               bool may_measure) {
  const Library& lt = library();
  status.ok(lt.create_product(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
  const auto layout = [&](cublasLtMatrixLayout_t* made, DType dtype, int64_t rows, int64_t cols) {
    if (status.ok()) status.ok(lt.create_layout(made, cuda_type(dtype), rows, cols, rows), "layout");
  };
  p.b_k_first ? layout(&plan.a, p.b_dtype, p.n, p.k) : layout(&plan.a, p.b_dtype, p.k, p.n);
  p.a_k_first ? layout(&plan.b, p.a_dtype, p.m, p.k) : layout(&plan.b, p.a_dtype, p.k, p.m);
  layout(&plan.c, p.c_dtype, p.n, p.m);
  layout(&plan.d, p.d_dtype, p.n, p.m);
  if (!status.ok()) return false;
  set(status, plan.product, CUBLASLT_MATMUL_DESC_TRANSA, p.b_k_first ? CUBLAS_OP_N : CUBLAS_OP_T, "transposition");
  set(status, plan.product, CUBLASLT_MATMUL_DESC_TRANSB, p.a_k_first ? CUBLAS_OP_T : CUBLAS_OP_N, "transposition");
  if (is_fp8(p.a_dtype)) {
    const int8_t fast = !p.split_accumulator;
    set(status, plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast, "accumulation");
  }
  if (p.bias) {
    set(status, plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS, "epilogue");
    const int32_t type = cuda_type(p.bias_dtype);
    set(status, plan.product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type, "bias dtype");
  }
  if (!set_pointers(status, plan.product, p) || !choose_algorithm(status, handle, key, p, plan, may_measure)) {
    return false;
  }
  void* const nowhere = reinterpret_cast<void*>(256);  // nobody follows it
  const auto issue = [&](cudaStream_t stream) {
    return status.ok(run(handle, plan, plan.algorithm, p, nowhere, stream), "matmul");
  };
  return status.ok(sets_memory(issue, &plan.sets_memory), "capture");
}

// While it lives, this thread may do what a graph that is being captured forbids by default: allocate, and wait.
class WhileCapturing {
 public:
  WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~WhileCapturing() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The handle of the current device and the plan of a product, which is locked; made at first sight unless it is only
// looked up. Others wait for no plan but their own, which may be measured for long.
struct Prepared {
  cublasLtHandle_t handle = nullptr;
  Plan* plan = nullptr;
  std::unique_lock<std::mutex> lock;
};
enum class Unknown { kMeasure, kTakeFirst, kLeave };

bool find_plan(Status& status, const CublasLtProduct& p, Unknown unknown, Prepared& found) {
  static std::mutex mutex;
  static auto& handles = *new std::map<int, cublasLtHandle_t>;
  static auto& plans = *new std::map<Key, std::unique_ptr<Plan>>;
  int device = 0;
  cudaGetDevice(&device);
  const Key key = key_of(p, device);
  {
    const std::lock_guard<std::mutex> lock(mutex);
    cublasLtHandle_t& handle = handles[device];
    if (!handle) {
      const WhileCapturing allowed;
      if (!status.ok(library().create(&handle), "handle")) return false;
    }
    std::unique_ptr<Plan>& plan = plans[key];
    if (!plan) plan = std::make_unique<Plan>();
    found.handle = handle, found.plan = plan.get();
  }
  found.lock = std::unique_lock<std::mutex>(found.plan->mutex);
  if (found.plan->ready) return true;
  if (unknown == Unknown::kLeave) return false;
  const WhileCapturing allowed;
  found.plan->ready = make_plan(status, found.handle, key, p, *found.plan, unknown == Unknown::kMeasure);
  if (!found.plan->ready) found.plan->clear();
  return found.plan->ready;
}

std::string sizes(const CublasLtProduct& p) {
  return " (m=" + std::to_string(p.m) + ", n=" + std::to_string(p.n) + ", k=" + std::to_string(p.k) + ")";
}

}  // namespace

ffi::Error prepare(const CublasLtProduct& p) {
  if (!library().error.empty()) return ffi::Error::Internal(library().error);
  Status status(library());
  Prepared prepared;
  return find_plan(status, p, Unknown::kMeasure, prepared) ? ffi::Error::Success()
                                                           : ffi::Error::Internal(status.error().message() + sizes(p));
}

ffi::Error multiply(const CublasLtProduct& p, void* scratch, cudaStream_t stream) {
  if (!library().error.empty()) return ffi::Error::Internal(library().error);
  Status status(library());
  Prepared prepared;
  // What was not foreseen, sizes that were not known when compiled, is not measured: a graph may be being captured. It
  // takes the first algorithm, unless another is on disk.
  if (find_plan(status, p, Unknown::kTakeFirst, prepared)) {
    Plan& plan = *prepared.plan;
    if (set_pointers(status, plan.product, p)) {
      const auto issue = [&](cudaStream_t s) {
        return status.ok(run(prepared.handle, plan, plan.algorithm, p, scratch, s), "matmul");
      };
      if (plan.ours && (!p.c || (p.c == p.d && p.c_scale == 1.f))) {
        status.ok(fp8_product(p, stream), "our FP8 product");
      } else if (plan.sets_memory) {
        status.ok(issue_as_kernels(stream, issue), "capture");
      } else {
        issue(stream);
      }
    }
  }
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal(status.error().message() + sizes(p));
}

std::string algorithm_of(const CublasLtProduct& p) {
  if (!library().error.empty()) return "";
  Status status(library());
  Prepared prepared;
  if (!find_plan(status, p, Unknown::kLeave, prepared)) return "";
  const auto size = [](const char* name, int64_t n) { return name + std::to_string(n); };
  std::string text = size("m=", p.m) + size(" n=", p.n) + size(" k=", p.k) + " ";
  text += std::string(name_of(p.a_dtype)) + " x " + name_of(p.b_dtype) + " -> " + name_of(p.d_dtype);
  if (p.bias) text += " + bias";
  if (p.c) text += " + c";
  if (p.a_k_first || p.b_k_first)
    text += std::string(", k first in ") + (p.a_k_first ? "a" : "") + (p.b_k_first ? "b" : "");
  if (is_fp8(p.a_dtype)) text += p.split_accumulator ? ", split accumulation" : ", fast accumulation";
  return text + ": " + prepared.plan->chosen;
}

std::string cublaslt_version() {
  const Library& lt = library();
  if (!lt.error.empty()) return lt.error;
  const size_t version = lt.version();  // 10000 * major + 100 * minor + patch
  const std::string which = tuning() == Tuning::kMeasure    ? "the fastest measured, kept in " + cache_folder()
                            : tuning() == Tuning::kTakeOurs ? "our kernel wherever it can"
                                                            : "the first offered, as nothing is timed";
  return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100) + ", algorithms: " + which;
}

}  // namespace te

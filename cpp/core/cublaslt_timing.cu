// Which of cuBLASLt's algorithms is the fastest for a product: measured, not guessed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <vector>

#include "core/cublaslt_plan.h"
#include "core/fp8_product.h"

namespace te::lt {
namespace {

constexpr int kRounds = 5;
// After which those about as fast as the fastest go on for more: the limit of power makes single turns vary by 10 %.
constexpr int kFinalRounds = 10;
constexpr float kAbout = 1.08f;
constexpr float kLeastMs = 0.1f;  // of a turn: less is measured badly
constexpr float kMostMs = 500.f;  // of all rounds of one: calls that take long are measured well in fewer
// What another algorithm's time must be of that of the first offered to replace it: less is noise. Under sustained load
// the first was within 1 % of the fastest for all of 16 large products with split accumulation, which a turn is too
// short to show, so there another must win by more.
constexpr float kWorthIt = 0.98f, kWorthItSustained = 0.92f;
constexpr float kLargeMs = 0.2f;
// Likewise our kernel, which gained 5 % under sustained load where short turns showed 0 to 3.
constexpr float kOursWorthItSustained = 1.02f;

// Device memory for the time of a measurement; null where there is none left. By the stream's own order: cudaFree would
// wait for whatever runs on the GPU.
class Borrowed {
 public:
  Borrowed(int64_t bytes, cudaStream_t stream) : stream_(stream) {
    if (cudaMallocAsync(&data_, static_cast<size_t>(bytes), stream) != cudaSuccess) {
      data_ = nullptr;
      cudaGetLastError();
    }
  }
  ~Borrowed() {
    if (data_) cudaFreeAsync(data_, stream_);
  }
  Borrowed(const Borrowed&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  cudaStream_t stream_;
};

int64_t width(DType dtype) { return static_cast<int64_t>(ffi::ByteWidth(dtype)); }

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
        a_(p.m * p.k * width(p.a_dtype), stream),
        b_(p.n * p.k * width(p.b_dtype), stream),
        c_(p.c ? p.m * p.n * width(p.c_dtype) : 1, stream),
        d_(p.m * p.n * width(p.d_dtype), stream),
        bias_(p.bias ? p.n * width(p.bias_dtype) : 1, stream),
        scalar_(sizeof(float), stream),
        amax_(sizeof(float), stream),
        scratch_(kCublasLtScratch, stream),
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

// Milliseconds of a call of `repeats`, by our kernel where there is no algorithm; infinite where that fails.
float time_of(cublasLtHandle_t handle, const Plan& plan, const Rehearsal& r, const cublasLtMatmulAlgo_t* algorithm,
              const Clock& clock, int repeats) {
  bool worked = cudaEventRecord(clock.began, clock.stream) == cudaSuccess;
  for (int i = 0; i < repeats && worked; ++i) {
    worked = algorithm ? run(handle, plan, *algorithm, r.product, r.scratch(), clock.stream) == CUBLAS_STATUS_SUCCESS
                       : fp8_product(r.product, clock.stream) == cudaSuccess;
  }
  float ms = 0.f;
  worked = cudaEventRecord(clock.ended, clock.stream) == cudaSuccess &&
           cudaEventSynchronize(clock.ended) == cudaSuccess && worked &&
           cudaEventElapsedTime(&ms, clock.began, clock.ended) == cudaSuccess;
  return worked ? ms / repeats : std::numeric_limits<float>::infinity();
}

}  // namespace

// They take turns, so that all see the same clocks: within a tenth of a second power lowers those.
Fastest fastest(Status& status, cublasLtHandle_t handle, const Plan& plan, const CublasLtProduct& p,
                const cublasLtMatmulHeuristicResult_t* offered, int count) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  const Clock clock;
  if (!clock.ready) return {-1, 0.f, 0.f};
  const Rehearsal rehearsal(p, clock.stream);
  if (!rehearsal.ready || !set_pointers(status, plan.product, rehearsal.product)) return {-1, 0.f, 0.f};
  struct Candidate {
    int number;                             // of the algorithm, or kOurs
    const cublasLtMatmulAlgo_t* algorithm;  // null: our kernel
    int repeats;
    float ms;
    std::vector<float> times;
  };
  constexpr int kOurs = -1;
  std::vector<Candidate> candidates;
  const auto add = [&](int number, const cublasLtMatmulAlgo_t* algorithm) {
    time_of(handle, plan, rehearsal, algorithm, clock, 1);  // the first call loads the kernel
    const float ms = time_of(handle, plan, rehearsal, algorithm, clock, 1);
    if (std::isinf(ms)) return;
    candidates.push_back({number, algorithm, std::min(static_cast<int>(kLeastMs / ms) + 1, 16), ms, {}});
  };
  for (int i = 0; i < count; ++i) add(i, &offered[i].algo);
  if (candidates.empty()) return {-1, 0.f, 0.f};
  if (has_fp8_product(rehearsal.product)) add(kOurs, nullptr);
  const auto take_turns = [&](int most) {
    float ms = 0.f;
    for (Candidate& c : candidates) ms = std::max(ms, c.ms), c.times.clear();
    const int rounds = std::clamp(static_cast<int>(kMostMs / ms), 1, most);
    for (int round = 0; round < rounds; ++round) {
      for (Candidate& c : candidates) {
        c.times.push_back(time_of(handle, plan, rehearsal, c.algorithm, clock, c.repeats));
      }
    }
    for (Candidate& c : candidates) {
      std::nth_element(c.times.begin(), c.times.begin() + rounds / 2, c.times.end());
      c.ms = c.times[rounds / 2];
    }
  };
  take_turns(kRounds);
  float least = std::numeric_limits<float>::infinity();
  for (const Candidate& c : candidates) least = std::min(least, c.ms);
  const auto slow = [&](const Candidate& c) { return c.number > 0 && c.ms > kAbout * least; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), slow), candidates.end());
  if (candidates.size() > 1) take_turns(kFinalRounds);

  const bool has_first = !candidates.empty() && candidates[0].number == 0;
  const float first_ms = has_first ? candidates[0].ms : std::numeric_limits<float>::infinity();
  const bool sustained = is_fp8(p.a_dtype) && p.split_accumulator && first_ms > kLargeMs;
  Fastest best = {0, first_ms, first_ms};
  least = first_ms * (sustained ? kWorthItSustained : kWorthIt);
  for (const Candidate& c : candidates) {
    if (c.number > 0 && c.ms < least) best = {c.number, c.ms, first_ms}, least = c.ms;
  }
  for (const Candidate& c : candidates) {
    if (c.number != kOurs) continue;
    best.our_ms = c.ms;
    best.ours = c.ms < best.ms * (sustained ? kOursWorthItSustained : kWorthIt);
  }
  return best;
}

}  // namespace te::lt

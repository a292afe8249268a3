// The maximum over all blocks of a kernel, without a launch before that zeroes it: such a launch costs 2 us, as much as
// a fifth of the time of 8 million values.
#pragma once

#include <mutex>
#include <unordered_map>

#include "core/cuda.cuh"
#include "core/scaling.h"

namespace te {

// A kernel's maximum so far and how many of its blocks are done. All zero between kernels: the last block sees to it.
struct Tally {
  uint32_t most;
  uint32_t done;
};
constexpr int kTallies = 1 << 14;
static __device__ Tally tallies[kTallies];

// The bits of a maximum. Denormal ones count as zero.
__device__ __forceinline__ uint32_t normal(uint32_t most) { return most < 0x00800000u ? 0u : most; }

// Where an amax goes: f32[], or f32[bins] for its report. `tally` < 0: to an address that is zeroed before; then
// finish_amax() makes a report of it.
struct AmaxTarget {
  float* value = nullptr;
  int bins = 0;
  int tally = -1;

  AmaxTarget() = default;
  AmaxTarget(Out& amax, Out& report)
      : value(data_or_null<float>(present(report) ? report : amax)),
        bins(present(report) ? static_cast<int>(report->element_count()) : 0) {}

  // By all threads of a warp.
  __device__ __forceinline__ void store(float amax) const {
    if (!bins) {
      if (threadIdx.x % 32 == 0) *value = amax;
      return;
    }
    const int here = bin_of(amax, bins);
    for (int bin = threadIdx.x % 32; bin < bins; bin += 32) value[bin] = bin == here ? amax : 0.f;
  }

  // What is known of the maximum while blocks run; a thread's contribution to it, and a warp's, where it has more.
  __device__ __forceinline__ float so_far() const { return __uint_as_float(__ldcg(shared())); }
  __device__ __forceinline__ float exchange(uint32_t mine) const {
    return __uint_as_float(max(mine, atomicMax(shared(), normal(mine))));
  }
  __device__ __forceinline__ void note(float mine, float known) const {
    const uint32_t most = normal(__reduce_max_sync(0xffffffffu, __float_as_uint(mine)));
    if (threadIdx.x % 32 == 0 && most > __float_as_uint(known)) atomicMax(shared(), most);
  }

 private:
  __device__ __forceinline__ uint32_t* shared() const {
    return tally < 0 ? reinterpret_cast<uint32_t*>(value) : &tallies[tally].most;
  }
};

// Kernels that run at the same time have results at different addresses: a tally for each that ever was suffices.
inline int tally_of(const float* amax) {
  static std::mutex mutex;
  static std::unordered_map<const float*, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(amax); found != known.end()) return found->second;
  return known.size() < kTallies ? known.emplace(amax, static_cast<int>(known.size())).first->second : -1;
}

inline cudaError_t prepare_amax(cudaStream_t stream, int64_t blocks, AmaxTarget* target) {
  target->tally = target->value && blocks ? tally_of(target->value) : -1;
  return target->value && target->tally < 0 ? cudaMemsetAsync(target->value, 0, sizeof(float), stream) : cudaSuccess;
}

static __global__ void report_in_place(const AmaxTarget target) {
  const float amax = *target.value;
  __syncwarp();
  target.store(amax);
}

// After the kernel that found the amax.
inline cudaError_t finish_amax(cudaStream_t stream, const AmaxTarget& target) {
  if (!target.value || !target.bins || target.tally >= 0) return cudaSuccess;
  return launch({1, 32}, stream, report_in_place, target);
}

// Of a block. Every thread calls note(), the block meets at a barrier, then every thread calls merge(): stores that
// come after it hide its atomic operations. The last block of all stores the maximum.
struct BlockAmax {
  uint32_t of_warp[32];
  float so_far;

  __device__ __forceinline__ void note(float mine) {
    const uint32_t most = __reduce_max_sync(0xffffffffu, __float_as_uint(mine));
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = most;
  }
  // Instead, while blocks run: to all threads, the most of theirs and of what other blocks found so far.
  __device__ __forceinline__ float exchange(const AmaxTarget& target) {
    __syncthreads();
    if (threadIdx.x < 32) {
      const uint32_t most = __reduce_max_sync(0xffffffffu, threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0u);
      if (threadIdx.x == 0) so_far = target.exchange(most);
    }
    __syncthreads();
    return so_far;
  }
  __device__ __forceinline__ void merge(const AmaxTarget& target) const {
    if (!target.value || threadIdx.x >= 32) return;
    uint32_t most = __reduce_max_sync(0xffffffffu, threadIdx.x < blockDim.x / 32 ? of_warp[threadIdx.x] : 0u);
    most = normal(most);
    if (target.tally < 0) {
      if (most && threadIdx.x == 0) atomicMax(reinterpret_cast<uint32_t*>(target.value), most);
      return;
    }
    bool last = false;
    if (threadIdx.x == 0) {
      // Both go to the same unit of the L2 cache. Using what the first returns, the second waits for it: a fence would
      // wait for all stores of the thread as well.
      Tally& tally = tallies[target.tally];
      const uint32_t before = atomicMax(&tally.most, most);
      last = atomicAdd(&tally.done, before == 0xffffffffu ? 2u : 1u) == gridDim.x - 1;
      if (last) {
        most = atomicExch(&tally.most, 0u);
        atomicExch(&tally.done, 0u);
      }
    }
    if (!__shfl_sync(0xffffffffu, last, 0)) return;
    target.store(__uint_as_float(__shfl_sync(0xffffffffu, most, 0)));
  }
};

}  // namespace te

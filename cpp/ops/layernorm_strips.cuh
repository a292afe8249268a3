// Norms by strips of rows that clusters of blocks hold in registers: y, its transposed copy and amax of one read.
#pragma once

#include <atomic>

#include "core/cluster.cuh"
#include "ops/layernorm_rows.cuh"

namespace te {

// ---- A cluster of blocks holds a strip of rows, each block some columns of it. A row's mean and its sum of squared
// ---- differences are taken per block, exchanged once, and joined (Chan, Golub and LeVeque, 1979). The clusters stay
// ---- and go over all strips, neighbours at the same time: y_t has runs of 32 bytes, of which the L2 cache makes whole
// ---- lines. While a strip is worked on, the next is copied to shared memory, where a thread reads back only what it
// ---- copied itself, so that needs no barrier. With 4 steps the blocks exchange its statistics midway through the
// ---- one before, lest they wait for each other; with 2 the copy would not have landed by then. With 4 a cluster
// ---- also takes the next strip of all whenever it gets to one. Clusters that have strips of their own drift apart,
// ---- and lines that wait for the slowest leave the cache in pieces: 8 % of the time at 16384 columns, where with 2
// ---- it is none.

constexpr int kStripThreads = 256;
constexpr int kStripRows = 32;  // 4 a warp
constexpr int kLargestCluster = 16;

// A thread holds kSteps times 4 rows x 8 columns.
template <typename T, int kSteps>
struct Strip {
  static constexpr int kCols = kSteps * 32 * 8;
  static constexpr int kBytes = kSteps * sizeof(T);
  static constexpr int kBlocks = kBytes <= 4 ? 3 : kBytes <= 8 ? 2 : 1;  // on a multiprocessor
  uint4 next[kSteps][4][Vec8<T>::kQuads][kStripThreads];
  float4 parameters[2][kSteps][2][32];                       // gamma and beta, by lane
  float2 parts[2][kStripRows][kLargestCluster];              // mean, sum of squared differences; by strip, row, block
  float2 after_next[2];                                      // x: the bits of that strip's first row; by strip
  uint64_t arrived[2];                                       // what the blocks sent to `parts` and `after_next`
  alignas(16) TransposedTile<kStripRows, kCols> transposed;  // not there where y is not FP8
};

#ifdef TE_CLUSTERS
// Writes to the same shared variable of another block of the cluster, and counts the 8 bytes on `arrived` there. A
// barrier of the cluster would do, but wait for all stores to device memory as well.
__device__ __forceinline__ void send(float2* p, uint64_t* arrived, int block, float2 value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   address_in_block(shared_address(p), block)),
               "f"(value.x), "f"(value.y), "r"(address_in_block(shared_address(arrived), block))
               : "memory");
}

// Sums over a warp of 4 values a lane: lane l gets the sum of value l / 8. 6 shuffles in place of 20, as each step
// halves the values that a lane still carries.
__device__ __forceinline__ float sum_rows(const float (&v)[4]) {
  const bool upper = threadIdx.x & 16, odd = threadIdx.x & 8;
  const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 16);
  const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 16);
  return sum_of_lanes<8>((odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8));
}
#endif

// How often clusters took a strip. All 0 between kernels: the last to take one, or none that is left, sees to it.
static __device__ int strips_taken[kTallies];

// `counter` is an entry of strips_taken for this kernel alone; negative: strips are given out beforehand.
template <typename T, int kSteps, Stored kStored>
__global__ void __launch_bounds__(kStripThreads, Strip<T, kSteps>::kBlocks)
    norm_strips(const Norm a, const Result out, int cluster, int counter) {
#ifdef TE_CLUSTERS
  using S = Strip<T, kSteps>;
  constexpr bool kExchangesEarly = kSteps > 2, kByTensorCores = kExchangesEarly && sizeof(T) == 2;
  constexpr bool kTransposes = kStored != Stored::kFloat, kThroughL1 = kSteps == 2 || !kTransposes;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  S& shared = *reinterpret_cast<S*>(shared_memory);
  __shared__ BlockAmax amax;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) make_barrier(shared_address(&shared.arrived[i]), 1);
    show_barriers();
  }
  cluster_arrive();  // a block's shared memory may be written once the block runs

  const int rank = static_cast<int>(blockIdx.x) % cluster;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, of_lane = lane / 8;
  const int64_t col0 = int64_t{rank} * S::kCols;
  const int cols_here = static_cast<int>(min(out.cols - col0, int64_t{S::kCols}));
  const auto here = [&](int step) { return (step * 32 + lane) * 8 < cols_here; };
  const float per_column = 1.f / static_cast<float>(out.cols), per_column_here = 1.f / static_cast<float>(cols_here);
  // From the last strip to the first, see cuda.cuh.
  const int rows = static_cast<int>(out.rows), strips = (rows - 1) / kStripRows + 1;
  const int clusters = static_cast<int>(gridDim.x) / cluster, stride = clusters * kStripRows;
  const int first = (strips - 1 - static_cast<int>(blockIdx.x) / cluster) * kStripRows;
  // Where the 4 rows begin for this thread. Rows beyond the last repeat it: nothing else need know of them.
  const uint32_t cols = static_cast<uint32_t>(out.cols);
  const auto offset = [&](int row0, int i) {
    return before_row(min(row0 + warp * 4 + i, rows - 1), cols) + col0 + lane * 8;
  };
  const auto fetch = [&](int row0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const T* x = static_cast<const T*>(a.x) + offset(row0, i);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (!here(step)) continue;
#pragma unroll
        for (int q = 0; q < Vec8<T>::kQuads; ++q) {
          copy_quad<kThroughL1>(&shared.next[step][i][q][threadIdx.x], x + step * 256 + q * (16 / sizeof(T)));
        }
      }
    }
  };
  {  // gamma and beta, which would come late behind the strip
    static_assert(kSteps * 32 <= kStripThreads);
    const int u = threadIdx.x;
    const bool mine = u < kSteps * 32 && u * 8 < cols_here;
    float v[2][8];
    if (mine) {
      a.gamma.get8(col0 + u * 8, 8, true, v[0]);
      a.beta.get8(col0 + u * 8, 8, true, v[1]);
    }
    fetch(first);
    if (mine) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          shared.parameters[p][u / 32][h][u % 32] =
              make_float4(v[p][4 * h], v[p][4 * h + 1], v[p][4 * h + 2], v[p][4 * h + 3]);
        }
      }
    }
  }
  const float scale = out.scale.get();
  if (blockIdx.x == 0 && threadIdx.x == 0) out.scale.store_inverse(scale);
  float most[2] = {};
  __syncthreads();  // gamma and beta are there: st.async, which orders the strips, promises nothing of other stores
  cluster_wait();

  const auto wait_for_strip = [&] { asm volatile("cp.async.wait_all;" ::: "memory"); };
  const auto fetched = [&](int step, int i) {
    Vec8<T> x = {};
    if (!here(step)) return x;
#pragma unroll
    for (int q = 0; q < Vec8<T>::kQuads; ++q) x.set_quad(q, shared.next[step][i][q][threadIdx.x]);
    return x;
  };
  // This block's share of the statistics of a strip: lane l has row l / 8 of the warp's.
  const auto measured = [&](auto get) {
    float mean = 0.f, squares = 0.f;
    bool precise = false;
    if constexpr (kByTensorCores) {
      RowMoments<T> moments[4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) moments[i].add(get(step, i));
      }
      squares = sum_rows({moments[0].squares(), moments[1].squares(), moments[2].squares(), moments[3].squares()});
      if (a.centered) {
        const float lower = of_lane % 2 ? moments[1].sum() : moments[0].sum();
        const float upper = of_lane % 2 ? moments[3].sum() : moments[2].sum();
        mean = sum_of_lanes<4>(of_lane < 2 ? lower : upper) * per_column_here;
      }
      precise = !a.centered || center(squares, mean, static_cast<float>(cols_here));
    }
    if (__all_sync(0xffffffffu, precise)) return float2{mean, squares};
    const auto sum_of = [&](int i, auto term) {
      float sum = 0.f;
#pragma unroll(kByTensorCores ? 1 : kSteps)
      for (int step = 0; step < kSteps; ++step) {
        if (!here(step)) continue;
        const Vec8<T> x = get(step, i);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += term(x[j]);
      }
      return sum;
    };
    float sums[4];
    if (a.centered) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = sum_of(i, [](float x) { return x; });
      mean = sum_rows(sums) * per_column_here;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float of_row = __shfl_sync(0xffffffffu, mean, i * 8);
      sums[i] = sum_of(i, [&](float x) { return (x - of_row) * (x - of_row); });
    }
    return float2{mean, sum_rows(sums)};
  };
  // How many strips were taken before the one after next of this cluster, beyond the first two of each, which are
  // given out beforehand. Its first thread takes one for each strip that it works on, so there are as many takes as
  // strips.
  int taken = 0;
  const auto take = [&](int turn) {
    if (rank != 0 || threadIdx.x != 0) return;
    taken =
        counter < 0 ? turn * clusters + static_cast<int>(blockIdx.x) / cluster : atomicAdd(&strips_taken[counter], 1);
  };
  // To all blocks of the cluster. One that is a strip ahead writes to the other half of `parts`; none is two ahead.
  const auto parts_of = [&](int turn) -> float2(&)[kLargestCluster] {
    return shared.parts[turn % 2][warp * 4 + of_lane];
  };
  const auto send_measured = [&](int turn, auto get) {
    const float2 mine = measured(get);
    float2(&parts)[kLargestCluster] = parts_of(turn);
    if (cluster == 1) {  // a launch without clusters must not send
      if (lane % 8 == 0) parts[0] = mine;
      __syncwarp();
      return;
    }
    uint64_t* const arrived = &shared.arrived[turn % 2];
    if (threadIdx.x == 0)
      expect_bytes(shared_address(arrived), (cluster * kStripRows + kExchangesEarly) * sizeof(float2));
#pragma unroll
    for (int h = 0; h < kLargestCluster / 8; ++h) {
      const int block = lane % 8 + h * 8;
      if (block < cluster) send(&parts[rank], arrived, block, mine);
    }
    if (!kExchangesEarly || rank != 0 || warp != 0) return;
    const int before = __shfl_sync(0xffffffffu, taken, 0), row = (strips - 1 - 2 * clusters - before) * kStripRows;
    if (lane == 0 && counter >= 0 && before == strips - 1) atomicExch(&strips_taken[counter], 0);
    if (lane < cluster) send(&shared.after_next[turn % 2], arrived, lane, {__int_as_float(row), 0.f});
  };

  int turn = 0;
  wait_for_strip();
  if constexpr (kExchangesEarly) {
    take(turn);
    send_measured(turn, fetched);
  }
  for (int row0 = first, row1 = first - stride, row2; row0 >= 0; row0 = row1, row1 = row2, ++turn) {
    // ---- Take this strip, ask for the next
    if (kExchangesEarly && row1 >= 0) take(turn + 1);  // behind the copies it would come back after them
    if constexpr (!kExchangesEarly) wait_for_strip();
    Vec8<T> raw[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) raw[step][i] = fetched(step, i);
    }
    if (row1 >= 0) fetch(row1);
    row2 = row1 - stride;

    // ---- Its statistics
    if constexpr (!kExchangesEarly) send_measured(turn, [&](int step, int i) { return raw[step][i]; });
    if (cluster > 1) {
      wait_for_phase(shared_address(&shared.arrived[turn % 2]), turn / 2 % 2);
      if (kExchangesEarly) row2 = __float_as_int(shared.after_next[turn % 2].x);
    }
    const float2(&parts)[kLargestCluster] = parts_of(turn);
    float2 part[kLargestCluster / 8];
    float count[kLargestCluster / 8], weighted = 0.f, squares = 0.f;
#pragma unroll
    for (int h = 0; h < kLargestCluster / 8; ++h) {
      const int block = lane % 8 + h * 8;
      part[h] = block < cluster ? parts[block] : float2{0.f, 0.f};
      count[h] =
          block < cluster ? static_cast<float>(min(static_cast<int>(out.cols) - block * S::kCols, S::kCols)) : 0.f;
      weighted += part[h].x * count[h];
    }
    const float mean = sum_of_lanes<8>(weighted) * per_column;
#pragma unroll
    for (int h = 0; h < kLargestCluster / 8; ++h) {
      const float d = part[h].x - mean;
      squares += part[h].y + count[h] * (d * d);
    }
    const float rstd = rsqrtf(sum_of_lanes<8>(squares) * per_column + a.epsilon);
    const int row = row0 + warp * 4 + of_lane;
    if (rank == 0 && lane % 8 == 0 && row < rows) {
      if (a.mean) a.mean[row] = mean;
      a.rstd[row] = rstd;
    }
    float factor[4], shift[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factor[i] = __shfl_sync(0xffffffffu, rstd, i * 8);
      shift[i] = __shfl_sync(0xffffffffu, -mean * rstd, i * 8);
    }

    // ---- y, and the strip's bytes for y_t, once all have stored the last strip's. If not ahead, all had before they
    // sent.
    if (kTransposes && (kExchangesEarly || cluster == 1)) __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (kExchangesEarly && step == kSteps / 2 && row1 >= 0) {
        wait_for_strip();
        send_measured(turn + 1, fetched);
      }
      if (!here(step)) continue;
      float4 parameters[2][2];
#pragma unroll
      for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int h = 0; h < 2; ++h) parameters[p][h] = shared.parameters[p][step][h][lane];
      }
      const float gamma[8] = {parameters[0][0].x, parameters[0][0].y, parameters[0][0].z, parameters[0][0].w,
                              parameters[0][1].x, parameters[0][1].y, parameters[0][1].z, parameters[0][1].w};
      const float beta[8] = {parameters[1][0].x, parameters[1][0].y, parameters[1][0].z, parameters[1][0].w,
                             parameters[1][1].x, parameters[1][1].y, parameters[1][1].z, parameters[1][1].w};
      uint32_t bytes[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = normalized(raw[step][i][j], factor[i], shift[i], gamma[j], beta[j]);
        const uint2 q = store_result<kStored>(out, offset(row0, i) + step * 256, scale, v, 8, true, most[i % 2]);
        bytes[0][i] = q.x;
        bytes[1][i] = q.y;
      }
      if (kTransposes) shared.transposed.put_transposed((step * 32 + lane) * 8, warp, bytes);
    }
    if (kTransposes) {
      __syncthreads();
      shared.transposed.template store<kStripThreads>(out.y_t, col0, row0, out.cols, out.rows, out.vector_t);
    }
  }
  amax.note(max_abs(most[0], most[1]));
  __syncthreads();
  amax.merge(out.amax);
#endif
}

// ---- Launching

// cudaErrorLaunchOutOfResources where the device has no room for such a cluster.
template <typename T, int kSteps, Stored kStored>
cudaError_t launch_strips_as(cudaStream_t stream, const Norm& a, const Result& out) {
  using S = Strip<T, kSteps>;
  const auto kernel = norm_strips<T, kSteps, kStored>;
  const int cluster = static_cast<int>(ceil_div(out.cols, S::kCols));
  const int shared_memory = sizeof(S) - (kStored == Stored::kFloat ? sizeof(S::transposed) : 0);
  if (shared_memory > current_device().shared_memory) return cudaErrorLaunchOutOfResources;
  Launch l{cluster, kStripThreads, shared_memory, cluster};
  static std::atomic<int> all_known[kDevices][kLargestCluster + 1];  // one more than run at once, 0: not known
  std::atomic<int>& known = all_known[current_device().id][cluster];
  if (known == 0) {
    int at_once = 0;
    if (const cudaError_t error = resident_clusters(l, kernel, &at_once); error != cudaSuccess) return error;
    known = at_once + 1;
  }
  if (known == 1) return cudaErrorLaunchOutOfResources;
  l.blocks *= std::min<int64_t>(known - 1, ceil_div(out.rows, kStripRows));
  return launch(l, stream, kernel, a, out, cluster, kSteps > 2 && cluster > 1 ? tally_of(a.rstd) : -1);
}
template <typename T, int kSteps>
cudaError_t launch_strips(cudaStream_t stream, const Norm& a, const Result& out) {
  if (is_fp8(out.dtype)) return launch_strips_as<T, kSteps, Stored::kE4M3>(stream, a, out);
  return launch_strips_as<T, kSteps, Stored::kFloat>(stream, a, out);
}

// The launch of strips for rows as these, null where there is none: so for E5M2, in which hardly anybody's forward pass
// is. With 2 steps more blocks share a multiprocessor, so that one loads while another computes; with 4 fewer make a
// cluster, and none waits for the others' statistics.
template <typename T>
auto strips_of(const Result& out) -> cudaError_t (*)(cudaStream_t, const Norm&, const Result&) {
  if (out.rows >= kMostRows || (is_fp8(out.dtype) && (out.dtype != DType::F8E4M3FN || !out.y_t))) return nullptr;
  constexpr int64_t kNarrow = Strip<T, 2>::kCols;
  constexpr bool kAlone = Strip<T, 4>::kBlocks == 1;  // 4 steps leave no room for a second block
  const bool filled = out.cols < kNarrow || out.cols % kNarrow == 0 || kAlone;
  if (filled && out.cols <= 8 * kNarrow) return launch_strips<T, 2>;
  return out.cols <= kLargestCluster * Strip<T, 4>::kCols ? launch_strips<T, 4> : nullptr;
}

}  // namespace te

// Hopper's copy engine: boxes of two-dimensional arrays, to and from addresses in shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/cluster.cuh"

namespace te {

#ifdef TE_CLUSTERS
// A box of the array from (row, column) on to shared memory; what is beyond the array's edge is zero.
__device__ __forceinline__ void fetch_box(const CUtensorMap& array, int row, int column, uint32_t to,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(&array), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// To that place of each of these blocks of the cluster, whose barriers at that place are signalled.
__device__ __forceinline__ void fetch_box_for(uint16_t blocks, const CUtensorMap& array, int row, int column,
                                              uint32_t to, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&array), "r"(column), "r"(row), "r"(barrier), "h"(blocks)
      : "memory");
}

// What this thread stored in shared memory is there for the copy engine.
__device__ __forceinline__ void show_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A box from shared memory to the array, or added to what is there; what is beyond the array's edge goes nowhere.
__device__ __forceinline__ void put_box(const CUtensorMap& array, int row, int column, uint32_t from, bool add) {
  if (add) {
    asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&array),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
  } else {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&array),
                 "r"(column), "r"(row), "r"(from)
                 : "memory");
  }
}
__device__ __forceinline__ void end_puts() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but kPending groups of this thread's puts have read shared memory, or are done.
template <int kPending>
__device__ __forceinline__ void wait_until_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void wait_for_puts() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#endif

}  // namespace te

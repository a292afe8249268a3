// A parallel loop over XLA's own CPU thread pool. The calling thread works too and waits only for items
// that another thread has begun, so a pool whose every thread waits in here cannot deadlock.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "core/ffi.h"

namespace te {

// Calls body(i) for i in [0, n). `body` must not throw.
template <typename Body>
void parallel_for(ffi::ThreadPool& pool, int64_t n, const Body& body) {
  if (n <= 1) {
    if (n == 1) body(0);
    return;
  }
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto work = [shared, n, &body] {
    // A worker that starts late finds no item left and never touches `body`, which may be gone.
    for (int64_t i; (i = shared->next.fetch_add(1)) < n;) {
      body(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  const int64_t helpers = std::min<int64_t>(n, pool.num_threads()) - 1;
  for (int64_t t = 0; t < helpers; ++t) pool.Schedule(decltype(work)(work));
  work();
  while (shared->done.load(std::memory_order_acquire) < n) std::this_thread::yield();
}

// most = max(most, mine), of several threads.
inline void raise(std::atomic<uint32_t>& most, uint32_t mine) {
  for (uint32_t seen = most; seen < mine && !most.compare_exchange_weak(seen, mine);) {
  }
}

// Rows [0, rows) in chunks of at least `least` elements each: body(first, last).
template <typename Body>
void parallel_rows(ffi::ThreadPool& pool, int64_t rows, int64_t cols, const Body& body, int64_t least = 1 << 15) {
  if (rows <= 0) return;
  const int64_t most = std::max<int64_t>(1, pool.num_threads() * 4);
  const int64_t chunks = std::clamp<int64_t>(rows * cols / least, 1, std::min(rows, most));
  parallel_for(pool, chunks, [&](int64_t i) { body(rows * i / chunks, rows * (i + 1) / chunks); });
}

}  // namespace te

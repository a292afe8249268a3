// Host memory for the length of a call. It is kept for the next one: fresh pages cost 0.1 to 0.4 ms a MiB
// at their first touch, as much as the work done in them.
#pragma once

#include <cstdlib>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

namespace te {

class Scratch {
 public:
  explicit Scratch(size_t bytes) : size_(bytes) {
    if (!bytes) return;
    Pool& pool = shared();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    // The last one returned is the warmest. One that is too small makes place for the larger one.
    if (!pool.free.empty()) {
      std::tie(size_, data_) = pool.free.back();
      pool.free.pop_back();
      pool.kept -= size_;
    }
    if (size_ < bytes || !data_) {
      std::free(data_);
      size_ = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      data_ = std::aligned_alloc(kAlignment, size_);
    }
  }
  ~Scratch() {
    if (!data_) return;
    Pool& pool = shared();
    const std::lock_guard<std::mutex> lock(pool.mutex);
    if (pool.kept + size_ <= kKept) {
      pool.kept += size_;
      pool.free.emplace_back(size_, data_);
    } else {
      std::free(data_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);  // null where memory ran out
  }

 private:
  static constexpr size_t kAlignment = 4096;
  static constexpr size_t kKept = size_t{256} << 20;

  struct Pool {
    std::mutex mutex;
    std::vector<std::pair<size_t, void*>> free;
    size_t kept = 0;
  };
  static Pool& shared() {
    static Pool& pool = *new Pool;  // never destroyed: XLA's threads may outlive static objects
    return pool;
  }

  size_t size_;
  void* data_ = nullptr;
};

}  // namespace te

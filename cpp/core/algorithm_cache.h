// A small file of measured choices, so that a product is timed once for a GPU and a library version: lines of
// "key<TAB>choice", under $TE_CACHE_DIR, or $XDG_CACHE_HOME/transformer_engine_jax, or ~/.cache/transformer_engine_jax.
// Processes that start together, one a GPU, share it: what one measures the others wait for.
// A cache that cannot be read or written is an empty one.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace te {

inline std::string cache_folder() {
  const auto variable = [](const char* name) { return std::string(std::getenv(name) ? std::getenv(name) : ""); };
  if (const std::string path = variable("TE_CACHE_DIR"); !path.empty()) return path;
  std::string path = variable("XDG_CACHE_HOME");
  if (path.empty()) path = variable("HOME") + "/.cache";
  return path + "/transformer_engine_jax";
}

class AlgorithmCache {
 public:
  // `name` says what the choices depend on beside their keys: the GPU and the library's version.
  explicit AlgorithmCache(const std::string& name) : path_(cache_folder() + "/" + name) {
    std::error_code ignored;
    std::filesystem::create_directories(cache_folder(), ignored);
  }

  // "" where there is none.
  std::string find(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto entry = choices_.find(key);
    if (entry == choices_.end()) {
      read_on();
      entry = choices_.find(key);
    }
    return entry == choices_.end() ? "" : entry->second;
  }

  void add(const std::string& key, const std::string& choice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    choices_[key] = choice;
    read_on();
    const std::string line = key + "\t" + choice + "\n";
    std::ofstream(path_, std::ios::app) << (cut_short_ ? "\n" + line : line);
  }

  // A process's turn to measure, while others that share the folder wait. Not for long: where one was stopped amid its
  // turn, the others go on without turns.
  class Turn {
   public:
    explicit Turn(const AlgorithmCache& cache)
        : file_(open((cache.path_ + ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666)) {
      using namespace std::chrono;
      static std::atomic<bool> gave_up = false;
      const auto until = steady_clock::now() + seconds(60);
      while (file_ >= 0 && !gave_up && flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        if (steady_clock::now() > until) gave_up = true;
        std::this_thread::sleep_for(milliseconds(5));
      }
    }
    ~Turn() {
      if (file_ >= 0) close(file_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    const int file_;
  };

 private:
  // Lines that were added since, by other processes too.
  void read_on() {
    std::ifstream file(path_);
    file.seekg(read_);
    cut_short_ = false;
    for (std::string line; std::getline(file, line);) {
      if ((cut_short_ = file.eof())) return;  // by a process that ended amid it
      read_ += static_cast<std::streamoff>(line.size()) + 1;
      if (const size_t tab = line.find('\t'); tab != std::string::npos)
        choices_[line.substr(0, tab)] = line.substr(tab + 1);
    }
  }

  std::mutex mutex_;
  std::string path_;
  std::map<std::string, std::string> choices_;
  std::streamoff read_ = 0;  // bytes of the file
  bool cut_short_ = false;   // the last line has no end
};

}  // namespace te

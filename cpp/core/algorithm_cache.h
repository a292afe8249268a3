// A small file of measured choices, so that a product is timed once for a GPU and a library version: lines of
// "key<TAB>choice", under $TE_CACHE_DIR, or $XDG_CACHE_HOME/transformer_engine_jax, or ~/.cache/transformer_engine_jax.
// A cache that cannot be read or written is an empty one.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <string>

namespace te {

class AlgorithmCache {
 public:
  // `name` says what the choices depend on beside their keys: the GPU and the library's version.
  explicit AlgorithmCache(const std::string& name) : path_(folder() + "/" + name) {
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) {
      if (const size_t tab = line.find('\t'); tab != std::string::npos)
        choices_[line.substr(0, tab)] = line.substr(tab + 1);
    }
  }

  // "" where there is none.
  std::string find(const std::string& key) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto entry = choices_.find(key);
    return entry == choices_.end() ? "" : entry->second;
  }

  void add(const std::string& key, const std::string& choice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    choices_[key] = choice;
    std::ofstream(path_, std::ios::app) << key + "\t" + choice + "\n";  // one write: processes may append side by side
  }

 private:
  static std::string folder() {
    const auto variable = [](const char* name) { return std::string(std::getenv(name) ? std::getenv(name) : ""); };
    std::string path = variable("TE_CACHE_DIR");
    if (path.empty()) {
      path = variable("XDG_CACHE_HOME");
      if (path.empty()) path = variable("HOME") + "/.cache";
      path += "/transformer_engine_jax";
    }
    std::error_code ignored;
    std::filesystem::create_directories(path, ignored);
    return path;
  }

  mutable std::mutex mutex_;
  std::string path_;
  std::map<std::string, std::string> choices_;
};

}  // namespace te

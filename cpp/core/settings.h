// What users set through the environment, beside the variables that one file alone reads.
#pragma once

#include <cstdlib>
#include <string>

namespace te {

// Whether a boolean flag is on in XLA_FLAGS, where the last one counts.
inline bool xla_flag(const std::string& name) {
  const char* const variable = std::getenv("XLA_FLAGS");
  const std::string flags = variable ? variable : "";
  size_t at = flags.rfind("--" + name);
  if (at == std::string::npos) return false;
  at += 2 + name.size();
  const std::string value = flags.substr(at, flags.find_first_of(" \t\n", at) - at);
  return value.empty() || value == "=true" || value == "=1";
}

// XLA's deterministic mode: the same bits in every run.
inline bool deterministic() {
  static const bool on = xla_flag("xla_gpu_deterministic_ops") || xla_flag("xla_gpu_exclude_nondeterministic_ops");
  return on;
}

}  // namespace te

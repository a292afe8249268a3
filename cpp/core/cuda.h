// What module.cc tells Python about the CUDA build. Needs no GPU.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace te {

// "CUDA runtime 13.0, compiled for 89, 90a, 100; driver supports CUDA 13.0"
std::string cuda_versions();

// The algorithm of a call of te_gemm with these attributes, once it is compiled; "" where it has none. (ops/gemm.cu)
std::string gemm_algorithm(const std::vector<int64_t>& buffers, int64_t k_axes, bool split_accumulator,
                           const std::string& k_first);

}  // namespace te

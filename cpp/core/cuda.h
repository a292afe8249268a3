// What module.cc tells Python about the CUDA build. Needs no GPU.
#pragma once

#include <string>

namespace te {

// "CUDA runtime 13.0, compiled for 89, 90, 100; driver supports CUDA 13.0"
std::string cuda_versions();

}  // namespace te

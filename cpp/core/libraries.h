// CUDA's libraries, found at run time: the ones that JAX's CUDA plugin brings, so that the module needs no version of
// them in particular.
#pragma once

#include <dlfcn.h>
#include <link.h>

#include <initializer_list>
#include <string>
#include <vector>

namespace te {

// The directories of Python packages that CUDA libraries or JAX's plugins are loaded from: the nvidia-* wheels lie
// there too, also those that XLA loads only when it first needs them.
inline std::vector<std::string> package_directories() {
  std::vector<std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void* out) {
        const std::string path = object->dlpi_name ? object->dlpi_name : "";
        for (const char* part : {"/jax_plugins/", "/nvidia/"}) {
          const size_t at = path.rfind(part);
          if (at != std::string::npos) static_cast<std::vector<std::string>*>(out)->push_back(path.substr(0, at));
        }
        return 0;
      },
      &found);
  return found;
}

// One of `names` that is loaded; else one of `in_packages`, such as "nvidia/cudnn/lib/libcudnn.so.9"; else one of
// `names` wherever the system looks. Null where there is none.
inline void* open_library(std::initializer_list<const char*> names, std::initializer_list<const char*> in_packages) {
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  std::vector<std::string> paths;
  for (const std::string& directory : package_directories()) {
    for (const char* path : in_packages) paths.push_back(directory + "/" + path);
  }
  paths.insert(paths.end(), names.begin(), names.end());
  for (const std::string& path : paths) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

}  // namespace te

// The extension module, compiled once per platform: what the handlers of this build registered, by target
// name and stage, as capsules that jax.ffi.register_ffi_target takes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "core/ffi.h"

#ifdef TE_CUDA
#include "core/cuda.h"
#endif

namespace nb = nanobind;

NB_MODULE(TE_MODULE, m) {
  m.def(
      "registrations",
      [] {
        nb::dict all;
        for (const te::Registration& r : te::registrations()) {
          if (!all.contains(r.target)) all[r.target] = nb::dict();
          auto stages = nb::cast<nb::dict>(all[r.target]);
          if (stages.contains(r.stage)) throw std::runtime_error(std::string(r.target) + ": two handlers of this name");
          stages[r.stage] = nb::capsule(r.function);
        }
        return all;
      },
      "FFI target -> stage -> capsule, for jax.ffi.register_ffi_target.");
  m.def(
      "signatures",
      [] {
        nb::dict all;
        for (const te::Registration& r : te::registrations()) {
          if (std::string(r.stage) != "execute") continue;
          all[r.target] = nb::make_tuple(r.signature.operands, r.signature.results, r.signature.attributes);
        }
        return all;
      },
      "FFI target -> (operands, results, names of attributes) of its handler.");
  m.attr("ffi_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef TE_CUDA
  m.def("gemm_algorithm", &te::gemm_algorithm, nb::arg("buffers"), nb::arg("k_axes"), nb::arg("split_accumulator"),
        nb::arg("k_first"),
        "What te_gemm runs with these attributes on the current device, once compiled, as text; \"\" where it is not.");
  m.def("versions", &te::cuda_versions, "What this module was built with and what it finds at run time, as text.");
#endif
}

// All that touches XLA's FFI headers: the types a handler's signature is made of, and the one macro
// that binds a handler by type inference and registers it. There is no list of handlers anywhere else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifdef TE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace te {

namespace ffi = ::xla::ffi;
using DType = ffi::DataType;
using In = ffi::AnyBuffer;                // an operand; an absent one is f32[0]
using Out = ffi::Result<ffi::AnyBuffer>;  // a result; likewise

// One handler of this extension module, as module.cc hands it to Python.
struct Registration {
  const char* target;  // FFI target name, the same on every platform
  const char* stage;   // "execute" or "initialize"
  void* function;
};

inline std::vector<Registration>& registrations() {
  static std::vector<Registration> all;
  return all;
}

struct Registrar {
  Registrar(const char* target, const char* stage, void* function) {
    registrations().push_back({target, stage, function});
  }
};

}  // namespace te

// Contexts that a handler may name as a parameter.
namespace xla::ffi {
#ifdef TE_CUDA
template <>
struct CtxBinding<cudaStream_t> {
  using Ctx = PlatformStream<cudaStream_t>;
};
#define TE_HANDLER_TRAITS {::xla::ffi::Traits::kCmdBufferCompatible}
#else
template <>
struct CtxBinding<ThreadPool> {
  using Ctx = ThreadPool;
};
#define TE_HANDLER_TRAITS \
  {                       \
  }
#endif
}  // namespace xla::ffi

// TE_HANDLER(quantize, Quantize): binds te::Quantize by its signature and registers it as te_quantize.
#define TE_HANDLER(name, function)                                                                \
  static XLA_FFI_Error* name##_execute(XLA_FFI_CallFrame* frame) {                                \
    static auto* handler = ::xla::ffi::Ffi::BindTo(&::te::function, TE_HANDLER_TRAITS).release(); \
    return handler->Call(frame);                                                                  \
  }                                                                                               \
  static const ::te::Registrar name##_registrar("te_" #name, "execute", reinterpret_cast<void*>(&name##_execute));

// TE_INITIALIZER(gemm, GemmInitialize): likewise, what runs before any CUDA graph is captured.
#define TE_INITIALIZER(name, function)                                                                              \
  static XLA_FFI_Error* name##_initialize(XLA_FFI_CallFrame* frame) {                                               \
    using ::xla::ffi::ExecutionStage;                                                                               \
    static auto* handler =                                                                                          \
        ::xla::ffi::Ffi::BindTo<decltype(&::te::function), ExecutionStage::kInitialize>(&::te::function).release(); \
    return handler->Call(frame);                                                                                    \
  }                                                                                                                 \
  static const ::te::Registrar name##_initialize_registrar("te_" #name, "initialize",                               \
                                                           reinterpret_cast<void*>(&name##_initialize));

// TE_ATTRIBUTES(te::QuantizeAttributes, TE_ATTRIBUTE(int64_t, k_axes)): the static attributes of a handler,
// in the order of the struct's members.
#define TE_ATTRIBUTE(type, name) ::xla::ffi::StructMember<type>(#name)
#define TE_ATTRIBUTES(type, ...) XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(type, __VA_ARGS__)

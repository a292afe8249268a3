// All that touches XLA's FFI headers: the types a handler's signature is made of, and the one macro
// that binds a handler by type inference and registers it. There is no list of handlers anywhere else.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

#ifdef TE_CUDA
#include "core/own_devices.h"
#endif

namespace te {

namespace ffi = ::xla::ffi;
using DType = ffi::DataType;
using In = ffi::AnyBuffer;                // an operand; an absent one is f32[0]
using Out = ffi::Result<ffi::AnyBuffer>;  // a result; likewise

// The names of what a parameter of a handler is decoded from: of a struct those that TE_ATTRIBUTES says.
template <typename T>
inline std::vector<std::string> attribute_names() {
  return {};
}

// What a handler takes: operands, results, attributes.
struct Signature {
  int operands = 0, results = 0;
  std::vector<std::string> attributes;

  template <typename... P>
  static Signature of(ffi::Error (*)(P...)) {
    Signature s{(0 + ... + std::is_same_v<P, In>), (0 + ... + std::is_same_v<P, Out>), {}};
    const auto add = [&](const std::vector<std::string>& names) {
      s.attributes.insert(s.attributes.end(), names.begin(), names.end());
    };
    (add(attribute_names<P>()), ...);
    return s;
  }
};

// One handler of this extension module, as module.cc hands it to Python.
struct Registration {
  const char* target;  // FFI target name, the same on every platform
  const char* stage;   // "execute", "initialize" or "instantiate"
  void* function;
  Signature signature;
};

inline std::vector<Registration>& registrations() {
  static std::vector<Registration> all;
  return all;
}

struct Registrar {
  Registrar(const char* target, const char* stage, void* function, Signature signature = {}) {
    registrations().push_back({target, stage, function, std::move(signature)});
  }
};

#ifdef TE_CUDA
// The attribute `buffers`: for each operand and result its dtype, its rank and its dimensions, one after the other.
// Empty where sizes are not known before a call.
using Buffers = ffi::Span<const int64_t>;

// An initializer of operands, results and attributes, run when a program is compiled: on buffers that have a dtype and
// dimensions but no data, for each GPU of the process. So what it makes, and times, once for calls like this one is
// there before the first step.
template <auto kInitialize>
class Instantiation {
  template <typename... Arguments>
  static std::tuple<Arguments...> arguments_of(ffi::Error (*)(Arguments...));
  using All = decltype(arguments_of(kInitialize));
  static constexpr size_t kBuffers = std::tuple_size_v<All> - 1;

 public:
  using Attributes = std::tuple_element_t<kBuffers, All>;

  static ffi::Error run(Attributes attributes) {
    const std::vector<XLA_FFI_Buffer> buffers = decode(attributes.buffers);
    if (buffers.empty()) return ffi::Error::Success();
    if (buffers.size() != kBuffers) {
      return ffi::Error::InvalidArgument("buffers: expected " + std::to_string(kBuffers) + " descriptions, got " +
                                         std::to_string(buffers.size()));
    }
    int current = 0;
    cudaGetDevice(&current);
    ffi::Error error = ffi::Error::Success();
    for (const int device : own_devices()) {
      if (error.failure() || cudaSetDevice(device) != cudaSuccess) continue;
      error = call(attributes, buffers, std::make_index_sequence<kBuffers>());
    }
    if (has_context(current)) cudaSetDevice(current);  // it would make one, on what may be another process's GPU
    return error;
  }

 private:
  static std::vector<XLA_FFI_Buffer> decode(Buffers encoded) {
    std::vector<XLA_FFI_Buffer> buffers;
    for (size_t at = 0; at + 1 < encoded.size() && at + 1 + encoded[at + 1] < encoded.size();) {
      XLA_FFI_Buffer buffer = {};
      buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
      buffer.dtype = static_cast<XLA_FFI_DataType>(encoded[at]);
      buffer.data = reinterpret_cast<void*>(kApart * (buffers.size() + 1));
      buffer.rank = encoded[at + 1];
      buffer.dims = const_cast<int64_t*>(encoded.begin() + at + 2);
      at += 2 + buffer.rank;
      buffers.push_back(buffer);
    }
    return buffers;
  }
  template <size_t... kIndex>
  static ffi::Error call(Attributes attributes, const std::vector<XLA_FFI_Buffer>& buffers,
                         std::index_sequence<kIndex...>) {
    return kInitialize(std::tuple_element_t<kIndex, All>(ffi::AnyBuffer(&buffers[kIndex]))..., attributes);
  }

  static constexpr uintptr_t kApart = 256;  // between addresses that are aligned as XLA's are, and that nobody follows
};
#endif

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
#define TE_HANDLER(name, function)                                                                                \
  static XLA_FFI_Error* name##_execute(XLA_FFI_CallFrame* frame) {                                                \
    static auto* handler = ::xla::ffi::Ffi::BindTo(&::te::function, TE_HANDLER_TRAITS).release();                 \
    return handler->Call(frame);                                                                                  \
  }                                                                                                               \
  static const ::te::Registrar name##_registrar("te_" #name, "execute", reinterpret_cast<void*>(&name##_execute), \
                                                ::te::Signature::of(&::te::function));

// TE_INSTANTIATOR(gemm, GemmPrepare): likewise, what runs when a program is compiled: the function is that of operands,
// results and attributes of an initializer, called on what the attribute `buffers` says of them.
#define TE_INSTANTIATOR(name, function)                                                                  \
  static XLA_FFI_Error* name##_instantiate(XLA_FFI_CallFrame* frame) {                                   \
    using ::xla::ffi::ExecutionStage;                                                                    \
    using Run = ::te::Instantiation<&::te::function>;                                                    \
    static auto* handler =                                                                               \
        ::xla::ffi::Ffi::BindTo<decltype(&Run::run), ExecutionStage::kInstantiate>(&Run::run).release(); \
    return handler->Call(frame);                                                                         \
  }                                                                                                      \
  static const ::te::Registrar name##_instantiate_registrar("te_" #name, "instantiate",                  \
                                                            reinterpret_cast<void*>(&name##_instantiate));

// TE_INITIALIZER(attention_fwd, AttentionFwdInitialize): likewise, and again before each call, outside any CUDA graph.
#define TE_INITIALIZER(name, function)                                                                              \
  TE_INSTANTIATOR(name, function)                                                                                   \
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
#define TE_ATTRIBUTES(type, ...)                                                                  \
  template <>                                                                                     \
  inline std::vector<std::string> te::attribute_names<type>() {                                   \
    return std::apply([](auto... m) { return std::vector<std::string>{std::string(m.name)...}; }, \
                      std::make_tuple(__VA_ARGS__));                                              \
  }                                                                                               \
  XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(type, __VA_ARGS__)

// te_attention_fwd, te_attention_bwd: flash attention with dropout, by cuDNN.
//
//   q, o, dq      [B, Q, G, R, D] bf16 or f16: R query heads share each of G heads of keys and values
//   k, v, dk, dv  [B, K, G, D]
//   stats         f32[B, G, R, Q] the logarithm of each softmax's sum
//   seed          u32[4], two 64-bit numbers, low word first: seed and offset of Philox, which draws the mask
//   q_len, k_len  s32[B] tokens of each sequence; both absent where there is no padding
//
// Forward, 2 (q + k + v + o) bytes move and neither weights nor mask are stored: the backward pass draws the mask
// again. cuDNN's graphs are made in the initialize stage and kept. Only the host's compiler is needed.
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#define CUDNN_FRONTEND_SKIP_JSON_LIB
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#include <cudnn_frontend.h>

#include "core/check.h"
#include "core/libraries.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace te {

struct AttentionAttributes {
  float scale;
  float dropout;  // rate, in (0, 1)
  bool causal;
  int64_t left;  // how many keys before its own position a query sees, -1 for all; only where causal
};

namespace {

namespace fe = ::cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

// ---- The call ---------------------------------------------------------------------------------------

struct AttentionOperands {
  const char* op;
  const In &q, &k, &v, &seed, &q_len, &k_len;
};

struct AttentionShape {
  int64_t batch, q_size, k_size, groups, repeats, head_size;
  int64_t heads() const { return groups * repeats; }
  bool empty() const { return batch == 0 || heads() == 0; }
};

Check& shape(Check& check, const char* argument, const ffi::AnyBuffer& b, std::initializer_list<int64_t> expected) {
  return check.that(
      std::vector<int64_t>(b.dimensions().begin(), b.dimensions().end()) == std::vector<int64_t>(expected), argument,
      [&] {
        std::string text;
        for (const int64_t n : expected) text += (text.empty() ? "[" : ",") + std::to_string(n);
        return text + "]";
      },
      b);
}

Check check_attention(const AttentionOperands& in, const AttentionAttributes& attributes, AttentionShape& s) {
  Check check(in.op);
  const auto q = in.q.dimensions(), k = in.k.dimensions();
  const DType dtype = in.q.element_type();
  check.that(q.size() == 5, "q", "[B, Q, G, R, D]", in.q).that(k.size() == 4, "k", "[B, K, G, D]", in.k);
  check.that(dtype == DType::BF16 || dtype == DType::F16, "q", "bf16 or f16", in.q);
  if (check.failed()) return check;
  s = {q[0], q[1], k[1], q[2], q[3], q[4]};
  check.that(s.q_size > 0 && s.k_size > 0, "q and k", "at least one token each", in.k);
  check.that(s.head_size > 0 && s.head_size % 8 == 0, "q", "a head size in multiples of 8", in.q);
  shape(check.dtype("k", in.k, dtype), "k", in.k, {s.batch, s.k_size, s.groups, s.head_size});
  shape(check.dtype("v", in.v, dtype), "v", in.v, {s.batch, s.k_size, s.groups, s.head_size});
  check.that(in.seed.element_type() == DType::U32, "seed", "u32[4]", in.seed);
  shape(check, "seed", in.seed, {4});
  check.that(present(in.q_len) == present(in.k_len), "k_len", "given where q_len is", in.k_len);
  if (present(in.q_len) && present(in.k_len)) {
    shape(check.dtype("q_len", in.q_len, DType::S32), "q_len", in.q_len, {s.batch});
    shape(check.dtype("k_len", in.k_len, DType::S32), "k_len", in.k_len, {s.batch});
  }
  check.that(attributes.dropout > 0.f && attributes.dropout < 1.f, "dropout", "a rate in (0, 1)", attributes.dropout);
  check.that(attributes.left < 0 || attributes.causal, "left", "a window only where causal", "one without");
  return check;
}

Check& like(Check& check, const char* argument, const ffi::AnyBuffer& b, const ffi::AnyBuffer& other) {
  return check.that(
      b.element_type() == other.element_type() && b.dimensions() == other.dimensions(), argument,
      [&] { return describe(other); }, b);
}

Check& check_stats(Check& check, const ffi::AnyBuffer& stats, const AttentionShape& s) {
  return shape(check.dtype("stats", stats, DType::F32), "stats", stats, {s.batch, s.groups, s.repeats, s.q_size});
}

// ---- cuDNN ------------------------------------------------------------------------------------------

// "" once cuDNN's frontend has its library.
const std::string& library_error() {
  static const std::string& error = *new std::string([] {
    fe::cudnn_dlhandle = open_library({"libcudnn.so.9"}, {"nvidia/cudnn/lib/libcudnn.so.9"});
    if (!fe::cudnn_dlhandle) {
      return "cuDNN (libcudnn.so.9) was not found; install JAX with its CUDA libraries, `pip install 'jax[cuda13]'`, "
             "or put cuDNN on LD_LIBRARY_PATH";
    }
    // The frontend finds CUDA's runtime by its name alone, so it must be loaded.
    const bool runtime = open_library({"libcudart.so.13", "libcudart.so.12"},
                                      {"nvidia/cu13/lib/libcudart.so.13", "nvidia/cuda_runtime/lib/libcudart.so.12"});
    return runtime ? "" : "CUDA's runtime (libcudart.so.13 or .12) was not found, which cuDNN's frontend needs";
  }());
  return error;
}

// The first failure among calls that build on each other.
class Status {
 public:
  explicit Status(const char* op) : op_(op) {}
  bool ok(fe::error_t status, const char* what) { return ok(status.is_good(), what, status.get_message()); }
  bool ok(bool good, const char* what, const std::string& why) {
    if (!good && text_.empty()) text_ = std::string(what) + ": " + why;
    return text_.empty();
  }
  bool ok() const { return text_.empty(); }
  ffi::Error error() const {
    return ffi::Error::Internal(std::string(op_) + ": cuDNN " + fe::detail::get_backend_version_string() + ": " +
                                text_);
  }

 private:
  const char* op_;
  std::string text_;
};

enum Uid : int64_t { kQ = 1, kK, kV, kO, kStats, kSeed, kOffset, kQLen, kKLen, kDo, kDq, kDk, kDv };
using Pointers = std::unordered_map<int64_t, void*>;

struct Plan {
  fe::graph::Graph graph;
  int64_t workspace = 0;
};

using Key = std::vector<int64_t>;

struct Call {
  const char* op;
  bool backward;
  DType dtype;
  AttentionShape shape;
  AttentionAttributes attributes;
  bool lengths;

  Key key() const {
    int32_t scale, dropout;
    std::memcpy(&scale, &attributes.scale, 4);
    std::memcpy(&dropout, &attributes.dropout, 4);
    return {backward,        static_cast<int64_t>(dtype),
            shape.batch,     shape.q_size,
            shape.k_size,    shape.groups,
            shape.repeats,   shape.head_size,
            lengths,         attributes.causal,
            attributes.left, scale,
            dropout};
  }
};

class Builder {
 public:
  Builder(const Call& call, fe::graph::Graph& graph) : call_(call), s_(call.shape), graph_(graph) {
    graph.set_io_data_type(call.dtype == DType::BF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF);
    graph.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    // Graphs are never freed, so what XLA captures of them needs no reference to them.
    graph.set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
  }

  void forward() {
    const auto options = with_options(fe::graph::SDPA_attributes().set_generate_stats(true));
    auto [o, stats] = graph_.sdpa(rows(kQ), columns(kK), columns(kV), options);
    as_rows(o, kO).set_output(true);
    as_stats(stats).set_output(true);
  }

  void backward() {
    const auto options = with_options(fe::graph::SDPA_backward_attributes());
    const Tensor stats = graph_.tensor(fe::graph::Tensor_attributes());
    as_stats(stats);
    auto [dq, dk, dv] = graph_.sdpa_backward(rows(kQ), columns(kK), columns(kV), rows(kO), rows(kDo), stats, options);
    as_rows(dq, kDq).set_output(true);
    as_columns(dk, kDk).set_output(true);
    as_columns(dv, kDv).set_output(true);
  }

 private:
  using Attributes = fe::graph::Tensor_attributes;

  // [B, S, H, D] in memory, which cuDNN calls {B, H, S, D}.
  static Attributes& place(const Tensor& x, Uid uid, int64_t batch, int64_t heads, int64_t size, int64_t head_size) {
    return x->set_uid(uid)
        .set_dim({batch, heads, size, head_size})
        .set_stride({size * heads * head_size, head_size, heads * head_size, 1});
  }
  Attributes& as_rows(const Tensor& x, Uid uid) const {
    return place(x, uid, s_.batch, s_.heads(), s_.q_size, s_.head_size);
  }
  Attributes& as_columns(const Tensor& x, Uid uid) const {
    return place(x, uid, s_.batch, s_.groups, s_.k_size, s_.head_size);
  }
  Attributes& as_stats(const Tensor& x) const {
    return x->set_uid(kStats)
        .set_dim({s_.batch, s_.heads(), s_.q_size, 1})
        .set_stride({s_.heads() * s_.q_size, s_.q_size, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
  }
  Tensor rows(Uid uid) {
    const Tensor x = graph_.tensor(Attributes());
    as_rows(x, uid);
    return x;
  }
  Tensor columns(Uid uid) {
    const Tensor x = graph_.tensor(Attributes());
    as_columns(x, uid);
    return x;
  }
  Tensor integers(Uid uid, int64_t count, fe::DataType_t dtype) {
    return graph_.tensor(
        Attributes().set_uid(uid).set_dim({count, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(dtype));
  }

  template <typename Options>
  Options with_options(Options options) {
    const AttentionAttributes& a = call_.attributes;
    options.set_name("attention").set_attn_scale(a.scale);
    options.set_dropout(a.dropout, integers(kSeed, 1, fe::DataType_t::INT64),
                        integers(kOffset, 1, fe::DataType_t::INT64));
    if (call_.lengths) {
      options.set_padding_mask(true)
          .set_seq_len_q(integers(kQLen, s_.batch, fe::DataType_t::INT32))
          .set_seq_len_kv(integers(kKLen, s_.batch, fe::DataType_t::INT32));
    }
    if (a.causal) {
      options.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    }
    // cuDNN counts the query's own position as part of the window.
    if (a.left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(a.left) + 1);
    return options;
  }

  const Call& call_;
  const AttentionShape& s_;
  fe::graph::Graph& graph_;
};

// What is kept of one GPU; the mutex guards all, the handle's stream too.
struct Device {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<Key, std::unique_ptr<Plan>> plans;
};

Device& current_device() {
  static std::mutex mutex;
  static auto& devices = *new std::map<int, Device>;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  return devices[device];
}

bool status_ok(Status& status, cudnnStatus_t code, const char* what) {
  return status.ok(code == CUDNN_STATUS_SUCCESS, what, fe::detail::get_error_string(code));
}

std::unique_ptr<Plan> make_plan(Status& status, cudnnHandle_t handle, const Call& call) {
  auto plan = std::make_unique<Plan>();
  Builder builder(call, plan->graph);
  call.backward ? builder.backward() : builder.forward();
  status.ok(plan->graph.build(handle, {fe::HeurMode_t::A}), "building the graph");
  if (status.ok()) status.ok(plan->graph.get_workspace_size(plan->workspace), "workspace");
  // Loads the kernels, which could not be done while a graph is captured: captures them, on a stream that the frontend
  // makes where the handle has none. Where it fails, they load when they run.
  if (status.ok() && status_ok(status, fe::detail::set_stream(handle, nullptr), "stream")) {
    (void)plan->graph.warmup(handle);
  }
  return plan;
}

Check check_size(const Call& call, Out& workspace, const Plan& plan) {
  Check check(call.op);
  return check.that(
      static_cast<int64_t>(workspace->size_bytes()) >= plan.workspace, "workspace",
      [&] { return "the " + std::to_string(plan.workspace) + " bytes that cuDNN asks for"; }, *workspace);
}

ffi::Error prepare_unguarded(const Call& call, Out& workspace) {
  Status status(call.op);
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  if (!device.handle && !status_ok(status, fe::detail::create_handle(&device.handle), "handle")) return status.error();
  std::unique_ptr<Plan>& plan = device.plans[call.key()];
  if (!plan) {
    auto made = make_plan(status, device.handle, call);
    if (!status.ok()) return status.error();
    plan = std::move(made);
  }
  const Check check = check_size(call, workspace, *plan);
  return check.failed() ? check.error() : ffi::Error::Success();
}

ffi::Error execute_unguarded(const Call& call, Pointers& pointers, Out& workspace, cudaStream_t stream) {
  Status status(call.op);
  Device& device = current_device();
  const std::lock_guard<std::mutex> lock(device.mutex);
  const auto found = device.plans.find(call.key());
  if (!device.handle || found == device.plans.end() || !found->second) {
    return ffi::Error::Internal(std::string(call.op) + ": executed before it was initialized");
  }
  const Plan& plan = *found->second;
  const Check check = check_size(call, workspace, plan);
  if (check.failed()) return check.error();
  if (status_ok(status, fe::detail::set_stream(device.handle, stream), "stream")) {
    status.ok(plan.graph.execute(device.handle, pointers, workspace->untyped_data()), "execution");
  }
  return status.ok() ? ffi::Error::Success() : status.error();
}

// The frontend throws where a library lacks a function.
template <typename Function>
ffi::Error guarded(const Call& call, Function&& function) {
  if (!library_error().empty()) return ffi::Error::Internal(std::string(call.op) + ": " + library_error());
  try {
    return function();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string(call.op) + ": cuDNN: " + error.what());
  }
}

ffi::Error prepare(const Call& call, Out& workspace) {
  return guarded(call, [&] { return prepare_unguarded(call, workspace); });
}

ffi::Error execute(const Call& call, Pointers pointers, Out& workspace, cudaStream_t stream) {
  return guarded(call, [&] { return execute_unguarded(call, pointers, workspace, stream); });
}

Pointers pointers_of(const AttentionOperands& in) {
  Pointers all{{kQ, in.q.untyped_data()},
               {kK, in.k.untyped_data()},
               {kV, in.v.untyped_data()},
               {kSeed, in.seed.untyped_data()},
               {kOffset, static_cast<uint64_t*>(in.seed.untyped_data()) + 1}};
  if (present(in.q_len)) all.insert({{kQLen, in.q_len.untyped_data()}, {kKLen, in.k_len.untyped_data()}});
  return all;
}

Call call_of(const AttentionOperands& in, const AttentionShape& s, const AttentionAttributes& a, bool backward) {
  return {in.op, backward, in.q.element_type(), s, a, present(in.q_len)};
}

Check plan_forward(const AttentionOperands& in, Out& o, Out& stats, const AttentionAttributes& attributes,
                   AttentionShape& s) {
  Check check = check_attention(in, attributes, s);
  if (check.failed()) return check;
  return check_stats(like(check, "o", *o, in.q), *stats, s);
}

Check plan_backward(const AttentionOperands& in, const In& stats, const In& o, const In& dout, Out& dq, Out& dk,
                    Out& dv, const AttentionAttributes& attributes, AttentionShape& s) {
  Check check = check_attention(in, attributes, s);
  if (check.failed()) return check;
  check_stats(check, stats, s);
  like(like(check, "o", o, in.q), "do", dout, in.q);
  return like(like(like(check, "dq", *dq, in.q), "dk", *dk, in.k), "dv", *dv, in.v);
}

}  // namespace

// ---- Handlers ---------------------------------------------------------------------------------------

// Before any CUDA graph is captured: cuDNN's handle, its graph of this call, and the graph's kernels.
ffi::Error AttentionFwdInitialize(In q, In k, In v, In seed, In q_len, In k_len, Out o, Out stats, Out workspace,
                                  AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_fwd", q, k, v, seed, q_len, k_len};
  AttentionShape s{};
  const Check check = plan_forward(in, o, stats, attributes, s);
  if (check.failed()) return check.error();
  return s.empty() ? ffi::Error::Success() : prepare(call_of(in, s, attributes, /*backward=*/false), workspace);
}

ffi::Error AttentionFwd(cudaStream_t stream, In q, In k, In v, In seed, In q_len, In k_len, Out o, Out stats,
                        Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_fwd", q, k, v, seed, q_len, k_len};
  AttentionShape s{};
  const Check check = plan_forward(in, o, stats, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  Pointers pointers = pointers_of(in);
  pointers.insert({{kO, o->untyped_data()}, {kStats, stats->untyped_data()}});
  return execute(call_of(in, s, attributes, /*backward=*/false), std::move(pointers), workspace, stream);
}

ffi::Error AttentionBwdInitialize(In stats, In q, In k, In v, In o, In dout, In seed, In q_len, In k_len, Out dq,
                                  Out dk, Out dv, Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_bwd", q, k, v, seed, q_len, k_len};
  AttentionShape s{};
  const Check check = plan_backward(in, stats, o, dout, dq, dk, dv, attributes, s);
  if (check.failed()) return check.error();
  return s.empty() ? ffi::Error::Success() : prepare(call_of(in, s, attributes, /*backward=*/true), workspace);
}

ffi::Error AttentionBwd(cudaStream_t stream, In stats, In q, In k, In v, In o, In dout, In seed, In q_len, In k_len,
                        Out dq, Out dk, Out dv, Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_bwd", q, k, v, seed, q_len, k_len};
  AttentionShape s{};
  const Check check = plan_backward(in, stats, o, dout, dq, dk, dv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  Pointers pointers = pointers_of(in);
  pointers.insert({{kStats, stats.untyped_data()}, {kO, o.untyped_data()}, {kDo, dout.untyped_data()}});
  pointers.insert({{kDq, dq->untyped_data()}, {kDk, dk->untyped_data()}, {kDv, dv->untyped_data()}});
  return execute(call_of(in, s, attributes, /*backward=*/true), std::move(pointers), workspace, stream);
}

}  // namespace te

TE_ATTRIBUTES(te::AttentionAttributes, TE_ATTRIBUTE(float, scale), TE_ATTRIBUTE(float, dropout),
              TE_ATTRIBUTE(bool, causal), TE_ATTRIBUTE(int64_t, left));

TE_HANDLER(attention_fwd, AttentionFwd)
TE_INITIALIZER(attention_fwd, AttentionFwdInitialize)
TE_HANDLER(attention_bwd, AttentionBwd)
TE_INITIALIZER(attention_bwd, AttentionBwdInitialize)

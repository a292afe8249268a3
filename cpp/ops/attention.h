// What the kernels of attention by cuDNN share: what a call is, its checks, and the tensors of its graph.
//
//   q, o     [B, Q, G, R, D]: R query heads share each of G heads of keys and values
//   k, v     [B, K, G, D]
//   qkv      [B, S, 3, G, D] in place of these three, where Q = K and R = 1
//   stats    f32[B, G, R, Q] the logarithm of each softmax's sum
//   seed     u32[4], two 64-bit numbers, low word first: seed and offset of Philox, which draws the mask of dropout
//   q_len, k_len  s32[B] tokens of each sequence; both absent where there is no padding
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/cudnn.h"
#include "core/settings.h"

namespace te {

// ---- The call ---------------------------------------------------------------------------------------

struct AttentionOperands {
  const char* op;
  const In &q, &k, &v, &q_len, &k_len;
  bool lengths() const { return present(q_len); }
};

struct AttentionShape {
  int64_t batch, q_size, k_size, groups, repeats, head_size;
  int64_t heads() const { return groups * repeats; }
  bool empty() const { return batch == 0 || heads() == 0; }
};

struct AttentionOptions {
  float scale;
  float dropout;  // rate, in [0, 1)
  bool causal;
  int64_t left;  // how many keys before its own position a query sees, -1 for all; only where causal
};

inline Check& shape(Check& check, const char* argument, const ffi::AnyBuffer& b,
                    std::initializer_list<int64_t> expected) {
  return check.that(
      std::vector<int64_t>(b.dimensions().begin(), b.dimensions().end()) == std::vector<int64_t>(expected), argument,
      [&] {
        std::string text;
        for (const int64_t n : expected) text += (text.empty() ? "[" : ",") + std::to_string(n);
        return text + "]";
      },
      b);
}

inline Check& like(Check& check, const char* argument, const ffi::AnyBuffer& b, const ffi::AnyBuffer& other) {
  return check.that(
      b.element_type() == other.element_type() && b.dimensions() == other.dimensions(), argument,
      [&] { return describe(other); }, b);
}

inline Check& check_stats(Check& check, const ffi::AnyBuffer& stats, const AttentionShape& s) {
  return shape(check.dtype("stats", stats, DType::F32), "stats", stats, {s.batch, s.groups, s.repeats, s.q_size});
}

// Of queries in buffer `q`: head sizes are multiples of `step`.
inline Check& check_sizes(Check& check, const char* argument, const In& q, const AttentionOptions& options,
                          int64_t step, const AttentionShape& s) {
  check.that(s.q_size > 0 && s.k_size > 0, argument, "at least one token, and one key", q);
  check.that(
      s.head_size > 0 && s.head_size % step == 0, argument,
      [&] { return "a head size in multiples of " + std::to_string(step); }, q);
  return check.that(options.left < 0 || options.causal, "left", "a window only where causal", "one without");
}

// Whether q, k and v, of q's dtype, are those of one attention with head sizes in multiples of `step`; sets s.
inline Check check_attention(const AttentionOperands& in, const AttentionOptions& options, int64_t step,
                             AttentionShape& s) {
  Check check(in.op);
  const auto q = in.q.dimensions(), k = in.k.dimensions();
  check.that(q.size() == 5, "q", "[B, Q, G, R, D]", in.q).that(k.size() == 4, "k", "[B, K, G, D]", in.k);
  if (check.failed()) return check;
  s = {q[0], q[1], k[1], q[2], q[3], q[4]};
  check_sizes(check, "q", in.q, options, step, s);
  for (const auto& [name, x] : {std::pair<const char*, const In&>{"k", in.k}, {"v", in.v}}) {
    shape(check.dtype(name, x, in.q.element_type()), name, x, {s.batch, s.k_size, s.groups, s.head_size});
  }
  return check;
}

inline Check& check_lengths(Check& check, const AttentionOperands& in, const AttentionShape& s) {
  check.that(present(in.q_len) == present(in.k_len), "k_len", "given where q_len is", in.k_len);
  if (check.failed() || absent(in.q_len)) return check;
  shape(check.dtype("q_len", in.q_len, DType::S32), "q_len", in.q_len, {s.batch});
  return shape(check.dtype("k_len", in.k_len, DType::S32), "k_len", in.k_len, {s.batch});
}

inline bool is_16_bits(const ffi::AnyBuffer& b) {
  return b.element_type() == DType::BF16 || b.element_type() == DType::F16;
}

// ---- The graph --------------------------------------------------------------------------------------

// Kinds of graphs, which keys tell apart; and the tensors of all of them.
enum AttentionKind : int64_t { kForward = 1, kBackward, kFp8Forward, kPackedForward, kPackedBackward };
enum AttentionUid : int64_t {
  kQ = 1,
  kK,
  kV,
  kO,
  kStats,
  kSeed,
  kOffset,
  kQLen,
  kKLen,
  kDo,
  kDq,
  kDk,
  kDv,
  kDescaleQ,
  kDescaleK,
  kDescaleV,
  kDescaleS,
  kScaleS,
  kScaleO,
  kAmaxS,
  kAmaxO,
  kQOffset,
  kKOffset,
  kStatsOffset
};

struct AttentionCall {
  AttentionKind kind;
  DType dtype, o_dtype;
  AttentionShape shape;
  AttentionOptions options;
  bool lengths;
  bool stacked = false;  // q, k and v are parts of one array, and so are their gradients
  int64_t packed = 0;    // where not 0, each row of the batch holds up to so many sequences; see attention_packed.cu

  std::vector<int64_t> key() const {
    int32_t scale, dropout;
    std::memcpy(&scale, &options.scale, 4);
    std::memcpy(&dropout, &options.dropout, 4);
    return {kind,
            static_cast<int64_t>(dtype),
            static_cast<int64_t>(o_dtype),
            shape.batch,
            shape.q_size,
            shape.k_size,
            shape.groups,
            shape.repeats,
            shape.head_size,
            lengths,
            stacked,
            packed,
            options.causal,
            options.left,
            scale,
            dropout};
  }
};

inline cudnn::fe::DataType_t cudnn_type(DType dtype) {
  using Type = cudnn::fe::DataType_t;
  switch (dtype) {
    case DType::F8E4M3FN: return Type::FP8_E4M3;
    case DType::BF16: return Type::BFLOAT16;
    case DType::F16: return Type::HALF;
    default: return Type::FLOAT;
  }
}

class AttentionGraph {
 public:
  AttentionGraph(const AttentionCall& call, cudnn::fe::graph::Graph& graph)
      : graph(graph), call_(call), s_(call.shape) {
    graph.set_io_data_type(cudnn_type(call.dtype));
    graph.set_intermediate_data_type(cudnn_type(DType::F32)).set_compute_data_type(cudnn_type(DType::F32));
    // Graphs are never freed, so what XLA captures of them needs no reference to them.
    graph.set_cuda_graph_retention(cudnn::fe::CudaGraphRetention_t::NONE);
    if (!call.packed) return;
    using Type = cudnn::fe::DataType_t;
    q_offset_ = integers(kQOffset, sequences() + 1, Type::INT64);
    k_offset_ = integers(kKOffset, sequences() + 1, Type::INT64);
    stats_offset_ = integers(kStatsOffset, sequences() + 1, Type::INT64);
  }

  using Attributes = cudnn::fe::graph::Tensor_attributes;

  Attributes& as_rows(const cudnn::Tensor& x, AttentionUid uid) const {
    return begins(place(x, uid, s_.heads(), s_.q_size), q_offset_);
  }
  Attributes& as_columns(const cudnn::Tensor& x, AttentionUid uid) const {
    return begins(place(x, uid, s_.groups, s_.k_size), k_offset_);
  }
  // [B, H, Q] in memory, or [B, Q, H] of packed rows.
  Attributes& as_stats(const cudnn::Tensor& x) const {
    x->set_uid(kStats).set_dim({sequences(), s_.heads(), s_.q_size, 1}).set_data_type(cudnn_type(DType::F32));
    const bool packed = call_.packed > 0;
    x->set_stride({s_.heads() * s_.q_size, packed ? 1 : s_.q_size, packed ? s_.heads() : 1, 1});
    return begins(*x, stats_offset_);
  }
  static Attributes& as_scalar(const cudnn::Tensor& x, AttentionUid uid) {
    return x->set_uid(uid).set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(cudnn_type(DType::F32));
  }

  cudnn::Tensor rows(AttentionUid uid) {
    const cudnn::Tensor x = graph.tensor(Attributes());
    as_rows(x, uid);
    return x;
  }
  cudnn::Tensor columns(AttentionUid uid) {
    const cudnn::Tensor x = graph.tensor(Attributes());
    as_columns(x, uid);
    return x;
  }
  cudnn::Tensor scalar(AttentionUid uid) {
    const cudnn::Tensor x = graph.tensor(Attributes());
    as_scalar(x, uid);
    return x;
  }

  template <typename Options>
  Options with_options(Options options) {
    using Type = cudnn::fe::DataType_t;
    const AttentionOptions& o = call_.options;
    options.set_name("attention").set_attn_scale(o.scale);
    if (o.dropout > 0.f) {
      options.set_dropout(o.dropout, integers(kSeed, 1, Type::INT64), integers(kOffset, 1, Type::INT64));
    }
    if (call_.lengths) {
      options.set_padding_mask(true)
          .set_seq_len_q(integers(kQLen, sequences(), Type::INT32))
          .set_seq_len_kv(integers(kKLen, sequences(), Type::INT32));
    }
    if (o.causal) {
      options.set_diagonal_alignment(cudnn::fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
    }
    // cuDNN counts the query's own position as part of the window.
    if (o.left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(o.left) + 1);
    return options;
  }

  // Of packed rows the tokens of all are as many as the arrays hold, not as many as each sequence may have.
  void limit_tokens(cudnn::fe::graph::SDPA_backward_attributes& options) const {
    if (!call_.packed) return;
    options.set_max_total_seq_len_q(s_.batch * s_.q_size).set_max_total_seq_len_kv(s_.batch * s_.k_size);
  }

  cudnn::fe::graph::Graph& graph;

 private:
  // [B, S, H, D] in memory, or a part of [B, S, 3, H, D], which cuDNN calls {B, H, S, D}.
  Attributes& place(const cudnn::Tensor& x, AttentionUid uid, int64_t heads, int64_t size) const {
    const bool whole = uid == kO || uid == kDo;
    const int64_t row = heads * s_.head_size * (call_.stacked && !whole ? 3 : 1);
    return x->set_uid(uid)
        .set_dim({sequences(), heads, size, s_.head_size})
        .set_stride({size * row, s_.head_size, row, 1});
  }
  static Attributes& begins(Attributes& x, const cudnn::Tensor& offset) {
    return offset ? x.set_ragged_offset(offset) : x;
  }
  int64_t sequences() const { return s_.batch * std::max<int64_t>(call_.packed, 1); }
  cudnn::Tensor integers(AttentionUid uid, int64_t count, cudnn::fe::DataType_t dtype) {
    return graph.tensor(
        Attributes().set_uid(uid).set_dim({count, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(dtype));
  }

  const AttentionCall& call_;
  const AttentionShape& s_;
  cudnn::Tensor q_offset_, k_offset_, stats_offset_;  // of packed rows alone
};

// ---- Attention in 16 bits ---------------------------------------------------------------------------

inline void build_forward(AttentionGraph tensors) {
  const auto options = tensors.with_options(cudnn::fe::graph::SDPA_attributes().set_generate_stats(true));
  auto [o, stats] = tensors.graph.sdpa(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV), options);
  tensors.as_rows(o, kO).set_output(true);
  tensors.as_stats(stats).set_output(true);
}

inline void build_backward(AttentionGraph tensors) {
  auto options =
      tensors.with_options(cudnn::fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(deterministic()));
  tensors.limit_tokens(options);
  const cudnn::Tensor stats = tensors.graph.tensor(AttentionGraph::Attributes());
  tensors.as_stats(stats);
  auto [dq, dk, dv] = tensors.graph.sdpa_backward(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV),
                                                  tensors.rows(kO), tensors.rows(kDo), stats, options);
  tensors.as_rows(dq, kDq).set_output(true);
  tensors.as_columns(dk, kDk).set_output(true);
  tensors.as_columns(dv, kDv).set_output(true);
}

inline cudnn::Call graph_call(const char* op, const AttentionCall& call) {
  return {op, call.key(), [call](cudnn::fe::graph::Graph& graph) {
            const bool forward = call.kind == kForward || call.kind == kPackedForward;
            forward ? build_forward({call, graph}) : build_backward({call, graph});
          }};
}

inline cudnn::Pointers pointers_of(const AttentionOperands& in) {
  cudnn::Pointers all{{kQ, in.q.untyped_data()}, {kK, in.k.untyped_data()}, {kV, in.v.untyped_data()}};
  if (in.lengths()) all.insert({{kQLen, in.q_len.untyped_data()}, {kKLen, in.k_len.untyped_data()}});
  return all;
}

}  // namespace te

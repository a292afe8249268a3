// cuDNN's graphs of attention: what the calls of attention.h are to its frontend.
#include <algorithm>
#include <memory>

#include "core/cudnn_frontend.h"
#include "core/settings.h"
#include "ops/attention.h"

namespace te {
namespace {

namespace fe = cudnn::fe;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

fe::DataType_t cudnn_type(DType dtype) {
  using Type = fe::DataType_t;
  switch (dtype) {
    case DType::F8E4M3FN: return Type::FP8_E4M3;
    case DType::BF16: return Type::BFLOAT16;
    case DType::F16: return Type::HALF;
    default: return Type::FLOAT;
  }
}

class AttentionGraph {
 public:
  AttentionGraph(const AttentionCall& call, fe::graph::Graph& graph) : graph(graph), call_(call), s_(call.shape) {
    graph.set_io_data_type(cudnn_type(call.dtype));
    graph.set_intermediate_data_type(cudnn_type(DType::F32)).set_compute_data_type(cudnn_type(DType::F32));
    // Graphs are never freed, so what XLA captures of them needs no reference to them.
    graph.set_cuda_graph_retention(fe::CudaGraphRetention_t::NONE);
    if (!call.packed) return;
    using Type = fe::DataType_t;
    q_offset_ = integers(kQOffset, sequences() + 1, Type::INT64);
    k_offset_ = integers(kKOffset, sequences() + 1, Type::INT64);
    stats_offset_ = integers(kStatsOffset, sequences() + 1, Type::INT64);
  }

  using Attributes = fe::graph::Tensor_attributes;

  Attributes& as_rows(const Tensor& x, AttentionUid uid) const {
    return begins(place(x, uid, s_.heads(), s_.q_size), q_offset_);
  }
  Attributes& as_columns(const Tensor& x, AttentionUid uid) const {
    return begins(place(x, uid, s_.groups, s_.k_size), k_offset_);
  }
  // [B, H, Q] in memory, or [B, Q, H] of packed rows.
  Attributes& as_stats(const Tensor& x) const {
    x->set_uid(kStats).set_dim({sequences(), s_.heads(), s_.q_size, 1}).set_data_type(cudnn_type(DType::F32));
    const bool packed = call_.packed > 0;
    x->set_stride({s_.heads() * s_.q_size, packed ? 1 : s_.q_size, packed ? s_.heads() : 1, 1});
    return begins(*x, stats_offset_);
  }
  static Attributes& as_scalar(const Tensor& x, AttentionUid uid) {
    return x->set_uid(uid).set_dim({1, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(cudnn_type(DType::F32));
  }

  Tensor rows(AttentionUid uid) {
    const Tensor x = graph.tensor(Attributes());
    as_rows(x, uid);
    return x;
  }
  Tensor columns(AttentionUid uid) {
    const Tensor x = graph.tensor(Attributes());
    as_columns(x, uid);
    return x;
  }
  Tensor scalar(AttentionUid uid) {
    const Tensor x = graph.tensor(Attributes());
    as_scalar(x, uid);
    return x;
  }

  template <typename Options>
  Options with_options(Options options) {
    using Type = fe::DataType_t;
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
      // Queries of a cache end with their keys.
      using Alignment = fe::DiagonalAlignment_t;
      options.set_diagonal_alignment(call_.kind == kCachedForward ? Alignment::BOTTOM_RIGHT : Alignment::TOP_LEFT)
          .set_diagonal_band_right_bound(0);
    }
    // cuDNN counts the query's own position as part of the window.
    if (o.left >= 0) options.set_diagonal_band_left_bound(static_cast<int>(o.left) + 1);
    return options;
  }

  // Of packed rows the tokens of all are as many as the arrays hold, not as many as each sequence may have.
  void limit_tokens(fe::graph::SDPA_backward_attributes& options) const {
    if (!call_.packed) return;
    options.set_max_total_seq_len_q(s_.batch * s_.q_size).set_max_total_seq_len_kv(s_.batch * s_.k_size);
  }

  fe::graph::Graph& graph;

 private:
  // [B, S, H, D] in memory, or a part of [B, S, 3, H, D], which cuDNN calls {B, H, S, D}.
  Attributes& place(const Tensor& x, AttentionUid uid, int64_t heads, int64_t size) const {
    const bool whole = uid == kO || uid == kDo;
    const int64_t row = heads * s_.head_size * (call_.stacked && !whole ? 3 : 1);
    return x->set_uid(uid)
        .set_dim({sequences(), heads, size, s_.head_size})
        .set_stride({size * row, s_.head_size, row, 1});
  }
  static Attributes& begins(Attributes& x, const Tensor& offset) { return offset ? x.set_ragged_offset(offset) : x; }
  int64_t sequences() const { return s_.batch * std::max<int64_t>(call_.packed, 1); }
  Tensor integers(AttentionUid uid, int64_t count, fe::DataType_t dtype) {
    return graph.tensor(
        Attributes().set_uid(uid).set_dim({count, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(dtype));
  }

  const AttentionCall& call_;
  const AttentionShape& s_;
  Tensor q_offset_, k_offset_, stats_offset_;  // of packed rows alone
};

void build_forward(AttentionGraph tensors) {
  const auto options = tensors.with_options(fe::graph::SDPA_attributes().set_generate_stats(true));
  auto [o, stats] = tensors.graph.sdpa(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV), options);
  tensors.as_rows(o, kO).set_output(true);
  tensors.as_stats(stats).set_output(true);
}

void build_cached_forward(AttentionGraph tensors) {
  const auto options = tensors.with_options(fe::graph::SDPA_attributes().set_generate_stats(false));
  auto [o, stats] = tensors.graph.sdpa(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV), options);
  tensors.as_rows(o, kO).set_output(true);
}

void build_fp8_forward(AttentionGraph tensors) {
  const auto options = tensors.with_options(fe::graph::SDPA_fp8_attributes().set_generate_stats(true));
  auto [o, stats, amax_s, amax_o] = tensors.graph.sdpa_fp8(
      tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV), tensors.scalar(kDescaleQ), tensors.scalar(kDescaleK),
      tensors.scalar(kDescaleV), tensors.scalar(kDescaleS), tensors.scalar(kScaleS), tensors.scalar(kScaleO), options);
  tensors.as_rows(o, kO).set_output(true).set_data_type(cudnn_type(DType::F8E4M3FN));
  tensors.as_stats(stats).set_output(true);
  AttentionGraph::as_scalar(amax_s, kAmaxS).set_output(true);
  AttentionGraph::as_scalar(amax_o, kAmaxO).set_output(true);
}

void build_backward(AttentionGraph tensors) {
  auto options =
      tensors.with_options(fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(deterministic()));
  tensors.limit_tokens(options);
  const Tensor stats = tensors.graph.tensor(AttentionGraph::Attributes());
  tensors.as_stats(stats);
  auto [dq, dk, dv] = tensors.graph.sdpa_backward(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV),
                                                  tensors.rows(kO), tensors.rows(kDo), stats, options);
  tensors.as_rows(dq, kDq).set_output(true);
  tensors.as_columns(dk, kDk).set_output(true);
  tensors.as_columns(dv, kDv).set_output(true);
}

}  // namespace

cudnn::Call graph_call(const char* op, const AttentionCall& call) {
  return {op, call.key(), [call](fe::graph::Graph& graph) {
            switch (call.kind) {
              case kForward:
              case kPackedForward: return build_forward({call, graph});
              case kCachedForward: return build_cached_forward({call, graph});
              case kFp8Forward: return build_fp8_forward({call, graph});
              case kBackward:
              case kPackedBackward: return build_backward({call, graph});
            }
          }};
}

}  // namespace te

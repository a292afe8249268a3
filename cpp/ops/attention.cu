// te_attention_fwd, te_attention_bwd: flash attention by cuDNN, with dropout or without.
//
// Buffers as in attention.h: q, k, v, o and their gradients bf16 or f16; `seed` is absent exactly where there is no
// dropout. Forward, 2 (q + k + v + o) bytes move and neither weights nor mask are stored: the backward pass draws the
// mask again. cuDNN's graphs are made when a program is compiled, and kept. Only the host's compiler is needed.
#include "core/settings.h"
#include "ops/attention.h"

namespace te {

struct AttentionAttributes : AttentionOptions {
  Buffers buffers;
};

namespace {

Check check_call(const AttentionOperands& in, const In& seed, const AttentionAttributes& attributes,
                 AttentionShape& s) {
  const DType dtype = in.q.element_type();
  Check check(in.op);
  check.that(dtype == DType::BF16 || dtype == DType::F16, "q", "bf16 or f16", in.q);
  if (check.failed()) return check;
  check = check_attention(in, attributes, /*step=*/8, s);
  check.that(attributes.dropout >= 0.f && attributes.dropout < 1.f, "dropout", "a rate in [0, 1)", attributes.dropout);
  if (attributes.dropout > 0.f) {
    shape(check.that(seed.element_type() == DType::U32, "seed", "u32[4]", seed), "seed", seed, {4});
  } else {
    check.that(absent(seed), "seed", "none without dropout", seed);
  }
  return check;
}

Check check_forward(const AttentionOperands& in, const In& seed, Out& o, Out& stats,
                    const AttentionAttributes& attributes, AttentionShape& s) {
  Check check = check_call(in, seed, attributes, s);
  if (check.failed()) return check;
  return check_stats(like(check, "o", *o, in.q), *stats, s);
}

Check check_backward(const AttentionOperands& in, const In& seed, const In& stats, const In& o, const In& dout, Out& dq,
                     Out& dk, Out& dv, const AttentionAttributes& attributes, AttentionShape& s) {
  Check check = check_call(in, seed, attributes, s);
  if (check.failed()) return check;
  check_stats(check, stats, s);
  like(like(check, "o", o, in.q), "do", dout, in.q);
  return like(like(like(check, "dq", *dq, in.q), "dk", *dk, in.k), "dv", *dv, in.v);
}

void build_forward(AttentionGraph tensors) {
  const auto options = tensors.with_options(cudnn::fe::graph::SDPA_attributes().set_generate_stats(true));
  auto [o, stats] = tensors.graph.sdpa(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV), options);
  tensors.as_rows(o, kO).set_output(true);
  tensors.as_stats(stats).set_output(true);
}

void build_backward(AttentionGraph tensors) {
  const auto options =
      tensors.with_options(cudnn::fe::graph::SDPA_backward_attributes().set_deterministic_algorithm(deterministic()));
  const cudnn::Tensor stats = tensors.graph.tensor(AttentionGraph::Attributes());
  tensors.as_stats(stats);
  auto [dq, dk, dv] = tensors.graph.sdpa_backward(tensors.rows(kQ), tensors.columns(kK), tensors.columns(kV),
                                                  tensors.rows(kO), tensors.rows(kDo), stats, options);
  tensors.as_rows(dq, kDq).set_output(true);
  tensors.as_columns(dk, kDk).set_output(true);
  tensors.as_columns(dv, kDv).set_output(true);
}

cudnn::Call call_of(const AttentionOperands& in, const AttentionShape& s, const AttentionAttributes& a,
                    AttentionKind kind) {
  const DType dtype = in.q.element_type();
  const AttentionCall call{kind, dtype, dtype, s, a, in.lengths()};
  return {in.op, call.key(), [call](cudnn::fe::graph::Graph& graph) {
            call.kind == kForward ? build_forward({call, graph}) : build_backward({call, graph});
          }};
}

cudnn::Pointers pointers_of(const AttentionOperands& in, const In& seed) {
  cudnn::Pointers all = pointers_of(in);
  if (present(seed)) {
    all.insert({{kSeed, seed.untyped_data()}, {kOffset, static_cast<uint64_t*>(seed.untyped_data()) + 1}});
  }
  return all;
}

}  // namespace

// ---- Handlers ---------------------------------------------------------------------------------------

ffi::Error AttentionFwdInitialize(In q, In k, In v, In seed, In q_len, In k_len, Out o, Out stats, Out workspace,
                                  AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_fwd", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_forward(in, seed, o, stats, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::prepare(call_of(in, s, attributes, kForward), cudnn::workspace_of(workspace));
}

ffi::Error AttentionFwd(cudaStream_t stream, In q, In k, In v, In seed, In q_len, In k_len, Out o, Out stats,
                        Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_fwd", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_forward(in, seed, o, stats, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  cudnn::Pointers pointers = pointers_of(in, seed);
  pointers.insert({{kO, o->untyped_data()}, {kStats, stats->untyped_data()}});
  return cudnn::execute(call_of(in, s, attributes, kForward), std::move(pointers), cudnn::workspace_of(workspace),
                        stream);
}

ffi::Error AttentionBwdInitialize(In stats, In q, In k, In v, In o, In dout, In seed, In q_len, In k_len, Out dq,
                                  Out dk, Out dv, Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_bwd", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_backward(in, seed, stats, o, dout, dq, dk, dv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::prepare(call_of(in, s, attributes, kBackward), cudnn::workspace_of(workspace));
}

ffi::Error AttentionBwd(cudaStream_t stream, In stats, In q, In k, In v, In o, In dout, In seed, In q_len, In k_len,
                        Out dq, Out dk, Out dv, Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_bwd", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_backward(in, seed, stats, o, dout, dq, dk, dv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  cudnn::Pointers pointers = pointers_of(in, seed);
  pointers.insert({{kStats, stats.untyped_data()}, {kO, o.untyped_data()}, {kDo, dout.untyped_data()}});
  pointers.insert({{kDq, dq->untyped_data()}, {kDk, dk->untyped_data()}, {kDv, dv->untyped_data()}});
  return cudnn::execute(call_of(in, s, attributes, kBackward), std::move(pointers), cudnn::workspace_of(workspace),
                        stream);
}

}  // namespace te

TE_ATTRIBUTES(te::AttentionAttributes, TE_ATTRIBUTE(float, scale), TE_ATTRIBUTE(float, dropout),
              TE_ATTRIBUTE(bool, causal), TE_ATTRIBUTE(int64_t, left), TE_ATTRIBUTE(te::Buffers, buffers));

TE_HANDLER(attention_fwd, AttentionFwd)
TE_INITIALIZER(attention_fwd, AttentionFwdInitialize)
TE_HANDLER(attention_bwd, AttentionBwd)
TE_INITIALIZER(attention_bwd, AttentionBwdInitialize)

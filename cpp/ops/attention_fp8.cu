// te_attention_fp8_fwd: flash attention of E4M3 queries, keys and values, by cuDNN, for Hopper and newer.
//
//   q, k, v          E4M3, as in attention.h
//   q_, k_, v_descale  f32[] what they were divided by: value = code * descale
//   weight_scale, weight_descale  f32[] by which the weights, in [0, 1], are multiplied before their cast to E4M3, and
//                    its reciprocal: in device memory, where cuDNN reads it
//   o_scale          f32[] by which o is multiplied before its cast
//   o                E4M3
//
// Forward, q + k + v + o bytes move: half of bf16's. The products run at twice its rate.
#include "ops/attention.h"

namespace te {

namespace {

struct Scales {
  const In &q_descale, &k_descale, &v_descale, &weight_scale, &weight_descale, &o_scale;
};

// cuDNN writes the amaxes of weights and o, which nobody reads: their scales are known beforehand. They take the first
// bytes of the workspace.
constexpr int64_t kAmaxBytes = 256;

Check check_call(const AttentionOperands& in, const Scales& scales, Out& o, Out& stats, Out& workspace,
                 const AttentionOptions& options, AttentionShape& s) {
  Check check(in.op);
  if (check.dtype("q", in.q, DType::F8E4M3FN).failed()) return check;
  check = check_attention(in, options, /*step=*/16, s);
  if (check.failed() || check_lengths(check, in, s).failed()) return check;
  check.scalar("q_descale", scales.q_descale).scalar("k_descale", scales.k_descale);
  check.scalar("v_descale", scales.v_descale).scalar("weight_scale", scales.weight_scale);
  check.scalar("weight_descale", scales.weight_descale).scalar("o_scale", scales.o_scale);
  shape(check.dtype("o", *o, DType::F8E4M3FN), "o", *o, {s.batch, s.q_size, s.groups, s.repeats, s.head_size});
  check.that(static_cast<int64_t>(workspace->size_bytes()) >= kAmaxBytes, "workspace", "room for two amaxes",
             *workspace);
  return check_stats(check, *stats, s);
}

cudnn::Call call_of(const AttentionOperands& in, const AttentionShape& s, const AttentionOptions& options) {
  return graph_call(in.op, {kFp8Forward, in.q.element_type(), s, options, in.lengths()});
}

cudnn::Workspace after_amaxes(Out& workspace) {
  const cudnn::Workspace whole = cudnn::workspace_of(workspace);
  return {static_cast<char*>(whole.data) + kAmaxBytes, whole.bytes - kAmaxBytes};
}

cudnn::Pointers pointers_of(const AttentionOperands& in, const Scales& scales, Out& o, Out& stats, Out& workspace) {
  cudnn::Pointers all = pointers_of(in);
  all.insert({{kDescaleQ, scales.q_descale.untyped_data()},
              {kDescaleK, scales.k_descale.untyped_data()},
              {kDescaleV, scales.v_descale.untyped_data()},
              {kScaleS, scales.weight_scale.untyped_data()},
              {kDescaleS, scales.weight_descale.untyped_data()},
              {kScaleO, scales.o_scale.untyped_data()},
              {kO, o->untyped_data()},
              {kStats, stats->untyped_data()},
              {kAmaxS, workspace->untyped_data()},
              {kAmaxO, static_cast<char*>(workspace->untyped_data()) + kAmaxBytes / 2}});
  return all;
}

}  // namespace

// ---- Handlers ---------------------------------------------------------------------------------------

ffi::Error AttentionFp8FwdInitialize(In q, In k, In v, In q_descale, In k_descale, In v_descale, In weight_scale,
                                     In weight_descale, In o_scale, In q_len, In k_len, Out o, Out stats, Out workspace,
                                     UndroppedAttributes attributes) {
  const AttentionOperands in{"te_attention_fp8_fwd", q, k, v, q_len, k_len};
  const Scales scales{q_descale, k_descale, v_descale, weight_scale, weight_descale, o_scale};
  const AttentionOptions options = attributes.options();
  AttentionShape s{};
  const Check check = check_call(in, scales, o, stats, workspace, options, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::prepare(call_of(in, s, options), after_amaxes(workspace));
}

ffi::Error AttentionFp8Fwd(cudaStream_t stream, In q, In k, In v, In q_descale, In k_descale, In v_descale,
                           In weight_scale, In weight_descale, In o_scale, In q_len, In k_len, Out o, Out stats,
                           Out workspace, UndroppedAttributes attributes) {
  const AttentionOperands in{"te_attention_fp8_fwd", q, k, v, q_len, k_len};
  const Scales scales{q_descale, k_descale, v_descale, weight_scale, weight_descale, o_scale};
  const AttentionOptions options = attributes.options();
  AttentionShape s{};
  const Check check = check_call(in, scales, o, stats, workspace, options, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::execute(call_of(in, s, options), pointers_of(in, scales, o, stats, workspace), after_amaxes(workspace),
                        stream);
}

}  // namespace te

TE_HANDLER(attention_fp8_fwd, AttentionFp8Fwd)
TE_INITIALIZER(attention_fp8_fwd, AttentionFp8FwdInitialize)

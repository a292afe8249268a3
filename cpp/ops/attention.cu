// te_attention_fwd, te_attention_bwd: flash attention by cuDNN, with dropout or without; te_attention_qkv_fwd and _bwd:
// that of queries, keys and values in one array, read and written where they lie.
//
// Buffers as in attention.h: q, k, v, o and their gradients bf16 or f16; `seed` is absent exactly where there is no
// dropout. Forward, 2 (q + k + v + o) bytes move and neither weights nor mask are stored: the backward pass draws the
// mask again. cuDNN's graphs are made when a program is compiled, and kept. Only the host's compiler is needed.
#include <array>

#include "ops/attention.h"

namespace te {

struct AttentionAttributes : AttentionOptions {
  Buffers buffers;
};

namespace {

constexpr int64_t kHeadSizeStep = 8;
constexpr char kQkvFwd[] = "te_attention_qkv_fwd", kQkvBwd[] = "te_attention_qkv_bwd";

Check& check_dropout(Check& check, const In& seed, float rate) {
  check.that(rate >= 0.f && rate < 1.f, "dropout", "a rate in [0, 1)", rate);
  if (rate == 0.f) return check.that(absent(seed), "seed", "none without dropout", seed);
  return shape(check.that(seed.element_type() == DType::U32, "seed", "u32[4]", seed), "seed", seed, {4});
}

Check check_call(const AttentionOperands& in, const In& seed, const AttentionAttributes& attributes,
                 AttentionShape& s) {
  Check check(in.op);
  check.that(is_16_bits(in.q), "q", "bf16 or f16", in.q);
  if (check.failed()) return check;
  check = check_attention(in, attributes, kHeadSizeStep, s);
  if (check.failed() || check_lengths(check, in, s).failed()) return check;
  return check_dropout(check, seed, attributes.dropout);
}

AttentionCall call_of(const AttentionOperands& in, const AttentionShape& s, const AttentionAttributes& a,
                      AttentionKind kind) {
  return {kind, in.q.element_type(), s, a, in.lengths()};
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
  check_parts(check, in.q, call_of(in, s, attributes, kBackward));
  return like(like(like(check, "dq", *dq, in.q), "dk", *dk, in.k), "dv", *dv, in.v);
}

void insert_seed(cudnn::Pointers& all, const In& seed) {
  if (absent(seed)) return;
  all.insert({{kSeed, seed.untyped_data()}, {kOffset, static_cast<uint64_t*>(seed.untyped_data()) + 1}});
}

cudnn::Pointers pointers_of(const AttentionOperands& in, const In& seed) {
  cudnn::Pointers all = pointers_of(in);
  insert_seed(all, seed);
  return all;
}

// ---- Queries, keys and values in one array ----------------------------------------------------------

Check check_qkv(const char* op, const In& qkv, const In& seed, const AttentionAttributes& attributes,
                AttentionShape& s) {
  Check check(op);
  const auto dims = qkv.dimensions();
  check.that(is_16_bits(qkv), "qkv", "bf16 or f16", qkv);
  check.that(dims.size() == 5 && dims[2] == 3, "qkv", "[B, S, 3, G, D]", qkv);
  if (check.failed()) return check;
  s = {dims[0], dims[1], dims[1], dims[3], 1, dims[4]};
  check_sizes(check, "qkv", qkv, attributes, kHeadSizeStep, s);
  return check_dropout(check, seed, attributes.dropout);
}

Check& check_qkv_results(Check& check, const ffi::AnyBuffer& o, const ffi::AnyBuffer& stats, const In& qkv,
                         const AttentionShape& s) {
  shape(check.dtype("o", o, qkv.element_type()), "o", o, {s.batch, s.q_size, s.groups, s.head_size});
  return shape(check.dtype("stats", stats, DType::F32), "stats", stats, {s.batch, s.groups, s.q_size});
}

AttentionCall call_of_qkv(const In& qkv, const AttentionShape& s, const AttentionAttributes& a, AttentionKind kind) {
  return {kind, qkv.element_type(), s, a, /*lengths=*/false, /*stacked=*/true};
}

Check check_qkv_forward(const In& qkv, const In& seed, Out& o, Out& stats, const AttentionAttributes& attributes,
                        AttentionShape& s) {
  Check check = check_qkv(kQkvFwd, qkv, seed, attributes, s);
  return check.failed() ? check : check_qkv_results(check, *o, *stats, qkv, s);
}

Check check_qkv_backward(const In& stats, const In& qkv, const In& o, const In& dout, const In& seed, Out& dqkv,
                         const AttentionAttributes& attributes, AttentionShape& s) {
  Check check = check_qkv(kQkvBwd, qkv, seed, attributes, s);
  if (check.failed()) return check;
  check_qkv_results(check, o, stats, qkv, s);
  check_parts(like(check, "do", dout, o), qkv, call_of_qkv(qkv, s, attributes, kBackward));
  return like(check, "dqkv", *dqkv, qkv);
}

void insert_parts(cudnn::Pointers& all, void* qkv, const AttentionShape& s, std::array<AttentionUid, 3> uids) {
  for (size_t i = 0; i < uids.size(); ++i) {
    all[uids[i]] = static_cast<uint16_t*>(qkv) + static_cast<int64_t>(i) * s.groups * s.head_size;
  }
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
  return cudnn::prepare(graph_call(in.op, call_of(in, s, attributes, kForward)), cudnn::workspace_of(workspace));
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
  return cudnn::execute(graph_call(in.op, call_of(in, s, attributes, kForward)), std::move(pointers),
                        cudnn::workspace_of(workspace), stream);
}

ffi::Error AttentionBwdInitialize(In stats, In q, In k, In v, In o, In dout, In seed, In q_len, In k_len, Out dq,
                                  Out dk, Out dv, Out workspace, AttentionAttributes attributes) {
  const AttentionOperands in{"te_attention_bwd", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_backward(in, seed, stats, o, dout, dq, dk, dv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return prepare_in_parts(in.op, call_of(in, s, attributes, kBackward), cudnn::workspace_of(workspace));
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
  return execute_in_parts(in.op, call_of(in, s, attributes, kBackward), pointers, cudnn::workspace_of(workspace),
                          stream);
}

ffi::Error AttentionQkvFwdInitialize(In qkv, In seed, Out o, Out stats, Out workspace, AttentionAttributes attributes) {
  AttentionShape s{};
  const Check check = check_qkv_forward(qkv, seed, o, stats, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::prepare(graph_call(kQkvFwd, call_of_qkv(qkv, s, attributes, kForward)), cudnn::workspace_of(workspace));
}

ffi::Error AttentionQkvFwd(cudaStream_t stream, In qkv, In seed, Out o, Out stats, Out workspace,
                           AttentionAttributes attributes) {
  AttentionShape s{};
  const Check check = check_qkv_forward(qkv, seed, o, stats, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  cudnn::Pointers pointers{{kO, o->untyped_data()}, {kStats, stats->untyped_data()}};
  insert_parts(pointers, qkv.untyped_data(), s, {kQ, kK, kV});
  insert_seed(pointers, seed);
  return cudnn::execute(graph_call(kQkvFwd, call_of_qkv(qkv, s, attributes, kForward)), std::move(pointers),
                        cudnn::workspace_of(workspace), stream);
}

ffi::Error AttentionQkvBwdInitialize(In stats, In qkv, In o, In dout, In seed, Out dqkv, Out workspace,
                                     AttentionAttributes attributes) {
  AttentionShape s{};
  const Check check = check_qkv_backward(stats, qkv, o, dout, seed, dqkv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return prepare_in_parts(kQkvBwd, call_of_qkv(qkv, s, attributes, kBackward), cudnn::workspace_of(workspace));
}

ffi::Error AttentionQkvBwd(cudaStream_t stream, In stats, In qkv, In o, In dout, In seed, Out dqkv, Out workspace,
                           AttentionAttributes attributes) {
  AttentionShape s{};
  const Check check = check_qkv_backward(stats, qkv, o, dout, seed, dqkv, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  cudnn::Pointers pointers{{kStats, stats.untyped_data()}, {kO, o.untyped_data()}, {kDo, dout.untyped_data()}};
  insert_parts(pointers, qkv.untyped_data(), s, {kQ, kK, kV});
  insert_parts(pointers, dqkv->untyped_data(), s, {kDq, kDk, kDv});
  insert_seed(pointers, seed);
  return execute_in_parts(kQkvBwd, call_of_qkv(qkv, s, attributes, kBackward), pointers, cudnn::workspace_of(workspace),
                          stream);
}

}  // namespace te

TE_ATTRIBUTES(te::AttentionAttributes, TE_ATTRIBUTE(float, scale), TE_ATTRIBUTE(float, dropout),
              TE_ATTRIBUTE(bool, causal), TE_ATTRIBUTE(int64_t, left), TE_ATTRIBUTE(te::Buffers, buffers));

TE_HANDLER(attention_fwd, AttentionFwd)
TE_INITIALIZER(attention_fwd, AttentionFwdInitialize)
TE_HANDLER(attention_bwd, AttentionBwd)
TE_INITIALIZER(attention_bwd, AttentionBwdInitialize)
TE_HANDLER(attention_qkv_fwd, AttentionQkvFwd)
TE_INITIALIZER(attention_qkv_fwd, AttentionQkvFwdInitialize)
TE_HANDLER(attention_qkv_bwd, AttentionQkvBwd)
TE_INITIALIZER(attention_qkv_bwd, AttentionQkvBwdInitialize)

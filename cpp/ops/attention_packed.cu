// te_attention_packed_fwd, te_attention_packed_bwd: flash attention by cuDNN of rows that hold several sequences each;
// and te_attention_blank, for what lies between them.
//
// Buffers as in attention.h, bf16 or f16, with head sizes in multiples of 16; but
//   q_start, k_start  s32[B, N] the token each sequence begins at in its row, below 0 where there is none
//   q_len, k_len      s32[B, N] tokens of each sequence, 0 where there is none
//   kept              pred[B], or absent: rows of o that are not are NaN
//   stats             f32[B, Q, G, R]
// The n-th sequence of queries sees the n-th of keys. Where no sequence is, o, stats and gradients are 0, and operands
// must be finite: cuDNN reads tiles, and multiplies what is too much by 0. te_attention_blank makes them so:
//
//   x, y              [B, S, ..] of a dtype of 2 bytes or more; only zeros are written, unless x is a slice that
//                     XLA has read where it lies: then y has another buffer, and x is copied first
//   start, length     s32[B, N]
#include <map>

#include "ops/attention.h"
#include "ops/packed_rows.h"

namespace te {

namespace {

struct PackedOperands : AttentionOperands {
  const In &q_start, &k_start;
  int64_t most() const { return q_len.dimensions()[1]; }
};

AttentionCall call_of(const PackedOperands& in, const AttentionShape& s, const UndroppedAttributes& a,
                      AttentionKind kind) {
  return {kind, in.q.element_type(), s, a.options(), /*lengths=*/true, /*stacked=*/false, in.most()};
}

Check check_call(const PackedOperands& in, Out& workspace, const UndroppedAttributes& attributes, AttentionShape& s) {
  Check check(in.op);
  check.that(is_16_bits(in.q), "q", "bf16 or f16", in.q);
  check.that(in.q_len.dimensions().size() == 2, "q_len", "s32[B, N]", in.q_len);
  if (check.failed()) return check;
  check = check_attention(in, attributes.options(), /*step=*/16, s);
  for (const auto& [name, x] : {std::pair<const char*, const In&>{"q_start", in.q_start},
                                {"q_len", in.q_len},
                                {"k_start", in.k_start},
                                {"k_len", in.k_len}}) {
    shape(check.dtype(name, x, DType::S32), name, x, {s.batch, in.most()});
  }
  check_parts(check, in.q, call_of(in, s, attributes, kPackedForward));
  return check.that(static_cast<int64_t>(workspace->size_bytes()) >= 3 * offset_bytes(s.batch * in.most()), "workspace",
                    "room for the offsets of sequences", *workspace);
}

Check& check_stats_and_o(Check& check, const ffi::AnyBuffer& stats, const ffi::AnyBuffer& o, const In& q,
                         const AttentionShape& s) {
  shape(check.dtype("stats", stats, DType::F32), "stats", stats, {s.batch, s.q_size, s.groups, s.repeats});
  return like(check, "o", o, q);
}

ffi::Error launched(const char* op, cudaError_t error) {
  return error == cudaSuccess ? ffi::Error::Success()
                              : ffi::Error::Internal(std::string(op) + ": " + cudaGetErrorString(error));
}

// The workspace begins with the offsets.
cudnn::Workspace after_offsets(Out& workspace, int64_t sequences) {
  const cudnn::Workspace whole = cudnn::workspace_of(workspace);
  const int64_t offsets = 3 * offset_bytes(sequences);
  return {static_cast<char*>(whole.data) + offsets, whole.bytes - offsets};
}

ffi::Error prepare(const PackedOperands& in, const AttentionShape& s, const UndroppedAttributes& attributes,
                   AttentionKind kind, Out& workspace) {
  if (s.empty() || in.most() == 0) return ffi::Error::Success();
  return prepare_in_parts(in.op, call_of(in, s, attributes, kind), after_offsets(workspace, s.batch * in.most()));
}

// of_queries, of_keys: results, whose tokens are those of queries or of keys; pointers: of what else in has not.
ffi::Error execute(const PackedOperands& in, const bool* kept, const AttentionShape& s,
                   const UndroppedAttributes& attributes, AttentionKind kind, std::map<AttentionUid, Out*> of_queries,
                   std::map<AttentionUid, Out*> of_keys, cudnn::Pointers pointers, Out& workspace,
                   cudaStream_t stream) {
  if (s.empty() || in.most() == 0) return ffi::Error::Success();
  const int64_t most = in.most(), sequences = s.batch * most;
  pointers.merge(pointers_of(in));
  cudaError_t error = cudaSuccess;
  const auto add = [&](const std::map<AttentionUid, Out*>& results, const In& start, const In& length, int64_t tokens) {
    for (const auto& [uid, x] : results) {
      pointers[uid] = (*x)->untyped_data();
      if (error != cudaSuccess) return;
      error = write_between(stream, s.batch, most, start.typed_data<int32_t>(), length.typed_data<int32_t>(),
                            uid == kO ? kept : nullptr, tokens,
                            static_cast<int64_t>((*x)->size_bytes()) / (s.batch * tokens), pointers[uid]);
    }
  };
  add(of_queries, in.q_start, in.q_len, s.q_size);
  add(of_keys, in.k_start, in.k_len, s.k_size);
  if (error != cudaSuccess) return launched(in.op, error);
  const auto offsets = [&](int i) {
    return reinterpret_cast<int64_t*>(static_cast<char*>(workspace->untyped_data()) + i * offset_bytes(sequences));
  };
  return in_parts(call_of(in, s, attributes, kind), [&](const AttentionCall& part, int64_t first) {
    const int32_t* q_start = in.q_start.typed_data<int32_t>() + first * most;
    const int32_t* k_start = in.k_start.typed_data<int32_t>() + first * most;
    const cudaError_t written = write_offsets(
        stream, part.shape.batch, most, {q_start, s.q_size, s.heads() * s.head_size, offsets(0)},
        {k_start, s.k_size, s.groups * s.head_size, offsets(1)}, {q_start, s.q_size, s.heads(), offsets(2)});
    if (written != cudaSuccess) return launched(in.op, written);
    cudnn::Pointers of_part = from_example(part, first, pointers);
    of_part.insert({{kQOffset, offsets(0)}, {kKOffset, offsets(1)}, {kStatsOffset, offsets(2)}});
    return cudnn::execute(graph_call(in.op, part), std::move(of_part), after_offsets(workspace, sequences), stream);
  });
}

Check check_forward(const PackedOperands& in, const In& kept, Out& o, Out& stats, Out& workspace,
                    const UndroppedAttributes& attributes, AttentionShape& s) {
  Check check = check_call(in, workspace, attributes, s);
  if (check.failed()) return check;
  if (present(kept)) shape(check.dtype("kept", kept, DType::PRED), "kept", kept, {s.batch});
  return check_stats_and_o(check, *stats, *o, in.q, s);
}

Check check_backward(const PackedOperands& in, const In& stats, const In& o, const In& dout, Out& dq, Out& dk, Out& dv,
                     Out& workspace, const UndroppedAttributes& attributes, AttentionShape& s) {
  Check check = check_call(in, workspace, attributes, s);
  if (check.failed()) return check;
  like(check_stats_and_o(check, stats, o, in.q, s), "do", dout, in.q);
  return like(like(like(check, "dq", *dq, in.q), "dk", *dk, in.k), "dv", *dv, in.v);
}

Check check_blank(const In& x, const In& start, const In& length, Out& y) {
  Check check("te_attention_blank");
  check.that(x.dimensions().size() >= 2 && ffi::ByteWidth(x.element_type()) >= 2, "x", "[B, S, ..] of 2 bytes or more",
             x);
  check.that(
      y->element_type() == x.element_type() && y->dimensions() == x.dimensions(), "y", [&] { return describe(x); }, *y);
  for (const auto& [name, s] : {std::pair<const char*, const In&>{"start", start}, {"length", length}}) {
    check.dtype(name, s, DType::S32);
    check.that(s.dimensions().size() == 2 && s.dimensions() == start.dimensions(), name, "s32[B, N]", s);
  }
  if (check.failed()) return check;
  return check.that(start.dimensions()[0] == x.dimensions()[0], "start", "a row for each of x", start);
}

}  // namespace

// ---- Handlers ---------------------------------------------------------------------------------------

ffi::Error AttentionPackedFwdInitialize(In q, In k, In v, In q_start, In q_len, In k_start, In k_len, In kept, Out o,
                                        Out stats, Out workspace, UndroppedAttributes attributes) {
  const PackedOperands in{{"te_attention_packed_fwd", q, k, v, q_len, k_len}, q_start, k_start};
  AttentionShape s{};
  const Check check = check_forward(in, kept, o, stats, workspace, attributes, s);
  return check.failed() ? check.error() : prepare(in, s, attributes, kPackedForward, workspace);
}

ffi::Error AttentionPackedFwd(cudaStream_t stream, In q, In k, In v, In q_start, In q_len, In k_start, In k_len,
                              In kept, Out o, Out stats, Out workspace, UndroppedAttributes attributes) {
  const PackedOperands in{{"te_attention_packed_fwd", q, k, v, q_len, k_len}, q_start, k_start};
  AttentionShape s{};
  const Check check = check_forward(in, kept, o, stats, workspace, attributes, s);
  if (check.failed()) return check.error();
  return execute(in, present(kept) ? kept.typed_data<bool>() : nullptr, s, attributes, kPackedForward,
                 {{kO, &o}, {kStats, &stats}}, {}, {}, workspace, stream);
}

ffi::Error AttentionPackedBwdInitialize(In stats, In q, In k, In v, In o, In dout, In q_start, In q_len, In k_start,
                                        In k_len, Out dq, Out dk, Out dv, Out workspace,
                                        UndroppedAttributes attributes) {
  const PackedOperands in{{"te_attention_packed_bwd", q, k, v, q_len, k_len}, q_start, k_start};
  AttentionShape s{};
  const Check check = check_backward(in, stats, o, dout, dq, dk, dv, workspace, attributes, s);
  return check.failed() ? check.error() : prepare(in, s, attributes, kPackedBackward, workspace);
}

ffi::Error AttentionPackedBwd(cudaStream_t stream, In stats, In q, In k, In v, In o, In dout, In q_start, In q_len,
                              In k_start, In k_len, Out dq, Out dk, Out dv, Out workspace,
                              UndroppedAttributes attributes) {
  const PackedOperands in{{"te_attention_packed_bwd", q, k, v, q_len, k_len}, q_start, k_start};
  AttentionShape s{};
  const Check check = check_backward(in, stats, o, dout, dq, dk, dv, workspace, attributes, s);
  if (check.failed()) return check.error();
  return execute(in, nullptr, s, attributes, kPackedBackward, {{kDq, &dq}}, {{kDk, &dk}, {kDv, &dv}},
                 {{kStats, stats.untyped_data()}, {kO, o.untyped_data()}, {kDo, dout.untyped_data()}}, workspace,
                 stream);
}

ffi::Error AttentionBlank(cudaStream_t stream, In x, In start, In length, Out y) {
  const Check check = check_blank(x, start, length, y);
  if (check.failed()) return check.error();
  if (x.element_count() == 0) return ffi::Error::Success();
  const int64_t rows = x.dimensions()[0], tokens = x.dimensions()[1];
  if (y->untyped_data() != x.untyped_data()) {
    const cudaError_t copied =
        cudaMemcpyAsync(y->untyped_data(), x.untyped_data(), x.size_bytes(), cudaMemcpyDeviceToDevice, stream);
    if (copied != cudaSuccess) return launched("te_attention_blank", copied);
  }
  return launched("te_attention_blank",
                  write_between(stream, rows, start.dimensions()[1], start.typed_data<int32_t>(),
                                length.typed_data<int32_t>(), /*kept=*/nullptr, tokens,
                                static_cast<int64_t>(x.size_bytes()) / (rows * tokens), y->untyped_data()));
}

}  // namespace te

TE_HANDLER(attention_packed_fwd, AttentionPackedFwd)
TE_INITIALIZER(attention_packed_fwd, AttentionPackedFwdInitialize)
TE_HANDLER(attention_packed_bwd, AttentionPackedBwd)
TE_INITIALIZER(attention_packed_bwd, AttentionPackedBwdInitialize)
TE_HANDLER(attention_blank, AttentionBlank)

// te_attention_cached: attention of the next tokens over a KV cache, by cuDNN, which keeps no statistics of it.
//
// Buffers as in attention.h, bf16 or f16, with lengths: the last of each row's queries is the last of its keys. What
// lies past them is not read, and o is not written there. 2 (q + the keys and values so far + o) bytes move.
#include <utility>

#include "ops/attention.h"

namespace te {

namespace {

Check check_call(const AttentionOperands& in, Out& o, const UndroppedAttributes& attributes, AttentionShape& s) {
  Check check(in.op);
  check.that(is_16_bits(in.q), "q", "bf16 or f16", in.q);
  if (check.failed()) return check;
  check = check_attention(in, attributes.options(), /*step=*/8, s);
  if (check.failed()) return check;
  return like(check_lengths(check.that(in.lengths(), "q_len", "s32[B]", in.q_len), in, s), "o", *o, in.q);
}

cudnn::Call call_of(const AttentionOperands& in, const AttentionShape& s, const UndroppedAttributes& attributes) {
  return graph_call(in.op, {kCachedForward, in.q.element_type(), s, attributes.options(), /*lengths=*/true});
}

}  // namespace

ffi::Error AttentionCachedInitialize(In q, In k, In v, In q_len, In k_len, Out o, Out workspace,
                                     UndroppedAttributes attributes) {
  const AttentionOperands in{"te_attention_cached", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_call(in, o, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  return cudnn::prepare(call_of(in, s, attributes), cudnn::workspace_of(workspace));
}

ffi::Error AttentionCached(cudaStream_t stream, In q, In k, In v, In q_len, In k_len, Out o, Out workspace,
                           UndroppedAttributes attributes) {
  const AttentionOperands in{"te_attention_cached", q, k, v, q_len, k_len};
  AttentionShape s{};
  const Check check = check_call(in, o, attributes, s);
  if (check.failed()) return check.error();
  if (s.empty()) return ffi::Error::Success();
  cudnn::Pointers pointers = pointers_of(in);
  pointers.insert({{kO, o->untyped_data()}});
  return cudnn::execute(call_of(in, s, attributes), std::move(pointers), cudnn::workspace_of(workspace), stream);
}

}  // namespace te

TE_HANDLER(attention_cached, AttentionCached)
TE_INITIALIZER(attention_cached, AttentionCachedInitialize)
